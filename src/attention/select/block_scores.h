#pragma once

#include <cstdint>
#include <vector>

#include "attention/select/block_statistics.h"
#include "attention/select/tiles.h"

namespace sb {

// Estimated masses of key blocks for the tokens of one key/value head of one sequence. One object a thread: it owns the
// buffers of its products.
class BlockScorer {
 public:
  // `q` points to token `first_token` of the sequence [tokens, heads, d]; `statistics` is what BlockStatistics filled
  // for `blocks` blocks, by `planes` the same.
  BlockScorer(const AttentionShape& shape, const BlockScoring& scoring, const float* q, const float* statistics,
              int64_t blocks, int64_t first_token = 0, const LayerPlanes* planes = nullptr);
  void set_first_token(int64_t first_token) { first_token_ = first_token; }

  // Log relative masses of blocks 0 … count-1 for tokens [begin, end) under kv head `head`: row t of the result (stride
  // `count`) belongs to token begin + t. Over the query heads of the group the largest relative mass counts; by planes
  // there is one score per token, of the group's mean query.
  const float* token_masses(int head, int64_t begin, int64_t end, int64_t count);
  // The same for whole tiles at once: the sum over a tile's tokens; row i belongs to tile first_tile + i.
  const float* tile_masses(int head, const SequenceTiles& tiles, int64_t first_tile, int64_t last_tile, int64_t count);

 private:
  // Scores of blocks 0 … count-1, unnormalised, for tokens [begin, end) and each query head of the group, or for `rows`
  // query rows.
  void score_planes(int head, int64_t begin, int64_t end, int64_t count);
  void score_statistics(int head, int64_t begin, int64_t end, int64_t count);
  void score_rows(int head, int64_t rows, int64_t count);

  AttentionShape shape_;
  BlockScoring scoring_;
  const float* q_;
  const float* statistics_;
  int64_t blocks_, first_token_;
  const LayerPlanes* planes_;
  std::vector<float> queries_, scratch_, scores_, masses_, tile_masses_;
};

}  // namespace sb
