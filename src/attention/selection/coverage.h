#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/block_index.h"
#include "attention/selection/block_statistics.h"
#include "attention/selection/tiles.h"

namespace sb {

// How much attention mass a sequence keeps in one layer, measured exactly on a few of its rows, averaged over rows and
// heads.
struct CoverageSample {
  double held = 0;            // by the lists in use
  std::vector<double> curve;  // at every budget of the grid, were each token to choose by its own scores
  int64_t rows = 0;
};

// Budgets (keys per query) at which curves are reported for sequences of this length: ascending, the last holds
// everything.
std::vector<int64_t> coverage_grid(int64_t tokens, int block);

struct CoverageRequest {
  const float* q;           // the sequence's first token, [tokens, heads, d]
  const float* k;           // [tokens, kv_heads, d]
  const float* statistics;  // BlockStatistics rows of the sequence
  BlockScoring scoring;
  int rows;                 // tokens to sample, spread evenly
  const BlockIndex* index;  // the lists in use, and which of its sequences this is
  int sequence;
};

CoverageSample measure_coverage(const Exec& exec, const AttentionShape& shape, const SequenceTiles& tiles,
                                const CoverageRequest& request);

// The pieces of it, for ranks that share a sequence. Token `i` of `rows` that are sampled:
constexpr int64_t sampled_token(int64_t i, int64_t rows, int64_t tokens) {
  return (2 * i + 1) * tokens / (2 * rows);
}
// One of them under one kv head, summed over the query heads of the group.
struct SampledToken {
  double held = 0;
  std::vector<double> curve;
};
// Exact masses of a token: of every block it sees [group, token / block + 1], and of the gathered columns of its lists
// [group]; `scores` are its own of the competing blocks.
struct TokenMasses {
  const double *blocks, *columns;
  const float* scores;
};
SampledToken judge_token(const AttentionShape& shape, const SequenceTiles& tiles, const BlockIndex& index, int sequence,
                         std::span<const int64_t> grid, int64_t token, int kv_head, const TokenMasses& masses);

}  // namespace sb
