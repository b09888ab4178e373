// The memory plan of a ring of GPUs, without one: whatever the lengths, no call takes more scratch than planned.
#include "parallel/ring/gpu/cuda_ring_memory.h"

#include <gtest/gtest.h>

#include "comm/thread_communicator.h"
#include "core/random.h"
#include "parallel/ring/gpu/ring_lists.h"

namespace sb {
namespace {

constexpr int kMultiprocessors = 132;

struct MemoryCase {
  AttentionShape shape;
  SelectionPattern pattern;
  int ranks, block = 128;
  std::vector<int32_t> lengths;
  DType dtype = DType::bf16;
};

// What CudaRingCall allocates for one pass of one rank, forward and backward, besides the buffers of the ring.
std::pair<int64_t, int64_t> pass_bytes(const MemoryCase& c, const gpu::RingListPlan& plan,
                                       const gpu::RingPassPlan& pass) {
  const auto bytes = [](int64_t count, int64_t each) { return Arena::rounded(count * each); };
  const gpu::WorkLimits& limits = pass.work.limits;
  const gpu::Shape shape{pass.tokens(), c.shape.heads, c.shape.kv_heads, c.shape.head_dim, c.shape.scale};
  const int64_t queries = bytes(shape.tokens * shape.query_heads * shape.head_dim, dtype_bytes(c.dtype)),
                keys = bytes(shape.tokens * shape.kv_heads * shape.head_dim, dtype_bytes(c.dtype));
  // q, out; k, v; log-sum-exp; items; a counter.
  const int64_t both = 2 * queries + 2 * keys + bytes(shape.tokens * shape.query_heads, sizeof(float)) +
                       bytes(std::ssize(pass.work.forward), sizeof(gpu::ForwardItem)) + bytes(4, sizeof(int32_t));
  const auto floats = [&](size_t count) { return bytes(static_cast<int64_t>(count), sizeof(float)); };
  const bool summed =
      c.dtype == DType::bf16 && !gpu::quicker_in_two_kernels(shape, pass.work.tiling, {.entries = plan.select.entries});
  return {both, both + 2 * queries + 2 * keys + bytes(limits.items, sizeof(gpu::BackwardItem)) +
                    bytes(limits.splits, sizeof(gpu::SplitColumn)) + bytes(1, sizeof(gpu::WorkCounts)) +
                    floats(gpu::statistics_size(shape, pass.work.tiling)) +
                    floats(gpu::partials_size(shape, limits.slots)) +
                    (summed ? floats(gpu::dq_sum_size(shape, pass.work.tiling)) : 0)};
}

// The most that any rank takes.
int64_t used_bytes(const MemoryCase& c, const SelectionConfig& config, const RingTravel& travel,
                   const ContextLayout& layout) {
  std::vector<SequenceTiles> tiles;
  std::vector<uint8_t> dense;
  for (int s = 0; s < layout.sequences(); ++s) {
    tiles.push_back(sequence_tiles(config, layout.length(s), config.budget));
    dense.push_back(runs_dense(config, 0, tiles.back()));
  }
  BlockIndex index;
  BlockIndexBuilder builder;
  builder.begin(index, {c.block, config.query_block, c.shape.kv_heads}, layout.cu_seqlens(), dense, 1);
  const ReplicatedKeys replicated = replicated_keys(layout, index, config.sink_blocks, {});
  const auto floats = [](int64_t count) { return Arena::rounded(count * static_cast<int64_t>(sizeof(float))); };
  const int64_t query_width = int64_t{c.shape.heads} * c.shape.head_dim,
                key_width = int64_t{c.shape.kv_heads} * c.shape.head_dim;
  int64_t most_tokens = 0, used = 0;
  for (int r = 0; r < c.ranks; ++r) most_tokens = std::max<int64_t>(most_tokens, layout.local_cu_seqlens(r).back());
  for (int r = 0; r < c.ranks; ++r)
    for (const bool whole : {false, true}) {
      gpu::RingListRequest request;
      request.layout = &layout;
      request.rank = r;
      request.replicated = &replicated;
      request.replicated_blocks = whole ? 0 : config.sink_blocks;
      const int64_t tokens = layout.local_cu_seqlens(r).back();
      request.shape = {tokens, c.shape.heads, c.shape.kv_heads, c.shape.head_dim, c.shape.scale};
      request.config = config;
      request.tiles = tiles;
      request.copies = !whole;
      request.multiprocessors = kMultiprocessors;
      request.batch_masses = kRingBatchMasses;
      if (c.dtype == DType::f32) request.keys = std::min(c.block, gpu::kBlock);
      if (whole) {
        request.config.pattern = SelectionPattern::topk;
        request.config.query_block = std::min(c.block, kDenseQueryBlock);
        for (SequenceTiles& of : request.tiles) {
          of.query_block = request.config.query_block;
          of.budget = (of.blocks() + of.sink_blocks + of.local_blocks + 4) * of.block;
        }
      }
      bool any = false;
      for (int s = 0; s < layout.sequences(); ++s) {
        request.left_out.push_back((dense[s] != 0) != whole);
        any = any || !request.left_out.back();
      }
      if (!any) continue;
      const gpu::RingListPlan plan = make_ring_lists(request);
      for (int p = 0; p <= c.ranks; ++p) {
        if (plan.passes[p].tokens() == 0) continue;
        auto [forward, backward] = pass_bytes(c, plan, plan.passes[p]);
        if (p < c.ranks) {
          forward += travel.forward_scratch_bytes(c.dtype, most_tokens * key_width);
          backward += travel.backward_scratch_bytes(c.dtype, most_tokens * key_width);
        } else {
          const int64_t copies = c.ranks * replicated.piece * 2 * key_width;
          forward += Arena::rounded(copies * dtype_bytes(c.dtype));
          backward += Arena::rounded(copies * dtype_bytes(c.dtype)) + floats(copies);
        }
        used = std::max({used, floats(tokens * query_width) + forward,
                         floats(tokens * query_width) + 2 * floats(tokens * key_width) + backward});
      }
    }
  return used;
}

// Planned over used.
double share_used(const MemoryCase& c) {
  std::vector<int32_t> cu_seqlens = {0};
  for (const int32_t length : c.lengths) cu_seqlens.push_back(cu_seqlens.back() + length);
  RingAttention::Options options;
  options.selection.pattern = c.pattern;
  options.selection.block = c.block;
  options.selection.budget = 2048;
  options.dtype = c.dtype;
  double share = 0;
  run_thread_ranks(c.ranks, [&](Communicator& world) {
    const RingTravel travel(world, c.ranks);
    if (world.rank() != 0) return;
    const CudaRingMemory memory{options, c.ranks, kMultiprocessors, travel, nullptr, true};
    const ContextLayout layout(options.placement, c.ranks, c.block, cu_seqlens);
    const int64_t most = ContextLayout::most_tokens(c.ranks, c.block, cu_seqlens.back(), std::ssize(c.lengths));
    share = static_cast<double>(used_bytes(c, options.selection, travel, layout)) /
            static_cast<double>(memory.scratch_bytes(c.shape, most, 1));
  });
  return share;
}

AttentionShape heads_of(int heads, int kv_heads, int head_dim) {
  return {heads, kv_heads, head_dim, 1.0f};
}

// Places of a pass around twice the multiprocessors: few columns are cut finer than many.
TEST(RingMemory, ScratchHoldsThePassesOfOneSequence) {
  using enum SelectionPattern;
  for (const MemoryCase& c : std::vector<MemoryCase>{{heads_of(16, 2, 128), dense, 2, 128, {16384}},
                                                     {heads_of(16, 2, 128), topk, 2, 128, {16384}},
                                                     {heads_of(16, 2, 128), dense, 2, 128, {12288}},
                                                     {heads_of(14, 2, 64), dense, 2, 128, {16384}},
                                                     {heads_of(16, 2, 128), topk, 4, 128, {32768}},
                                                     {heads_of(8, 2, 128), mass, 4, 128, {32768}},
                                                     {heads_of(8, 1, 128), dense, 2, 128, {32768}},
                                                     {heads_of(16, 2, 128), dense, 2, 128, {16384}, DType::f32},
                                                     {heads_of(16, 2, 64), topk, 2, 64, {9000}},
                                                     {heads_of(16, 2, 64), topk, 3, 256, {20000}}}) {
    const double share = share_used(c);
    EXPECT_LE(share, 1.0) << c.shape.heads << ":" << c.shape.kv_heads << " d" << c.shape.head_dim << " " << c.lengths[0]
                          << " tokens on " << c.ranks << " ranks";
    EXPECT_GT(share, 0.7);
  }
}

TEST(RingMemory, ScratchHoldsThePassesOfManySequences) {
  Random random(3);
  for (int i = 0; i < 40; ++i) {
    const int kv_heads = 1 << random.below(4);
    MemoryCase c{heads_of(kv_heads * static_cast<int>(1 + random.below(8)), kv_heads, random.below(2) == 0 ? 64 : 128),
                 random.below(2) == 0 ? SelectionPattern::topk : SelectionPattern::dense,
                 static_cast<int>(1 + random.below(4)),
                 64 << random.below(3),
                 {},
                 random.below(3) == 0 ? DType::f32 : DType::bf16};
    const auto longest = static_cast<int64_t>(64) << random.below(8);
    for (int64_t left = 4096 * (1 + static_cast<int64_t>(random.below(4))); left > 0; left -= c.lengths.back())
      c.lengths.push_back(static_cast<int32_t>(
          std::min(left, 64 + static_cast<int64_t>(random.below(static_cast<uint64_t>(longest))))));
    EXPECT_LE(share_used(c), 1.0) << "case " << i << ": " << c.lengths.size() << " sequences";
  }
}

// However short the sequences that select may be, a micro-batch has no more of them than one of 64 tokens per rank.
TEST(RingMemory, IsNoLargerWhereEverySequenceSelects) {
  constexpr int kRanks = 2;
  run_thread_ranks(kRanks, [&](Communicator& world) {
    const RingTravel travel(world, kRanks);
    if (world.rank() != 0) return;
    RingAttention::Options all, most;
    all.selection.dense_below = 0;
    most.selection.dense_below = 64 * kRanks - 1;
    const CudaRingMemory of_all{all, kRanks, kMultiprocessors, travel, nullptr, true},
        of_most{most, kRanks, kMultiprocessors, travel, nullptr, true};
    const auto planned = [](int64_t bytes) { return static_cast<double>(bytes); };
    constexpr int64_t kTokens = 131072;
    const AttentionShape shape = heads_of(16, 2, 128);
    EXPECT_LE(planned(of_all.scratch_bytes(shape, kTokens, 1)),
              1.05 * planned(of_most.scratch_bytes(shape, kTokens, 1)));
    EXPECT_LE(planned(of_all.state_bytes(shape, kTokens)), 1.05 * planned(of_most.state_bytes(shape, kTokens)));
  });
}

// Memory for lists of dense sequences is planned for the longest one there may be.
TEST(RingMemory, KnowsTheLongestDenseSequence) {
  for (const auto& [dense_below, largest] :
       std::vector<std::pair<int64_t, int64_t>>{{-1, 0}, {0, 0}, {300, 0}, {2000, 0}, {-1, 3000}, {5000, 3000}}) {
    RingAttention::Options options;
    options.selection.budget = 1024;
    options.selection.dense_below = dense_below;
    options.largest_budget = largest;
    constexpr int64_t kWhole = 8192;
    int64_t longest = 0;
    for (int64_t tokens = 1; tokens <= kWhole; ++tokens)
      for (const int64_t budget : {options.selection.budget, std::max<int64_t>(options.selection.budget, largest)})
        if (runs_dense(options.selection, 0, sequence_tiles(options.selection, tokens, budget))) longest = tokens;
    EXPECT_LT(longest, kWhole);
    EXPECT_LE(longest, options.longest_dense(kWhole)) << dense_below << " " << largest;
    EXPECT_LT(options.longest_dense(kWhole), longest + options.selection.block);
    EXPECT_EQ(options.longest_dense(200), 200);
    options.any_dense = true;
    EXPECT_EQ(options.longest_dense(kWhole), kWhole);
    options.any_dense = false;
    options.selection.dense_layers = {3};
    EXPECT_EQ(options.longest_dense(kWhole), kWhole);
  }
}

}  // namespace
}  // namespace sb
