#include "attention/gpu/attention_memory.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "attention/gpu/select/select.h"

namespace sb::gpu {
namespace {

// Whatever tuning does, the lists of a layer fit the memory that was planned for them, so that none is asked for on the
// way; and where sequences are long, not much more is planned than they can take.
TEST(GpuAttentionMemory, HasRoomForTheListsOfTunedBudgets) {
  for (const SelectionPattern pattern :
       {SelectionPattern::topk, SelectionPattern::topp, SelectionPattern::mass, SelectionPattern::window})
    for (const int block : {64, 128, 256})
      for (const int64_t budget : {1024, 8192})
        for (const int64_t times : {0, 1, 4})
          for (const int32_t tokens : {9000, 70000, 262144}) {
            SCOPED_TRACE(fmt::format("pattern {} block {} budget {} x {} tokens {}", static_cast<int>(pattern), block,
                                     budget, times, tokens));
            SparseAttention::Options options;
            options.selection.pattern = pattern;
            options.selection.score = BlockScore::moments;
            options.selection.block = block;
            options.selection.budget = budget;
            options.largest_budget = times * budget;
            const int64_t largest = std::max(budget, options.largest_budget);
            if (largest >= tokens) continue;
            const SelectionConfig& config = options.selection;
            const Shape shape{tokens, 16, 2, 128, 0.1f};
            const SequenceTiles tiles{tokens, block, config.query_block, config.sink_blocks, config.local_blocks,
                                      largest};
            const SelectPlan plan = make_select_plan(shape, std::vector<int32_t>{0, tokens}, {false}, {tiles}, config,
                                                     {16}, int64_t{1} << 26);
            // By rows and by columns.
            const int64_t lists = 8 * int64_t{plan.entries} + 4 * int64_t{plan.columns};
            const AttentionMemory memory{options, 132, int64_t{1} << 26};
            const int64_t planned = memory.state_bytes({16, 2, 128, 0.1f}, tokens);
            EXPECT_LE(lists, planned);
            EXPECT_TRUE(times <= 1 || tokens < 8 * largest || planned <= 2 * lists) << planned << " for " << lists;
          }
}

// Where blocks are judged by planes, scratch has room for the channels of all keys, in whole groups of blocks.
TEST(GpuAttentionMemory, HasRoomForTheChannelsOfKeys) {
  for (const int channels : {16, 32, 64})
    for (const int sequences : {1, 3, 12}) {
      SCOPED_TRACE(fmt::format("{} channels, {} sequences", channels, sequences));
      SparseAttention::Options options;
      options.selection.score = BlockScore::planes;
      options.selection.score_channels = channels;
      options.selection.budget = 2048;
      constexpr int32_t kTokens = 30000;
      std::vector<int32_t> cu{0};
      std::vector<SequenceTiles> tiles;
      for (int s = 1; s <= sequences; ++s) {
        cu.push_back(kTokens * s / sequences);
        tiles.push_back({cu[s] - cu[s - 1], 128, 16, 1, 2, 2048});
      }
      const std::vector<bool> dense(tiles.size(), false);
      const Shape shape{kTokens, 2, 1, 64, 0.1f};
      const AttentionMemory memory{options, 132, int64_t{1} << 20};
      // Without the rest of attention, whose scratch is larger.
      const int64_t planned = memory.statistics_bytes({2, 1, 64, 0.1f}, kTokens);
      const SelectPlan portable = make_select_plan(shape, cu, dense, tiles, options.selection, {16}, 1 << 20);
      EXPECT_LE(int64_t{portable.statistics_rows} * channels * 4, planned);
      const int depth = hopper_plane_depth(options.selection);
      const SelectPlan hopper =
          make_select_plan(shape, cu, dense, tiles, options.selection, {192, 1, true, depth, 128 / depth}, 1 << 20);
      EXPECT_LE(int64_t{hopper.statistics_rows} * 128 * 2 + int64_t{kTokens} * depth * 2, planned);
    }
}

// However short the sequences that select may be, there are no more of them than a micro-batch may have: no memory is
// planned for one per token.
TEST(GpuAttentionMemory, IsNoLargerWhereEverySequenceSelects) {
  using enum BlockScore;
  for (const auto& [pattern, score_tokens, score] : {std::tuple{SelectionPattern::topk, 0, moments},
                                                     {SelectionPattern::topk, 16, moments},
                                                     {SelectionPattern::topk, 0, planes},
                                                     {SelectionPattern::vertical_slash, 0, moments}}) {
    SCOPED_TRACE(fmt::format("pattern {} score_tokens {}", static_cast<int>(pattern), score_tokens));
    SparseAttention::Options all, most;
    all.selection.pattern = pattern;
    all.selection.score_tokens = score_tokens;
    all.selection.score = score;
    most = all;
    all.selection.dense_below = 0;
    most.selection.dense_below = 63;  // one of 64 tokens
    constexpr int64_t kTokens = 131072;
    const AttentionShape shape{16, 2, 128, 0.1f};
    const AttentionMemory of_all{all, 132, int64_t{1} << 26}, of_most{most, 132, int64_t{1} << 26};
    const auto planned = [](int64_t bytes) { return static_cast<double>(bytes); };
    EXPECT_LE(planned(of_all.scratch_bytes(shape, kTokens)), 1.05 * planned(of_most.scratch_bytes(shape, kTokens)));
    EXPECT_LE(planned(of_all.state_bytes(shape, kTokens)), 1.05 * planned(of_most.state_bytes(shape, kTokens)));
  }
}

}  // namespace
}  // namespace sb::gpu
