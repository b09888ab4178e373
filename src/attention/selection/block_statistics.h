#pragma once

#include <cstdint>

#include "attention/attention.h"
#include "attention/selection/selection_config.h"

namespace sb {

// Mean and variance per channel of every key block of one sequence, as the matrix that scores multiply with:
// row (kv head, block) holds μ, then (with BlockScore::moments) σ².
class BlockStatistics {
 public:
  // `k` points to the sequence's first token, [tokens, kv_heads, d]. The last block may be partial.
  static int64_t row_width(BlockScore score, int head_dim) {
    return score == BlockScore::moments ? 2 * head_dim : head_dim;
  }
  static int64_t floats(BlockScore score, const AttentionShape& shape, int64_t blocks) {
    return blocks * shape.kv_heads * row_width(score, shape.head_dim);
  }
  // Fills `rows` [kv_heads, blocks, row_width].
  static void fill(const Exec& exec, const AttentionShape& shape, BlockScore score, const float* k, int64_t tokens,
                   int block, float* rows);
};

// The other operand, for one query: scale·q, then scale²/2·q², so that the product with a block's row estimates the log
// of its mean exponential score (second cumulant).
void fill_query_row(BlockScore score, const float* q, int head_dim, float scale, float* row);

}  // namespace sb
