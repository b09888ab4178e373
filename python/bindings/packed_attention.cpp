#include "python/bindings/packed_attention.h"

#include <nanobind/nanobind.h>

#include <algorithm>

#include "attention/cpu/block_sparse.h"
#include "attention/select/block_statistics.h"
#include "core/errors.h"

namespace sb::python {
namespace {

// The sums of a layer from numbers one after the other, and back.
PlaneSums sums_from(std::span<const double> values, const AttentionShape& shape) {
  const auto count = static_cast<size_t>(shape.kv_heads) * static_cast<size_t>(shape.head_dim);
  SB_USER_CHECK(values.size() == 1 + 3 * count, "planes: {} numbers where {} kv heads of {} channels have {}",
                values.size(), shape.kv_heads, shape.head_dim, 1 + 3 * count);
  SB_USER_CHECK(values[0] > 0, "planes: no tokens were seen yet; look at some with a dense pattern first");
  PlaneSums sums;
  sums.tokens = values[0];
  const auto take = [&](size_t part) {
    const auto from = values.subspan(1 + part * count, count);
    return std::vector<double>(from.begin(), from.end());
  };
  sums.query_squares = take(0);
  sums.key_sums = take(1);
  sums.key_squares = take(2);
  return sums;
}

void write_sums(const PlaneSums& sums, std::span<double> values) {
  std::ranges::fill(values, 0.0);
  values[0] = sums.tokens;
  auto out = values.begin() + 1;
  for (const auto* part : {&sums.query_squares, &sums.key_sums, &sums.key_squares})
    out = std::ranges::copy(*part, out).out;
}

// Where the byte of (row, key block) lies. Rows of the index follow each other; a row has room for the key blocks of a
// sequence as long as the whole micro-batch.
int64_t row_bytes(const PackedAttention::Call& call, int block) {
  return call.cu_seqlens.back() / block + 1;
}

void save_lists(const BlockIndex& index, int64_t width, std::span<uint8_t> lists, ThreadPool& pool) {
  SB_CHECK(index.rows() * width <= std::ssize(lists), "{} bytes do not hold {} lists of {}", lists.size(), index.rows(),
           width);
  pool.parallel_slices(index.rows(), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      uint8_t* bytes = lists.data() + r * width;
      std::fill_n(bytes, width, PackedAttention::kNotListed);
      const BlockIndex::Row row = index.row(r);
      for (size_t i = 0; i < row.blocks.size(); ++i) bytes[row.blocks[i]] = row.first[i];
    }
  });
  std::fill(lists.begin() + index.rows() * width, lists.end(), PackedAttention::kNotListed);
}

// The lists come back as they were, or damaged by whoever had them: the builder checks every row.
void load_rows(std::span<const uint8_t> lists, int64_t width, const BlockIndex& index, BlockIndexBuilder& builder,
               ThreadPool& pool) {
  SB_CHECK(index.rows() * width <= std::ssize(lists), "{} bytes do not hold {} lists of {}", lists.size(), index.rows(),
           width);
  pool.parallel_slices(index.rows(), [&](int64_t begin, int64_t end, int thread) {
    std::vector<IndexEntry> entries;
    for (int64_t r = begin; r < end; ++r) {
      entries.clear();
      const uint8_t* bytes = lists.data() + r * width;
      for (int64_t b = 0; b < width; ++b)
        if (bytes[b] != PackedAttention::kNotListed) entries.push_back({static_cast<uint16_t>(b), bytes[b]});
      builder.set_row(thread, r, entries);
    }
  });
}

}  // namespace

PackedAttention::PackedAttention(const SelectionConfig& config, int threads)
    : config_(config), selector_(config), pool_(threads) {
  SB_USER_CHECK(
      config.pattern != SelectionPattern::vertical_slash,
      "pattern vertical_slash lists single keys, whose number does not follow from the shapes, as torch asks of "
      "an operator's outputs; use topk, topp, mass, window or dense");
  SB_USER_CHECK(threads >= 1, "{} threads", threads);
}

SequenceTiles PackedAttention::tiles_of(const Call& call, int sequence) const {
  const auto at = static_cast<size_t>(sequence);
  return sequence_tiles(config_, call.cu_seqlens[at + 1] - call.cu_seqlens[at],
                        call.budgets.empty() ? config_.budget : call.budgets[at]);
}

void PackedAttention::check(const Call& call) const {
  const size_t sequences = call.cu_seqlens.size() - 1;
  SB_USER_CHECK(call.cu_seqlens.front() == 0 && std::ranges::is_sorted(call.cu_seqlens) &&
                    call.cu_seqlens.back() == call.operands.q.dim(0),
                "cu_seqlens must rise from 0 to the {} tokens of q", call.operands.q.dim(0));
  SB_USER_CHECK(call.budgets.empty() || call.budgets.size() == sequences, "{} budgets for {} sequences",
                call.budgets.size(), sequences);
  for (const int32_t budget : call.budgets)
    SB_USER_CHECK(budget > 0, "a budget of {} keys; at least 1 is needed", budget);
  SB_USER_CHECK(!config_.learns_thresholds() || call.thresholds.size() == sequences,
                "thresholds: {} for {} sequences; pattern mass needs one each (0 to begin with)",
                call.thresholds.size(), sequences);
}

