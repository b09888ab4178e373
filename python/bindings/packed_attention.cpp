#include "python/bindings/packed_attention.h"

#include <nanobind/nanobind.h>

#include <algorithm>

#include "attention/cpu/block_sparse.h"
#include "attention/gpu/plan/given_selection.h"
#include "attention/select/block_statistics.h"
#include "core/errors.h"

namespace sb::python {
namespace {

void write_sums(const PlaneSums& sums, std::span<double> values) {
  std::ranges::fill(values, 0.0);
  values[0] = sums.tokens;
  auto out = values.begin() + 1;
  for (const auto* part : {&sums.query_squares, &sums.key_sums, &sums.key_squares})
    out = std::ranges::copy(*part, out).out;
}

// Where the byte of (row, key block) lies. Rows of the index follow each other; a row has room for the key blocks of a
// sequence as long as the whole micro-batch.
int64_t row_bytes(int64_t tokens, int block) {
  return tokens / block + 1;
}

int sequences_of(const PackedCall& call) {
  return static_cast<int>(call.cu_seqlens.size()) - 1;
}

const float* tokens_of(const TensorView& tensor, const PackedCall& call, int sequence) {
  const auto at = static_cast<size_t>(sequence);
  return tensor.rows(call.cu_seqlens[at], call.cu_seqlens[at + 1]).f32();
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
        if (bytes[b] != kNotListed) entries.push_back({static_cast<uint16_t>(b), bytes[b]});
      builder.set_row(thread, r, entries);
    }
  });
}

}  // namespace

void write_lists(const BlockIndex& index, int64_t tokens, std::span<uint8_t> lists, ThreadPool& pool) {
  const int64_t width = row_bytes(tokens, index.shape().block);
  SB_CHECK(index.rows() * width <= std::ssize(lists), "{} bytes do not hold {} lists of {}", lists.size(), index.rows(),
           width);
  pool.parallel_slices(index.rows(), [&](int64_t begin, int64_t end, int) {
    for (int64_t r = begin; r < end; ++r) {
      uint8_t* bytes = lists.data() + r * width;
      std::fill_n(bytes, width, kNotListed);
      const BlockIndex::Row row = index.row(r);
      for (size_t i = 0; i < row.blocks.size(); ++i) bytes[row.blocks[i]] = row.first[i];
    }
  });
  std::fill(lists.begin() + index.rows() * width, lists.end(), kNotListed);
}

PackedAttention::PackedAttention(const SelectionConfig& config, int threads)
    : config_(config), selector_(config), pool_(threads) {
  SB_USER_CHECK(
      config.pattern != SelectionPattern::vertical_slash,
      "pattern vertical_slash lists single keys, whose number does not follow from the shapes, as torch asks of "
      "an operator's outputs; use topk, topp, mass, window or dense");
  SB_USER_CHECK(threads >= 1, "{} threads", threads);
}

void PackedAttention::begin_index(const PackedCall& call, int threads, BlockIndexBuilder& builder,
                                  BlockIndex& index) const {
  std::vector<uint8_t> dense;
  for (int s = 0; s < sequences_of(call); ++s)
    dense.push_back(runs_dense(config_, call.layer, tiles_of(config_, call, s)));
  const BlockIndexShape shape = {config_.block, config_.query_block, selector_.list_heads(call.shape)};
  builder.begin(index, shape, call.cu_seqlens, dense, threads);
}

void PackedAttention::select(const Exec& exec, const PackedCall& call, const PackedSeen& seen,
                             BlockIndex& index) const {
  BlockIndexBuilder builder;
  begin_index(call, exec.pool->threads(), builder, index);
  const BlockScoring scoring(config_);
  std::vector<float> statistics;
  LayerPlanes planes;
  for (int s = 0; s < sequences_of(call); ++s) {
    if (index.sequences()[static_cast<size_t>(s)].dense) continue;
    if (config_.judges_by_planes() && planes.channels == 0) {
      check_score_channels(config_, call.shape.head_dim);
      planes = planes_of(call.planes, call.shape, config_.score_channels);
    }
    const auto at = static_cast<size_t>(s);
    SelectionRequest request;
    request.layer = call.layer;
    request.shape = call.shape;
    request.tiles = tiles_of(config_, call, s);
    request.q = tokens_of(call.operands.q, call, s);
    request.k = tokens_of(call.operands.k, call, s);
    request.place = index.sequences()[at];
    if (config_.learns_thresholds()) request.threshold = start_threshold(request.tiles) + threshold_of(call, s);
    if (config_.judges_by_planes()) request.planes = &planes;
    if (config_.scores_blocks()) {
      statistics.resize(static_cast<size_t>(BlockStatistics::floats(scoring, call.shape, request.tiles.blocks())));
      BlockStatistics::fill(exec, call.shape, scoring, request.k, request.tiles.tokens, statistics.data(),
                            request.planes);
      request.statistics = statistics.data();
    }
    const MassCounts counts = selector_.select(exec, request, builder);
    if (!config_.learns_thresholds()) continue;
    seen.counts[2 * at] = counts.selected;
    seen.counts[2 * at + 1] = counts.wanted;
  }
  builder.finish(*exec.pool);
}

void PackedAttention::forward(const PackedCall& call, const PackedSeen& seen) {
  check_call(config_, call);
  ForkedPool::Workers& workers = pool_.get();
  const nanobind::gil_scoped_release released;
  const std::lock_guard busy(workers.busy);
  Arena scratch("attention", block_sparse_scratch_bytes(call.shape, call.cu_seqlens.back(), workers.pool.threads()));
  const Exec exec{.pool = &workers.pool, .scratch = &scratch};
  std::ranges::fill(seen.counts, 0);
  BlockIndex index;
  select(exec, call, seen, index);
  block_sparse_forward(exec, call.shape, index, call.operands);
  if (!call.lists.empty()) write_lists(index, call.cu_seqlens.back(), call.lists, workers.pool);
  if (seen.sums.empty()) return;
  PlaneSums sums;
  for (int s = 0; s < sequences_of(call); ++s)
    sums += measure_planes(exec, call.shape, tokens_of(call.operands.q, call, s), tokens_of(call.operands.k, call, s),
                           tiles_of(config_, call, s).tokens);
  write_sums(sums, seen.sums);
}

void PackedAttention::backward(const PackedCall& call, const AttentionGradients& gradients) {
  check_call(config_, call);
  ForkedPool::Workers& workers = pool_.get();
  const nanobind::gil_scoped_release released;
  const std::lock_guard busy(workers.busy);
  Arena scratch("attention", block_sparse_scratch_bytes(call.shape, call.cu_seqlens.back(), workers.pool.threads()));
  const Exec exec{.pool = &workers.pool, .scratch = &scratch};
  BlockIndex index;
  BlockIndexBuilder builder;
  begin_index(call, workers.pool.threads(), builder, index);
  load_rows(call.lists, row_bytes(call.cu_seqlens.back(), config_.block), index, builder, workers.pool);
  builder.finish(workers.pool);
  block_sparse_backward(exec, call.shape, index, call.operands, gradients);
}

}  // namespace sb::python
