#include "attention/gpu/attention_memory.h"

#include <algorithm>

#include "attention/gpu/coverage/coverage.h"
#include "attention/gpu/plan/work.h"
#include "attention/gpu/select/step_values.h"
#include "attention/gpu/select/vertical_slash.h"
#include "attention/most_sequences.h"

namespace sb::gpu {

// `mass` with look-ahead: any query block may take everything, so that every list has room for it.
bool AttentionMemory::selects_most_mass() const {
  return options.selection.pattern == SelectionPattern::mass && options.selection.order == SelectionOrder::lookahead;
}
// How far tuned budgets may raise the caps of `vertical_slash`.
int64_t AttentionMemory::most_caps() const {
  return std::max<int64_t>(2, (options.largest_budget + options.selection.budget - 1) / options.selection.budget);
}
int64_t AttentionMemory::sparse_sequences(int64_t max_tokens) const {
  return std::min(max_tokens / (options.selection.dense_limit() + 1) + 1, most_packed_sequences(max_tokens));
}
int AttentionMemory::list_query_block() const {
  return options.selection.pattern == SelectionPattern::vertical_slash ? slash_query_block(options.selection)
                                                                       : options.selection.query_block;
}
// Of one list head, for micro-batches of at most so many tokens: tuned budgets raise the cap.
int64_t AttentionMemory::gathered_columns(int64_t max_tokens) const {
  if (options.selection.pattern != SelectionPattern::vertical_slash) return 0;
  const int64_t sequences = sparse_sequences(max_tokens);
  return std::min(max_tokens, sequences * most_caps() * options.selection.vertical_cap) +
         2 * kGatheredPiece * sequences;
}

int64_t AttentionMemory::statistics_bytes(const AttentionShape& shape, int64_t max_tokens) const {
  const SelectionConfig& selection = options.selection;
  const int64_t whole_groups = kStatisticsGroup * sparse_sequences(max_tokens);
  if (selection.judges_by_planes()) {
    // The channels of keys that count, as floats or padded for the Hopper kernels, and there those of the queries too.
    const int64_t depth = hopper_plane_depth(selection),
                  key = std::max<int64_t>(4 * selection.score_channels, 2 * depth);
    return (max_tokens / selection.block + whole_groups) * selection.block * key + max_tokens * 2 * depth;
  }
  const int64_t blocks = (max_tokens + selection.block - 1) / selection.block + most_packed_sequences(max_tokens);
  const BlockScoring scoring(selection);
  if (!selection.scores_blocks() || scoring.parts() == 1) return 2 * blocks * shape.head_dim * 4;
  return (blocks + whole_groups) * scoring.block_floats(shape.head_dim) * 4;
}

int64_t AttentionMemory::scratch_bytes(const AttentionShape& shape, int64_t max_tokens) const {
  const int64_t d = shape.head_dim;
  const int64_t sequences = most_packed_sequences(max_tokens);
  // Every sequence is rounded up to whole tiles, and query blocks may cut tiles short.
  const Shape dims{max_tokens, shape.heads, shape.kv_heads, shape.head_dim, shape.scale};
  const int32_t all[2] = {0, static_cast<int32_t>(max_tokens)};
  const auto subtiles_of = [&](int list_heads, int query_block) {
    const Tiling tiling = make_tiling(dims, list_heads, query_block, all);
    return (tiling.subtiles + 2 * sequences) * (shape.heads / tiling.heads) + 2;
  };
  int64_t subtiles = subtiles_of(shape.kv_heads, 0);
  const int list_heads = options.selection.lists_per_query_head() ? shape.heads : shape.kv_heads;
  if (options.selection.pattern != SelectionPattern::dense)
    subtiles = std::max(subtiles, subtiles_of(list_heads, list_query_block()));
  const int64_t rows = subtiles * kSubtileRows;
  const int64_t slots = 6 * multiprocessors;  // see fair_share
  const int64_t columns = list_heads * gathered_columns(max_tokens);
  int64_t backward = 4 * (2 * rows + rows * d + slots * 2 * kBlock * d + columns * 2 * d);
  // Copies of their rows, places, and the parts that gathered_parts() makes of few columns.
  if (columns > 0)
    backward += 2 * columns * 2 * d +
                list_heads * (max_tokens / kBlock + sequences) * static_cast<int64_t>(sizeof(GatheredPlace)) +
                3 * int64_t{multiprocessors} * 2 * kBlock * d * 4;
  int64_t selection = 0;
  if (options.selection.pattern != SelectionPattern::dense) {
    const int64_t blocks = (max_tokens + options.selection.block - 1) / options.selection.block + sequences;
    const int64_t fine = (max_tokens + kBlock - 1) / std::min(options.selection.block, kBlock) + 16;
    const int64_t lists = (max_tokens + list_query_block() - 1) / list_query_block() + sequences;
    const int64_t masses = std::min(batch_masses, shape.kv_heads * max_tokens * (blocks + 64)) +
                           shape.group() * options.selection.query_block * (blocks + 64);
    // Of long sequences, scores that wait for their sums: 192 rows of every multiprocessor.
    selection = int64_t{multiprocessors} * 192 * 2 * (max_tokens / options.selection.block + 64);
    selection +=
        list_heads * (statistics_bytes(shape, max_tokens) + lists * fine + 4 * (fine + sequences)) + 2 * masses;
    if (options.selection.pattern == SelectionPattern::vertical_slash)
      selection += 2 * columns * 2 * d +  // the forward's copies lie beside
                   list_heads * (4 * (max_tokens / kSlashChunk + sequences) * kSlashChunkFloats +
                                 4 * kSlashChunk * sequences + 5 * blocks);
    if (selects_most_mass())  // masses of all query blocks, and the counts of every sequence
      selection += shape.kv_heads * (2 * lists * (blocks + 64) + 4 * pool_counts_size(sequences, lists + sequences));
  }
  if (options.selection.pattern != SelectionPattern::dense) selection += 20 * sequences;  // counts and thresholds
  if (options.selection.judges_by_planes())
    selection += 8 * plane_sums_partials(max_tokens / kPlaneSampling + sequences, shape.kv_heads, shape.head_dim);
  return std::max(backward, selection + coverage_bytes(shape, max_tokens)) + 16 * 1024;
}

int64_t AttentionMemory::coverage_bytes(const AttentionShape& shape, int64_t max_tokens) const {
  const int64_t blocks = max_tokens / options.selection.block + most_packed_sequences(max_tokens);
  return most_coverage_floats(options.coverage_rows, blocks, shape.heads, shape.kv_heads) * int64_t{sizeof(float)};
}

int64_t AttentionMemory::state_bytes(const AttentionShape& shape, int64_t max_tokens) const {
  if (options.selection.pattern == SelectionPattern::dense) return 0;
  const int block = std::min(options.selection.block, kBlock);
  const int64_t blocks = (max_tokens + block - 1) / block + most_packed_sequences(max_tokens);
  const SelectionConfig& selection = options.selection;
  // Tuned budgets rise above the configured one, and `mass` may list twice what it is given.
  const int64_t most = (selection.pattern == SelectionPattern::mass ? 2 : 1) * options.largest_budget;
  int64_t list = (std::max(2 * selection.budget, most) + selection.query_block) / block;
  if (selects_most_mass()) list = blocks;
  if (selection.pattern == SelectionPattern::vertical_slash)
    list = most_caps() * selection.slash_cap * (list_query_block() / block + 1);
  list = std::min(blocks, list + (selection.sink_blocks + selection.local_blocks + 2) * (selection.block / block));
  const int list_heads = options.selection.lists_per_query_head() ? shape.heads : shape.kv_heads;
  const int64_t rows =
      ((max_tokens + list_query_block() - 1) / list_query_block() + most_packed_sequences(max_tokens)) * list_heads;
  const int64_t items = blocks * list_heads + 3 * multiprocessors;
  const int64_t columns = gathered_columns(max_tokens);
  return rows * (list * 8 + std::min(columns, max_tokens) / 8) + list_heads * columns * 4 +
         items * static_cast<int64_t>(sizeof(BackwardItem) + 4) + 16 * 1024;
}

}  // namespace sb::gpu
