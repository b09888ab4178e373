#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/index/block_index.h"
#include "attention/select/block_statistics.h"
#include "attention/select/planes.h"
#include "attention/select/tiles.h"
#include "core/measured_coverage.h"

namespace sb {

struct CoverageRequest {
  const float* q;           // the sequence's first token, [tokens, heads, d]
  const float* k;           // [tokens, kv_heads, d]
  const float* statistics;  // BlockStatistics rows of the sequence
  BlockScoring scoring;
  int rows;                 // tokens to sample, spread evenly
  const BlockIndex* index;  // the lists in use, and which of its sequences this is
  int sequence;
  const LayerPlanes* planes = nullptr;  // score: planes
  // Of a piece: its tokens, of which `q` has the queries, and where its keys lie from `k` on.
  int64_t begin = 0, end = -1;  // -1: all of the sequence
  std::span<const KeyPage> pages = {};
};

// Of a piece, its share: the samples of all pieces add up to that of the sequence.
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
