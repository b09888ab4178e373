#pragma once

#include <cstdint>

#include "attention/attention.h"
#include "attention/select/selection_config.h"

namespace sb {

// What key blocks are judged by, and how it lies: a block is cut into parts of equal length, and every part has a row
// of statistics. A block's rows lie channel by channel, [row width, parts], so that one pass over the channels
// multiplies neighbouring parts; a block that is one part has its row as it is.
struct BlockScoring {
  BlockScore score;
  int block;  // tokens of a key block
  int part;   // tokens of a part; divides the block

  explicit BlockScoring(const SelectionConfig& config)
      : BlockScoring(config.score, config.block, config.score_tokens) {}
  // `score_tokens` as in the configuration: 0 is the whole block.
  BlockScoring(BlockScore by, int block_tokens, int score_tokens = 0)
      : score(by), block(block_tokens), part(score_tokens == 0 ? block_tokens : score_tokens) {}

  int parts() const { return block / part; }
  // A single key has no variance.
  bool moments() const { return score == BlockScore::moments && part > 1; }
  int64_t row_width(int head_dim) const { return moments() ? 2 * head_dim : head_dim; }
  int64_t block_floats(int head_dim) const { return row_width(head_dim) * parts(); }
};

// Mean and variance per channel of every part of the key blocks of one sequence, as the matrix that scores multiply
// with: the rows hold μ, then (with moments) σ².
class BlockStatistics {
 public:
  static int64_t floats(const BlockScoring& scoring, const AttentionShape& shape, int64_t blocks) {
    return blocks * shape.kv_heads * scoring.block_floats(shape.head_dim);
  }
  // Fills `rows` [kv_heads, blocks, block_floats]. `k` points to the sequence's first token, [tokens, kv_heads, d]. The
  // last block may be partial; parts without keys are zeros.
  static void fill(const Exec& exec, const AttentionShape& shape, const BlockScoring& scoring, const float* k,
                   int64_t tokens, float* rows);
};

// The other operand, for one query: scale·q, then (with moments) scale²/2·q², so that the product with a part's row
// estimates the log of its mean exponential score (second cumulant).
void fill_query_row(const BlockScoring& scoring, const float* q, int head_dim, float scale, float* row);

}  // namespace sb
