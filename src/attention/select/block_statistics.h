#pragma once

#include <cstdint>

#include "attention/attention.h"
#include "attention/select/planes.h"
#include "attention/select/selection_config.h"

namespace sb {

// What key blocks are judged by, and how it lies: a block is cut into parts of equal length, and every part has a row
// of statistics. A block's rows lie channel by channel, [row width, parts], so that one pass over the channels
// multiplies neighbouring parts; a block that is one part has its row as it is. By planes every key is a part, and its
// row has the selected channels: two of them, rounded to bf16, in one float.
struct BlockScoring {
  BlockScore score;
  int block;     // tokens of a key block
  int part;      // tokens of a part; divides the block
  int channels;  // by planes; otherwise 0

  explicit BlockScoring(const SelectionConfig& config)
      : BlockScoring(config.scores_blocks() || config.score != BlockScore::planes ? config.score : BlockScore::moments,
                     config.block, config.score_tokens, config.score_channels) {}
  // `score_tokens` and `score_channels` as in the configuration: 0 tokens are the whole block.
  BlockScoring(BlockScore by, int block_tokens, int score_tokens = 0, int score_channels = 0)
      : score(by),
        block(block_tokens),
        part(by == BlockScore::planes ? 1
             : score_tokens == 0      ? block_tokens
                                      : score_tokens),
        channels(by == BlockScore::planes ? score_channels : 0) {}

  int parts() const { return block / part; }
  bool planes() const { return score == BlockScore::planes; }
  // A single key has no variance.
  bool moments() const { return score == BlockScore::moments && part > 1; }
  int64_t row_width(int head_dim) const { return planes() ? channels / 2 : moments() ? 2 * head_dim : head_dim; }
  int64_t block_floats(int head_dim) const { return row_width(head_dim) * parts(); }
};

// Mean and variance per channel of every part of the key blocks of one sequence, as the matrix that scores multiply
// with: the rows hold μ, then (with moments) σ². By planes: the selected channels of every key.
class BlockStatistics {
 public:
  static int64_t floats(const BlockScoring& scoring, const AttentionShape& shape, int64_t blocks) {
    return blocks * shape.kv_heads * scoring.block_floats(shape.head_dim);
  }
  // Fills `rows` [kv_heads, blocks, block_floats]. `k` points to the sequence's first token, [tokens, kv_heads, d]. The
  // last block may be partial: parts without keys are zeros, or by planes the last key once more, which cannot be
  // larger than itself. `planes` where the scoring is by planes.
  static void fill(const Exec& exec, const AttentionShape& shape, const BlockScoring& scoring, const float* k,
                   int64_t tokens, float* rows, const LayerPlanes* planes = nullptr);
};

// The other operand, for one query: scale·q, then (with moments) scale²/2·q², so that the product with a part's row
// estimates the log of its mean exponential score (second cumulant).
void fill_query_row(const BlockScoring& scoring, const float* q, int head_dim, float scale, float* row);

// And by planes, for one token [heads, d] under a kv head: the selected channels of the group's mean query, scaled.
void fill_mean_query(const AttentionShape& shape, const LayerPlanes& planes, int kv_head, const float* q, float* row);

// InternalError unless scores by planes have planes of this shape.
void check_planes(const BlockScoring& scoring, const AttentionShape& shape, const LayerPlanes* planes);

}  // namespace sb
