#include "parallel/ring/gpu/cuda_ring_memory.h"

#include <algorithm>

#include "attention/gpu/coverage/coverage.h"
#include "attention/gpu/select/step_values.h"
#include "attention/most_sequences.h"
#include "attention/select/block_statistics.h"
#include "parallel/ring/gpu/ring_lists.h"

namespace sb {

bool ring_selects_on_device(const SelectionConfig& selection) {
  return selection.pattern != SelectionPattern::vertical_slash &&
         !(selection.pattern == SelectionPattern::mass && selection.order == SelectionOrder::lookahead);
}

// Tokens that have copies on all ranks, at most: never more than a rank holds itself, and only sequences longer than
// the limit of dense ones have any.
int64_t CudaRingMemory::copies_limit(int64_t max_tokens) const {
  const SelectionConfig& selection = options.selection;
  if (selection.pattern == SelectionPattern::dense || ranks == 1) return 0;
  if (!on_device) return max_tokens;
  return std::min(max_tokens, sparse_sequences(max_tokens) * ranks * selection.sink_blocks * selection.block);
}

int64_t CudaRingMemory::sparse_sequences(int64_t max_tokens) const {
  return std::min(max_tokens * ranks / (options.selection.dense_limit() + 1), most_packed_sequences(max_tokens));
}

CudaRingMemory::Lists CudaRingMemory::sparse_lists(int64_t max_tokens) const {
  const SelectionConfig& selection = options.selection;
  if (selection.pattern == SelectionPattern::dense) return {};
  const int64_t blocks = max_tokens * ranks / selection.block + 1;
  const int64_t budget = std::max(selection.budget, options.largest_budget);
  // A threshold or a coverage to reach may take twice the quota.
  const int64_t times =
      selection.pattern == SelectionPattern::topk || selection.pattern == SelectionPattern::window ? 1 : 2;
  const int64_t list =
      std::min(blocks, times * (budget / selection.block + 1) + selection.sink_blocks + selection.local_blocks + 2);
  return {selection.query_block, list * (selection.block / block())};
}

CudaRingMemory::Lists CudaRingMemory::dense_lists(int64_t max_tokens) const {
  const SelectionConfig& selection = options.selection;
  const int64_t list = options.longest_dense(max_tokens * ranks) / selection.block + 1;
  return {std::min(selection.block, kDenseQueryBlock), list * (selection.block / block()), true};
}

// A pass over so many keys with so many queries.
CudaRingMemory::PassBytes CudaRingMemory::pass_bytes(const AttentionShape& shape, int64_t keys, int64_t queries,
                                                     const Lists& lists) const {
  const int64_t tokens = keys + queries;
  const gpu::Shape dims{tokens, shape.heads, shape.kv_heads, shape.head_dim, shape.scale};
  const int32_t whole[2] = {0, static_cast<int32_t>(tokens)};
  gpu::Tiling tiling = gpu::make_tiling(dims, shape.kv_heads, static_cast<int>(lists.query_block), whole);
  // Made-up sequences begin with a block of keys, or are the rank's own: short ones at worst as on one GPU.
  const int64_t sequences = keys > 0 ? keys / options.selection.block + 1 : queries / 64 + 64;
  tiling.subtiles += static_cast<int32_t>(tiling.tile * sequences);
  const int64_t tile_tokens = int64_t{tiling.tile} * tiling.tokens;
  const int64_t items = shape.kv_heads * tiling.parts * (queries / tile_tokens + sequences);
  const int64_t places = shape.kv_heads * (tokens / block() + sequences);
  const int64_t entries = shape.kv_heads * (queries / lists.query_block + sequences) * lists.entries;
  // Few columns are cut finer than many: room for fewer than there may be, too.
  gpu::WorkLimits limits =
      gpu::work_limits(std::min<int64_t>(places, 2 * multiprocessors),
                       entries * tiling.parts * (lists.query_block / tiling.tokens), multiprocessors);
  limits.items = static_cast<int32_t>(places) + limits.splits;
  const auto bytes = [](int64_t count, size_t each) { return Arena::rounded(count * static_cast<int64_t>(each)); };
  const auto tensor = [&](int64_t heads) {
    return Arena::rounded(tokens * heads * shape.head_dim * dtype_bytes(options.dtype));
  };
  const int64_t both = 2 * tensor(shape.heads) + 2 * tensor(shape.kv_heads) +
                       bytes(tokens * shape.heads, sizeof(float)) + bytes(items, sizeof(gpu::ForwardItem)) +
                       bytes(4, sizeof(int32_t));
  return {
      both,
      both + 2 * tensor(shape.heads) + 2 * tensor(shape.kv_heads) + bytes(limits.items, sizeof(gpu::BackwardItem)) +
          bytes(limits.splits, sizeof(gpu::SplitColumn)) + bytes(1, sizeof(gpu::WorkCounts)) +
          bytes(static_cast<int64_t>(gpu::statistics_size(dims, tiling)), sizeof(float)) +
          // Only the Hopper kernels sum dQ in memory.
          (options.dtype == DType::f32 ? 0
                                       : bytes(static_cast<int64_t>(gpu::dq_sum_size(dims, tiling)), sizeof(float))) +
          bytes(static_cast<int64_t>(gpu::partials_size(dims, limits.slots)), sizeof(float))};
}

// Passes with lists from the host have the attention's own way of using memory.
CudaRingMemory::PassBytes CudaRingMemory::most_pass_bytes(const AttentionShape& shape, int64_t keys, int64_t queries,
                                                          int threads) const {
  PassBytes most;
  if (!on_device) {
    const int64_t tokens = keys + queries;
    const auto tensor = [&](int64_t heads) {
      return Arena::rounded(tokens * heads * shape.head_dim * dtype_bytes(options.dtype));
    };
    const int64_t both = 2 * tensor(shape.heads) + 2 * tensor(shape.kv_heads) +
                         Arena::rounded(tokens * shape.heads * int64_t{sizeof(float)}) +
                         kernels->scratch_bytes(shape, tokens, threads);
    return {both, both + 2 * tensor(shape.heads) + 2 * tensor(shape.kv_heads)};
  }
  for (const Lists& lists : {sparse_lists(queries), dense_lists(queries)}) {
    if (lists.entries == 0) continue;
    const PassBytes bytes = pass_bytes(shape, keys, queries, lists);
    most = {std::max(most.forward, bytes.forward), std::max(most.backward, bytes.backward)};
  }
  return most;
}

// What selecting takes, before anything else is there.
int64_t CudaRingMemory::select_bytes(const AttentionShape& shape, int64_t max_tokens) const {
  if (!on_device) return 0;
  const SelectionConfig& selection = options.selection;
  const auto bytes = [](int64_t count, size_t each) { return Arena::rounded(count * static_cast<int64_t>(each)); };
  const int64_t all = max_tokens * ranks;
  int64_t most = 0;
  for (const Lists& lists : {sparse_lists(max_tokens), dense_lists(max_tokens)}) {
    if (lists.entries == 0) continue;
    const bool sparse = !lists.dense;
    // A sequence that is not dense is longer than the limit; dense ones may be many.
    const int64_t sequences = sparse ? sparse_sequences(max_tokens) + 1 : max_tokens / 64 + 64;
    const int64_t rows = shape.kv_heads * (max_tokens / lists.query_block + sequences);
    const int64_t fine = all / block() + sequences;
    const int64_t longest = sparse ? all : options.longest_dense(all);
    const int64_t line = (longest / block() + 16) / 16 * 16;
    const int64_t lists_bytes = bytes(rows * std::min(lists.entries, longest / block() + 1), sizeof(uint32_t)) +
                                bytes(rows * line, 1) + bytes(shape.kv_heads * fine, sizeof(int32_t));
    int64_t scoring = 0, coverage = 0, energies = 0;
    if (selection.judges_by_planes())
      energies = bytes(
          gpu::plane_sums_partials(max_tokens / kPlaneSampling + max_tokens / 64 + 64, shape.kv_heads, shape.head_dim),
          sizeof(double));
    if (sparse && selection.pattern != SelectionPattern::window) {
      // 32-bit words of all that is kept of a block. Parts and keys come in whole groups of blocks.
      const bool by_planes = selection.judges_by_planes();
      const int parts = by_planes ? selection.block : BlockScoring(selection).parts();
      const int64_t depth = by_planes ? gpu::hopper_plane_depth(selection) : 0;
      const int64_t words =
          parts * (by_planes ? std::max<int64_t>(selection.score_channels, depth / 2) : 2 * int64_t{shape.head_dim});
      const auto blocks_of = [&](int64_t count) {
        return parts == 1 ? count : count + gpu::kStatisticsGroup * sequences;
      };
      const int64_t blocks = blocks_of(all / selection.block + sequences);
      const int64_t piece = blocks_of(shape.kv_heads * (max_tokens / selection.block + sequences));
      int64_t slices = 1;  // at most, as in hopper_score_tile()
      while (shape.group() % slices != 0 || shape.group() / slices > 16) ++slices;
      const int64_t packed = all / 64 + 64;  // sequences, dense ones too
      const int64_t stride = (longest / selection.block + 64) / 64 * 64;
      scoring = bytes(ranks * piece * words, sizeof(uint32_t)) +
                bytes(shape.kv_heads * (blocks * words + max_tokens * depth / 2), sizeof(uint32_t)) +
                // Of long sequences, scores that wait for their sums: 192 rows of every multiprocessor.
                bytes(multiprocessors * 192 * (longest / selection.block + 64), sizeof(uint16_t)) +
                bytes(std::min(kRingBatchMasses + shape.heads * selection.query_block * stride,
                               slices * shape.kv_heads * max_tokens * stride),
                      sizeof(uint16_t)) +
                bytes(2 * packed, sizeof(unsigned long long)) + bytes(packed, sizeof(float));
    }
    if (options.coverage_rows > 0) {
      // Of dense sequences, too, which may lie beside the sparse ones.
      const int64_t packed = most_packed_sequences(max_tokens);
      const int64_t blocks = all / selection.block + packed, sampled = options.coverage_rows * packed;
      coverage =
          bytes(gpu::most_coverage_floats(options.coverage_rows, blocks, shape.heads, shape.kv_heads), sizeof(float)) +
          bytes(sampled * shape.heads * shape.head_dim * dtype_bytes(options.dtype), 1) + 4 * Arena::kAlignment;
    }
    most = std::max(most, lists_bytes + std::max({scoring, coverage, energies}));
  }
  return most;
}

int64_t CudaRingMemory::scratch_bytes(const AttentionShape& shape, int64_t max_tokens, int threads) const {
  const int64_t key_width = int64_t{shape.kv_heads} * shape.head_dim,
                query_width = int64_t{shape.heads} * shape.head_dim;
  const auto tensor = [&](DType dtype, int64_t elements) { return Arena::rounded(elements * dtype_bytes(dtype)); };
  const int64_t sum = tensor(DType::f32, max_tokens * query_width),
                key_sum = tensor(DType::f32, max_tokens * key_width);
  const int64_t copies = copies_limit(max_tokens), others = ranks == 1 ? 0 : max_tokens;
  const PassBytes ring = most_pass_bytes(shape, others, max_tokens, threads),
                  own = most_pass_bytes(shape, 0, max_tokens, threads);
  const PassBytes copied = copies == 0 ? PassBytes{} : most_pass_bytes(shape, copies, max_tokens, threads);
  const int64_t pieces = 2 * copies * key_width;
  const int64_t forward = std::max(
      copies == 0 ? 0 : tensor(options.dtype, pieces) + copied.forward,
      travel.forward_scratch_bytes(options.dtype, max_tokens * key_width) + std::max(ring.forward, own.forward));
  const int64_t backward =
      2 * key_sum +
      std::max(
          copies == 0 ? 0 : tensor(options.dtype, pieces) + tensor(DType::f32, pieces) + copied.backward,
          travel.backward_scratch_bytes(options.dtype, max_tokens * key_width) + std::max(ring.backward, own.backward));
  return std::max(select_bytes(shape, max_tokens), sum + std::max(forward, backward));
}

int64_t CudaRingMemory::state_bytes(const AttentionShape& shape, int64_t max_tokens) const {
  const SelectionConfig& selection = options.selection;
  const int64_t passes = ranks + 1;
  if (!on_device) {
    const RingAttention::Lists lists = options.selected_lists(shape, max_tokens * ranks);
    const int64_t blocks = max_tokens * ranks / selection.block + 1, rows = lists.rows(max_tokens);
    // Lists by rows and by columns; of every pass its rows and the order of its work. Rows of gathered columns are
    // bits.
    return rows * (8 * lists.entries + lists.columns / 4) +
           passes * (16 * max_tokens + (2 * (blocks / ranks + 1) * 64 + 4 * lists.columns) * lists.heads + rows * 64);
  }
  const Lists lists = sparse_lists(max_tokens);
  if (lists.entries == 0) return 0;
  const int64_t sequences = sparse_sequences(max_tokens) + 1;
  const int64_t rows = shape.kv_heads * (max_tokens / lists.query_block + sequences);
  const int64_t columns = shape.kv_heads * passes * (2 * max_tokens / block() + sequences);
  return rows * (8 * lists.entries + 4 * (passes + 1)) + 4 * columns + 4 * 256;
}

CudaRingMemory::PassBytes CudaRingMemory::piece_pass_bytes(const AttentionShape& shape, int64_t queries,
                                                           int64_t gathered) const {
  const gpu::Shape dims{queries, shape.heads, shape.kv_heads, shape.head_dim, shape.scale};
  const int32_t all[2] = {0, static_cast<int32_t>(queries)};
  const auto tensor = [&](DType dtype, int64_t tokens, int64_t heads) {
    return Arena::rounded(tokens * heads * shape.head_dim * dtype_bytes(dtype));
  };
  const auto floats = [](size_t count) { return Arena::rounded(static_cast<int64_t>(count * sizeof(float))); };
  const int64_t both = 2 * tensor(options.dtype, gathered, shape.kv_heads) +
                       tensor(options.dtype, queries, shape.heads) + Arena::rounded(4 * int64_t{sizeof(int32_t)});
  int64_t sums = 0;
  for (const int query_block : {options.selection.query_block, std::min(options.selection.block, kDenseQueryBlock)}) {
    const gpu::Tiling tiling = gpu::make_tiling(dims, shape.kv_heads, query_block, all);
    sums = std::max(sums, floats(gpu::statistics_size(dims, tiling)) + floats(gpu::dq_sum_size(dims, tiling)));
  }
  const int64_t slots = 6 * int64_t{multiprocessors};  // see fair_share
  return {both + floats(static_cast<size_t>(queries * shape.heads)),
          both + 2 * tensor(DType::f32, gathered, shape.kv_heads) + sums +
              floats(gpu::partials_size(dims, static_cast<int>(slots))) + floats(0)};
}

PieceBytes CudaRingMemory::piece_bytes(const AttentionShape& shape, const Attention::PieceLimits& limits) const {
  const SelectionConfig& selection = options.selection;
  const int64_t key_width = int64_t{shape.kv_heads} * shape.head_dim, queries = limits.max_tokens;
  const int64_t held = ContextLayout::most_sequence_tokens(ranks, selection.block, limits.longest);
  // Sinks: of them a rank gives at most `own`, and reads those of all others in whole blocks.
  const bool any = selection.pattern != SelectionPattern::dense && ranks > 1;
  const int64_t own = any ? std::min<int64_t>(held, int64_t{selection.sink_blocks} * selection.block) : 0;
  const int64_t copies = any ? int64_t{selection.sink_blocks} * selection.block : 0;
  const auto tensor = [](DType dtype, int64_t elements) { return Arena::rounded(elements * dtype_bytes(dtype)); };
  const int64_t in_order = 2 * tensor(limits.dtype, held * key_width);
  const int64_t sum = tensor(DType::f32, queries * shape.heads * shape.head_dim);
  const int64_t given = ranks * own * 2 * key_width;
  // Keys that end within an item of the kernels are gathered, too.
  const auto padded = [](int64_t tokens) { return tokens == 0 ? 0 : tokens + gpu::kBlock; };
  const PassBytes travelling = piece_pass_bytes(shape, queries, block() < gpu::kBlock ? padded(held) : 0),
                  copied = piece_pass_bytes(shape, queries, padded(copies));
  const int64_t forward = std::max(tensor(limits.dtype, given) + copied.forward,
                                   travel.forward_scratch_bytes(limits.dtype, held * key_width) + travelling.forward);
  const int64_t backward =
      std::max(tensor(limits.dtype, given) + tensor(DType::f32, given) + copied.backward,
               travel.backward_scratch_bytes(limits.dtype, held * key_width) + travelling.backward);
  PieceBytes piece;
  piece.scratch = in_order + sum + std::max(forward, backward);
  // Of every pass its queries' rows, lists by rows and by columns, tiles and key blocks; a quarter is to spare.
  const int64_t blocks = (held + queries) / block() + 2, work = blocks + 3 * int64_t{multiprocessors};
  for (const RingAttention::Lists& lists :
       {options.selected_lists(shape, limits.longest),
        RingAttention::Lists{std::min(selection.block, kDenseQueryBlock), shape.kv_heads,
                             options.longest_dense(limits.longest) / selection.block + 1}}) {
    const int64_t rows = lists.rows(queries), entries = lists.entries * (selection.block / block());
    const int64_t pass = 4 * (queries + held + 2 * gpu::kBlock) +
                         shape.kv_heads * work * int64_t{2 * sizeof(gpu::BackwardItem)} +
                         (rows + shape.heads * queries / 8) * int64_t{sizeof(gpu::ForwardItem)} + 64 * 1024;
    piece.state = std::max(piece.state, (8 * rows * entries + (ranks + 1) * pass) * 5 / 4);
  }
  return piece;
}

}  // namespace sb
