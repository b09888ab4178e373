#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/index/block_index.h"
#include "attention/select/selection_config.h"
#include "attention/select/tiles.h"

namespace sb {

// MTraining's pattern for one sequence and one query head, found from its last queries.
struct VerticalSlash {
  std::vector<int32_t> verticals;  // columns (tokens), ascending
  std::vector<int32_t> slashes;    // distances in blocks between query block and key block, ascending; always holds 0
};

struct VerticalSlashLimits {
  double vertical_coverage;  // select the fewest columns whose mass reaches this share …
  double slash_coverage;
  int64_t vertical_cap;  // … but no more than this many
  int64_t slash_cap;
};

// A tuned budget moves the caps in proportion; the coverages stay.
VerticalSlashLimits vertical_slash_limits(const SelectionConfig& config, int64_t budget);

// Queries used for the estimate.
constexpr int kEstimationQueries = 64;

// From the mass of every column (token) and of every distance between query and key in blocks. The smallest sets that
// reach the coverages, within the caps; the diagonal is forced and counts against its cap.
VerticalSlash select_vertical_slash(std::span<const double> columns, std::span<const double> distances,
                                    const VerticalSlashLimits& limits);

// The same from `probabilities` [rows, tokens]: softmax of the last `rows` queries over all keys (zero above the
// diagonal).
VerticalSlash find_vertical_slash(const float* probabilities, int rows, int64_t tokens, int block,
                                  const VerticalSlashLimits& limits);

// The row of one query tile: its key blocks (`listed` is room for blocks() flags), and the columns outside them.
void vertical_slash_row(const SequenceTiles& tiles, const VerticalSlash& found, int64_t tile,
                        std::vector<uint8_t>& listed, std::vector<IndexEntry>& row, std::vector<int32_t>& columns);

}  // namespace sb
