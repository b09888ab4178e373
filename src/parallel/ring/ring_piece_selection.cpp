// Selecting and measuring where several ranks share a sequence that comes in pieces: what one rank alone would select
// for the whole sequence.
#include <algorithm>
#include <cstring>

#include "core/errors.h"
#include "parallel/ring/ring_selection.h"

namespace sb {

void RingSelection::append_statistics(const Exec& exec, Communicator& group, int layer, const AttentionShape& shape,
                                      const ContextLayout& layout, const SequencePiece& piece, const float* k) {
  const BlockScoring scoring(selector_.config());
  const int64_t width = scoring.block_floats(shape.head_dim);
  const int64_t whole = (piece.length + scoring.block - 1) / scoring.block;
  const auto held = [&](int rank) { return layout.held_from(rank, 0, piece.begin); };
  // Shares of equal size: the most blocks any rank has.
  int64_t most = 0, tokens = 0;
  for (int r = 0; r < layout.ranks(); ++r) most = std::max<int64_t>(most, std::ssize(held(r)));
  for (const int32_t b : held(group.rank())) tokens += layout.block_length(0, b);
  const int64_t share = most * shape.kv_heads * width;
  const ArenaScope scope(*exec.scratch);
  const std::span<float> all(exec.scratch->allocate_array<float>(share * layout.ranks()),
                             static_cast<size_t>(share * layout.ranks()));
  BlockStatistics::fill(exec, shape, scoring, k, tokens, all.data() + group.rank() * share, step_.planes(layer, shape));
  group.all_gather(all, share);

  std::vector<float>& kept = cut_[layer].statistics;
  if (piece.begin == 0) {
    const auto floats = static_cast<size_t>(BlockStatistics::floats(scoring, shape, whole));
    if (kept.capacity() < floats) std::vector<float>().swap(kept);
    kept.reserve(floats);
    kept.resize(floats);
  }
  for (int r = 0; r < layout.ranks(); ++r) {
    const float* source = all.data() + r * share;
    for (int head = 0; head < shape.kv_heads; ++head)
      for (const int32_t b : held(r)) {
        std::memcpy(kept.data() + (head * whole + b) * width, source, width * sizeof(float));
        source += width;
      }
  }
}

void RingSelection::select_piece(const Exec& exec, int rank, int layer, const AttentionShape& shape,
                                 const ContextLayout& layout, const PackedSequences& piece, const float* q,
                                 const float* k, BlockIndex& index) {
  const SelectionConfig& config = selector_.config();
  if (step_.by_planes() && !piece.again) step_.add(layer, measure_planes(exec, shape, q, k, piece.tokens()));
  SelectionRequest request;
  request.layer = layer;
  request.shape = shape;
  request.tiles = sequence_tiles(config, piece.piece.length, piece.budgets.empty() ? config.budget : piece.budgets[0]);
  SB_USER_CHECK(request.tiles.blocks() <= 65536,
                "a sequence of {} tokens has more than 65,536 blocks of {}; use larger blocks", request.tiles.tokens,
                request.tiles.block);
  const uint8_t dense[] = {runs_dense(config, layer, request.tiles)};
  builder_.begin(index, {config.block, config.query_block, selector_.list_heads(shape)}, layout.cu_seqlens(), dense,
                 exec.pool->threads());
  if (!dense[0]) {
    request.threshold = step_.threshold(layer, request.tiles);
    request.planes = step_.planes(layer, shape);
    request.q = q;
    request.statistics = cut_[layer].statistics.data();
    request.place = index.sequences()[0];
    request.held_blocks = layout.held_from(rank, 0, piece.piece.begin);
    if (config.pattern == SelectionPattern::window) {
      select_window_rows(request);
    } else {
      const MassCounts counts = selector_.select_held(exec, request, builder_);
      if (!piece.again) step_.count(layer, request.tiles, counts);
    }
  }
  builder_.finish(*exec.pool);
}

const CoverageSample& RingSelection::measure_piece(const Exec& exec, Communicator& group, int layer,
                                                   const AttentionShape& shape, const ContextLayout& layout,
                                                   const PackedSequences& piece, const float* q, const float* keys,
                                                   const BlockIndex& index, int rows) {
  const SelectionConfig& config = selector_.config();
  SelectionRequest request;
  request.shape = shape;
  request.tiles = sequence_tiles(config, piece.piece.length, piece.budgets.empty() ? config.budget : piece.budgets[0]);
  request.q = q;
  request.k = keys;
  request.statistics = cut_[layer].statistics.data();
  request.planes = step_.planes(layer, shape);
  request.held_blocks = layout.held(group.rank(), 0);
  request.begin = piece.piece.begin;
  request.end = piece.piece_end();
  CoverageSample& sum = cut_[layer].coverage;
  if (piece.piece.begin == 0) sum = {};
  return sum += measure_sequence(exec, group, request, layout, 0, index, rows);
}

int64_t RingSelection::append_scratch_bytes(const AttentionShape& shape, int64_t max_tokens, int ranks) const {
  const BlockScoring scoring(selector_.config());
  const int64_t blocks = (max_tokens + scoring.block - 1) / scoring.block;
  return Arena::rounded(blocks * ranks * shape.kv_heads * scoring.block_floats(shape.head_dim) *
                        static_cast<int64_t>(sizeof(float)));
}

int64_t RingSelection::kept_bytes(const AttentionShape& shape, int64_t tokens) const {
  const BlockScoring scoring(selector_.config());
  return BlockStatistics::floats(scoring, shape, (tokens + scoring.block - 1) / scoring.block) *
         static_cast<int64_t>(sizeof(float));
}

int64_t RingSelection::kept_bytes_used() const {
  int64_t bytes = 0;
  for (const CutSequence& cut : cut_) bytes += static_cast<int64_t>(cut.statistics.capacity() * sizeof(float));
  return bytes;
}

}  // namespace sb
