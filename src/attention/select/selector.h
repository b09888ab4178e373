#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/index/block_index.h"
#include "attention/select/block_scores.h"
#include "attention/select/learned_selection.h"
#include "attention/select/planes.h"
#include "attention/select/selection_config.h"
#include "attention/select/staircase.h"
#include "attention/select/tiles.h"

namespace sb {

// One sequence of a micro-batch to select for.
struct SelectionRequest {
  int layer = 0;
  AttentionShape shape;
  SequenceTiles tiles;
  const float* q = nullptr;           // its first token, [tokens, heads, d]
  const float* k = nullptr;           // [tokens, kv_heads, d]
  const float* statistics = nullptr;  // what BlockStatistics filled for it
  BlockIndex::Sequence place;         // its rows in the index under construction
  float threshold = 0;                // `mass`, causal: mass_threshold()
  // Where several ranks share the sequence: the key blocks this one holds, ascending. Then `q` has their tokens only
  // and only their rows are selected; statistics still cover the whole sequence.
  std::span<const int32_t> held_blocks = {};
  const LayerPlanes* planes = nullptr;  // score: planes
  // Of a piece: its tokens. Then `q` has these only and only their rows are selected; statistics cover what is before
  // `end` and lie as those of the whole sequence.
  int64_t begin = 0, end = -1;  // -1: all of it
  int64_t last() const { return end < 0 ? tiles.tokens : end; }
};

SequenceTiles sequence_tiles(const SelectionConfig& config, int64_t tokens, int64_t budget);
// Whether a sequence is computed whole in a layer.
bool runs_dense(const SelectionConfig& config, int layer, const SequenceTiles& tiles);

// Selects the pairs of sequences by the configured pattern. The same inputs give the same rows for any number of
// threads.
class Selector {
 public:
  explicit Selector(const SelectionConfig& config);

  const SelectionConfig& config() const { return config_; }
  int list_heads(const AttentionShape& shape) const {
    return config_.lists_per_query_head() ? shape.heads : shape.kv_heads;
  }
  // Hands every row of the sequence to the builder. Counts what it selected where that depends on a threshold.
  MassCounts select(const Exec& exec, const SelectionRequest& request, BlockIndexBuilder& builder) const;
  // The same for the rows of request.held_blocks alone.
  MassCounts select_held(const Exec& exec, const SelectionRequest& request, BlockIndexBuilder& builder) const;
  // Appends the list of one tile alone, for decoding: the scorer needs the queries of that tile only. Causal patterns
  // with lists per kv head.
  void select_tile(const SelectionRequest& request, int head, int64_t tile, BlockScorer& scorer,
                   std::vector<IndexEntry>& row) const;

 private:
  MassCounts select_by_scores(const Exec& exec, const SelectionRequest& request, StaircaseRule::Kind kind,
                              BlockIndexBuilder& builder) const;
  void select_most_mass(const Exec& exec, const SelectionRequest& request, BlockIndexBuilder& builder) const;
  void select_vertical_slash(const Exec& exec, const SelectionRequest& request, BlockIndexBuilder& builder) const;
  StaircaseRule rule(StaircaseRule::Kind kind, const SequenceTiles& tiles, int64_t tile, float threshold) const;

  SelectionConfig config_;
};

// The best `pairs` (tile, block) pairs of one list head by mass over the whole sequence, forced and own blocks besides:
// the most estimated mass that this number of pairs can hold. masses[tile] are the tile's log masses over
// competing(tile) blocks.
std::vector<std::vector<IndexEntry>> most_mass_rows(const SequenceTiles& tiles,
                                                    const std::vector<std::vector<float>>& masses, int64_t pairs);

}  // namespace sb
