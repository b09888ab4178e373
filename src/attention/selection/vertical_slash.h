#pragma once

#include <cstdint>
#include <vector>

#include "attention/selection/tiles.h"

namespace sb {

// MTraining's pattern for one sequence and one query head, found from its last queries.
struct VerticalSlash {
  std::vector<int32_t> verticals;  // columns (tokens), ascending
  std::vector<int32_t> slashes;    // distances in blocks between query block and key block, ascending; always holds 0
};

struct VerticalSlashLimits {
  double vertical_coverage;  // choose the fewest columns whose mass reaches this share …
  double slash_coverage;
  int64_t vertical_cap;  // … but no more than this many
  int64_t slash_cap;
};

// Queries used for the estimate.
constexpr int kEstimationQueries = 64;

// `probabilities` [rows, tokens]: softmax of the last `rows` queries over all keys (zero above the diagonal).
// The smallest sets that reach the coverages, within the caps; the diagonal is forced and counts against its cap.
VerticalSlash find_vertical_slash(const float* probabilities, int rows, int64_t tokens, int block,
                                  const VerticalSlashLimits& limits);

}  // namespace sb