void PackedAttention::begin_index(const Call& call, int threads, BlockIndexBuilder& builder, BlockIndex& index) const {
  std::vector<uint8_t> dense;
  for (int s = 0; s + 1 < std::ssize(call.cu_seqlens); ++s)
    dense.push_back(runs_dense(config_, call.layer, tiles_of(call, s)));
  const BlockIndexShape shape = {config_.block, config_.query_block, selector_.list_heads(call.shape)};
  builder.begin(index, shape, call.cu_seqlens, dense, threads);
}

void PackedAttention::choose(const Exec& exec, const Call& call, const Seen& seen, BlockIndex& index) const {
  BlockIndexBuilder builder;
  begin_index(call, exec.pool->threads(), builder, index);
  const BlockScoring scoring(config_);
  std::vector<float> statistics;
  LayerPlanes planes;
  for (int s = 0; s + 1 < std::ssize(call.cu_seqlens); ++s) {
    if (index.sequences()[static_cast<size_t>(s)].dense) continue;
    if (config_.judges_by_planes() && planes.channels == 0) {
      check_score_channels(config_, call.shape.head_dim);
      planes = choose_planes(call.shape, sums_from(call.planes, call.shape), config_.score_channels);
    }
    const auto at = static_cast<size_t>(s);
    SelectionRequest request;
    request.layer = call.layer;
    request.shape = call.shape;
    request.tiles = tiles_of(call, s);
    request.q = call.operands.q.rows(call.cu_seqlens[at], call.cu_seqlens[at + 1]).f32();
    request.k = call.operands.k.rows(call.cu_seqlens[at], call.cu_seqlens[at + 1]).f32();
    request.place = index.sequences()[at];
    if (config_.learns_thresholds()) request.threshold = start_threshold(request.tiles) + call.thresholds[at];
    if (config_.judges_by_planes()) request.planes = &planes;
    if (config_.scores_blocks()) {
      statistics.resize(static_cast<size_t>(BlockStatistics::floats(scoring, call.shape, request.tiles.blocks())));
      BlockStatistics::fill(exec, call.shape, scoring, request.k, request.tiles.tokens, statistics.data(),
                            request.planes);
      request.statistics = statistics.data();
    }
    const MassCounts counts = selector_.select(exec, request, builder);
    seen.counts[2 * at] = counts.chosen;
    seen.counts[2 * at + 1] = counts.wanted;
  }
  builder.finish(*exec.pool);
}

void PackedAttention::forward(const Call& call, const Seen& seen) {
  check(call);
  ForkedPool::Workers& workers = pool_.get();
  const nanobind::gil_scoped_release released;
  const std::lock_guard busy(workers.busy);
  Arena scratch("attention", block_sparse_scratch_bytes(call.shape, call.cu_seqlens.back(), workers.pool.threads()));
  const Exec exec{.pool = &workers.pool, .scratch = &scratch};
  std::ranges::fill(seen.counts, 0);
  BlockIndex index;
  choose(exec, call, seen, index);
  block_sparse_forward(exec, call.shape, index, call.operands);
  if (!call.lists.empty()) save_lists(index, row_bytes(call, config_.block), call.lists, workers.pool);
  if (seen.sums.empty()) return;
  PlaneSums sums;
  for (size_t s = 0; s + 1 < call.cu_seqlens.size(); ++s) {
    const int64_t begin = call.cu_seqlens[s], end = call.cu_seqlens[s + 1];
    sums += measure_planes(exec, call.shape, call.operands.q.rows(begin, end).f32(),
                           call.operands.k.rows(begin, end).f32(), end - begin);
  }
  write_sums(sums, seen.sums);
}

void PackedAttention::backward(const Call& call, const AttentionGradients& gradients) {
  check(call);
  ForkedPool::Workers& workers = pool_.get();
  const nanobind::gil_scoped_release released;
  const std::lock_guard busy(workers.busy);
  Arena scratch("attention", block_sparse_scratch_bytes(call.shape, call.cu_seqlens.back(), workers.pool.threads()));
  const Exec exec{.pool = &workers.pool, .scratch = &scratch};
  BlockIndex index;
  BlockIndexBuilder builder;
  begin_index(call, workers.pool.threads(), builder, index);
  load_rows(call.lists, row_bytes(call, config_.block), index, builder, workers.pool);
  builder.finish(workers.pool);
  block_sparse_backward(exec, call.shape, index, call.operands, gradients);
}

}  // namespace sb::python
