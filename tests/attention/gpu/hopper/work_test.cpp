#include "attention/gpu/plan/work.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <tuple>

#include "attention/gpu/plan/recent_plans.h"
#include "core/errors.h"
#include "tests/attention/gpu/hopper/lists.h"

namespace sb::gpu {
namespace {

Shape shape_of(int query_heads, int kv_heads) {
  return {0, query_heads, kv_heads, 128, 0.1f};
}

RowLists random_lists(const std::vector<int32_t>& cu, int heads, int query_block, double keep, uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> draw(0, 1);
  RowLists out;
  out.heads = heads;
  out.query_block = query_block;
  out.offsets.push_back(0);
  for (int head = 0; head < heads; ++head) {
    out.rows = 0;
    for (size_t s = 0; s + 1 < cu.size(); ++s)
      for (int begin = 0; begin < cu[s + 1] - cu[s]; begin += query_block, ++out.rows) {
        const int last = std::min(begin + query_block, cu[s + 1] - cu[s]) - 1;
        for (int block = 0; block * kBlock <= last; ++block)
          if (draw(random) < keep) out.entries.push_back(list_entry(block, random() % query_block));
        out.offsets.push_back(static_cast<int32_t>(out.entries.size()));
      }
  }
  return out;
}

// (list head, sequence, query block, key block, first) of every entry, in order.
using Pair = std::tuple<int, int, int, int, int>;

TEST(GpuTiling, HoldsWholeTokensAndDividesTheQueryBlock) {
  const std::vector<int32_t> cu{0, 100, 100, 261};
  EXPECT_EQ(make_tiling(shape_of(16, 2), 2, 16, cu).tokens, 8);
  EXPECT_EQ(make_tiling(shape_of(14, 2), 2, 16, cu).tokens, 8);
  EXPECT_EQ(make_tiling(shape_of(14, 2), 2, 0, cu).tokens, 9);  // dense: 63 of 64 rows
  EXPECT_EQ(make_tiling(shape_of(8, 8), 8, 128, cu).tokens, 64);
  EXPECT_EQ(make_tiling(shape_of(8, 2), 8, 16, cu).tokens, 8);  // lists per query head
  EXPECT_EQ(make_tiling(shape_of(64, 1), 1, 0, cu).tokens, 1);
  // 100 tokens are 7 tiles of 16, 161 are 11.
  EXPECT_EQ(make_tiling(shape_of(16, 2), 2, 16, cu).subtiles, 2 * (7 + 11));
  // A group of 130 is worked off in 13 parts of 10, six tokens each: 60 rows. Two tokens of 26 heads would be 52.
  EXPECT_EQ(make_tiling(shape_of(130, 1), 1, 0, cu).parts, 13);
  EXPECT_EQ(make_tiling(shape_of(130, 1), 1, 0, cu).tokens, 6);
  EXPECT_EQ(make_tiling(shape_of(80, 1), 1, 16, cu).heads, 16);  // 4 tokens: 64 rows; 1 of 40: 40
  EXPECT_EQ(make_tiling(shape_of(66, 1), 1, 16, cu).heads, 22);  // 2 tokens: 44 rows; 1 of 33: 33; 8 of 6: 48
  EXPECT_EQ(make_tiling(shape_of(40, 1), 1, 0, cu).heads,
            20);  // 3 tokens: 60 rows; 1 of 40: 40; 8 of 8: 64, little more
  // Odd query blocks make tiles of one subtile.
  EXPECT_EQ(make_tiling(shape_of(16, 2), 2, 15, cu).tile, 1);
  EXPECT_EQ(make_tiling(shape_of(16, 2), 2, 15, cu).tokens, 15);  // of four heads: 60 rows; 5 of eight: 40
  EXPECT_EQ(make_tiling(shape_of(16, 2), 2, 1, cu).subtiles, 261);
  EXPECT_THROW(make_tiling(shape_of(16, 2), 3, 16, cu), UserError);
  EXPECT_THROW(make_tiling(shape_of(16, 2), 2, 256, cu), UserError);
  EXPECT_THROW(make_tiling(shape_of(16, 2), 2, 129, cu), UserError);
}

TEST(GpuWork, ColumnsHoldTheSamePairsAsRows) {
  const std::vector<int32_t> cu{0, 700, 701, 701, 1400};
  const RowLists rows = random_lists(cu, 3, 32, 0.4, 1);
  const ColumnLists columns = transpose(rows, cu);
  std::vector<Pair> from_rows, from_columns;
  for (int head = 0; head < rows.heads; ++head) {
    int row = 0, column = 0;
    for (int s = 0; s + 1 < static_cast<int>(cu.size()); ++s) {
      const int length = cu[s + 1] - cu[s];
      for (int b = 0; b * 32 < length; ++b, ++row)
        for (int i = rows.offsets[head * rows.rows + row]; i < rows.offsets[head * rows.rows + row + 1]; ++i)
          from_rows.emplace_back(head, s, b, entry_id(rows.entries[i]), entry_first(rows.entries[i]));
      for (int b = 0; b * kBlock < length; ++b, ++column) {
        const int at = head * columns.columns + column;
        for (int i = columns.offsets[at]; i < columns.offsets[at + 1]; ++i) {
          from_columns.emplace_back(head, s, entry_id(columns.entries[i]), b, entry_first(columns.entries[i]));
          if (i == columns.offsets[at]) continue;
          EXPECT_LT(entry_id(columns.entries[i - 1]), entry_id(columns.entries[i]));
        }
      }
    }
  }
  std::sort(from_columns.begin(), from_columns.end());
  EXPECT_FALSE(from_rows.empty());
  EXPECT_EQ(from_rows, from_columns);
}

// Every token of every list head in exactly one tile, every key of every key/value head in exactly one place.
void check_work(const Shape& shape, const std::vector<int32_t>& cu, const std::vector<bool>& dense,
                const RowLists* lists) {
  const RowLayout layout = lists ? lists->layout() : RowLayout{};
  const Work work = make_work(shape, cu, dense, lists ? &layout : nullptr, 132);
  const int list_heads = lists ? lists->heads : shape.kv_heads;
  std::vector<int> tokens(static_cast<size_t>(cu.back()) * list_heads, 0);
  for (const ForwardItem& item : work.forward) {
    EXPECT_GE(item.tokens, 1);
    EXPECT_LE(item.tokens, 2 * work.tiling.tokens);
    for (int t = 0; t < item.tokens; ++t) ++tokens[static_cast<size_t>(item.head) * cu.back() + item.token + t];
    if (item.list_begin < 0) continue;
    // Its list is the one of its query block.
    const auto s = static_cast<size_t>(std::upper_bound(cu.begin(), cu.end(), item.token) - cu.begin() - 1);
    int row = item.position / lists->query_block;
    for (size_t before = 0; before < s; ++before)
      row += (cu[before + 1] - cu[before] + lists->query_block - 1) / lists->query_block;
    EXPECT_EQ(item.list_begin, lists->offsets[item.head * lists->rows + row]);
    EXPECT_EQ(item.query_token, item.position % lists->query_block);
    EXPECT_FALSE(dense[s]);
  }
  EXPECT_EQ(std::count(tokens.begin(), tokens.end(), 1), static_cast<int64_t>(tokens.size()));

  ASSERT_EQ(work.places.size(), static_cast<size_t>(work.columns) * shape.kv_heads);
  std::vector<int> keys(static_cast<size_t>(cu.back()) * shape.kv_heads, 0);
  for (size_t i = 0; i < work.places.size(); ++i) {
    const BackwardItem& place = work.places[i];
    EXPECT_EQ(place.column, static_cast<int>(i % work.columns));
    EXPECT_EQ(place.head, static_cast<int>(i / work.columns));
    for (int k = 0; k < place.keys; ++k) ++keys[static_cast<size_t>(place.head) * cu.back() + place.token + k];
  }
  EXPECT_EQ(std::count(keys.begin(), keys.end(), 1), static_cast<int64_t>(keys.size()));
}

// Key blocks of 64 two by two, the last of a sequence alone where their number is odd.
TEST(GpuWork, TakesBlocksOf64TwoByTwo) {
  const std::vector<int32_t> cu{0, 1, 900, 900, 1700};
  RowLists lists = random_lists(cu, 2, 16, 0.3, 2);
  lists.block = 64;
  RowLayout layout = lists.layout();
  layout.keys = 128;
  const Work work = make_work(shape_of(16, 2), cu, {false, false, false, true}, &layout, 132);
  EXPECT_EQ(work.columns, 1 + 15 + 13);
  ASSERT_EQ(work.head_places, 1 + 8 + 7);
  ASSERT_EQ(work.places.size(), static_cast<size_t>(2 * work.head_places));
  for (size_t i = 0; i < work.places.size(); ++i) {
    const BackwardItem& place = work.places[i];
    EXPECT_EQ(place.head, static_cast<int>(i) / work.head_places);
    EXPECT_EQ(place.position % 128, 0);
    const int before = place.token < 1 ? 0 : place.token < 900 ? 1 : 16;
    EXPECT_EQ(place.column, before + place.position / 64);
    const int length = place.token < 1 ? 1 : place.token < 900 ? 899 : 800;
    EXPECT_EQ(place.keys, std::min(128, length - place.position));
  }
}

TEST(GpuWork, CoversEverythingOnce) {
  const std::vector<int32_t> cu{0, 1, 900, 900, 1700};
  check_work(shape_of(16, 2), cu, {true, true, true, true}, nullptr);
  check_work(shape_of(14, 2), {0, 9001}, {true}, nullptr);
  const RowLists lists = random_lists(cu, 2, 16, 0.3, 2);
  check_work(shape_of(16, 2), cu, {false, false, false, true}, &lists);
  const RowLists per_head = random_lists(cu, 8, 64, 0.5, 3);
  check_work(shape_of(8, 2), cu, {false, true, false, false}, &per_head);
}

TEST(GpuWork, LimitsHoldForAnyColumns) {
  // Cuts columns as the device does and compares with what was promised beforehand.
  std::mt19937 random(11);
  for (int round = 0; round < 200; ++round) {
    const int64_t least = least_share(round % 2 == 0 ? 64 : 128);
    const int workers = 1 + static_cast<int>(random() % 132);
    std::vector<int64_t> columns(1 + random() % 300);
    for (int64_t& cost : columns) cost = random() % (random() % 20 == 0 ? 100000 : 300);
    int64_t total = 0;
    for (const int64_t cost : columns) total += cost;
    const size_t last_head = random() % columns.size();
    int64_t items = 0, splits = 0, slots = 0;
    for (size_t i = 0; i < columns.size(); ++i) {
      const int64_t share = fair_share(total, workers, std::ssize(columns), i >= last_head, least), cost = columns[i];
      const int64_t pieces = cost <= share ? 1 : (cost + share - 1) / share;
      items += pieces;
      splits += pieces > 1;
      slots += pieces > 1 ? pieces : 0;
    }
    const WorkLimits limits = work_limits(static_cast<int64_t>(columns.size()), total, workers);
    EXPECT_LE(items, limits.items);
    EXPECT_LE(splits, limits.splits);
    EXPECT_LE(slots, limits.slots);
    // More than there is, as for lists that are not full.
    const WorkLimits wide = work_limits(static_cast<int64_t>(columns.size()), total + random() % 10000, workers);
    EXPECT_LE(items, wide.items);
    EXPECT_LE(slots, wide.slots);
  }
}

// By the pairs of all sequences of a micro-batch, those without lists too.
TEST(GpuWork, TwoKernelsWhereFewPairsAreSeen) {
  constexpr int64_t kTokens = 32768;
  const int64_t causal = 2 * kTokens * (kTokens + 1) / 2;
  const auto taken = [&](int head_dim, const std::vector<int32_t>& cu, double share, bool dense) {
    const Shape shape{cu.back(), 16, 2, head_dim, 1.f};
    const Tiling tiling = make_tiling(shape, 2, 16, cu);
    const auto entries = static_cast<int64_t>(share * static_cast<double>(causal) / (kBlock * 16));
    return quicker_in_two_kernels(
        shape, tiling,
        {.entries = entries, .dense = dense ? causal : 0, .causal = (dense ? causal : 0) + (share > 0 ? causal : 0)});
  };
  const std::vector<int32_t> one{0, kTokens}, two{0, kTokens, 2 * kTokens};
  EXPECT_TRUE(taken(128, one, 0.1, false));
  EXPECT_FALSE(taken(128, one, 0.2, false));
  EXPECT_FALSE(taken(64, one, 0.1, false));
  EXPECT_FALSE(taken(128, one, 0, true));
  EXPECT_TRUE(taken(128, one, 0.02, false));
  EXPECT_FALSE(taken(128, two, 0.02, true)) << "beside a dense sequence";
}

TEST(GpuWork, LongItemsOfAHeadComeFirst) {
  const std::vector<int32_t> cu{0, 3000};
  const Work work = make_work(shape_of(16, 2), cu, {true}, nullptr, 132);
  for (size_t i = 1; i < work.forward.size(); ++i) {
    EXPECT_LE(work.forward[i - 1].head, work.forward[i].head);
    if (work.forward[i].head != work.forward[i - 1].head) continue;
    EXPECT_LE(work.forward[i].position / kBlock, work.forward[i - 1].position / kBlock);
  }
}

struct NumberPlan {
  int number = 0;
  int64_t reserved = 0;
  bool matches(int request) const { return number == request; }
  void reserve(int64_t bytes) { reserved = bytes; }
};

TEST(RecentPlans, TheOldestThatNobodyHoldsIsBuiltAnew) {
  RecentPlans<NumberPlan> plans(3);
  const auto make = [&](int number) {
    const std::shared_ptr<NumberPlan> plan = plans.take();
    plan->number = number;
    plans.put(plan);
    return plan.get();
  };
  const NumberPlan* one = make(1);
  const NumberPlan* two = make(2);
  const std::shared_ptr<NumberPlan> held = plans.find(1);  // 2 is the older one now
  EXPECT_EQ(held.get(), one);
  make(3);
  EXPECT_EQ(make(4), two);
  EXPECT_EQ(plans.find(2), nullptr);
  EXPECT_EQ(plans.size(), 3u);
  // A plan that a state holds keeps its numbers, however old it is.
  for (int number = 5; number < 9; ++number) EXPECT_NE(make(number), one);
  EXPECT_EQ(plans.find(1), held);
  // Where all are held the oldest one leaves the list, and its holder keeps it.
  RecentPlans<NumberPlan> full(2);
  std::vector<std::shared_ptr<NumberPlan>> states;
  for (int number = 1; number <= 3; ++number) {
    states.push_back(full.take());
    states.back()->number = number;
    full.put(states.back());
  }
  EXPECT_EQ(full.size(), 2u);
  EXPECT_EQ(full.find(1), nullptr);
  EXPECT_EQ(states[0]->number, 1);
  EXPECT_EQ(full.find(2), states[1]);
}

TEST(RecentPlans, HaveTheMemoryOfAllStates) {
  RecentPlans<NumberPlan> plans;
  plans.reserve(2, 100);
  plans.reserve(3, 70);
  const size_t count = plans.for_states(5);
  EXPECT_EQ(plans.size(), count);
  EXPECT_GT(count, 5u);
  // Every state has a plan of its own, and more micro-batches come and go: all have memory of before.
  std::vector<std::shared_ptr<NumberPlan>> states(5);
  for (int number = 1; number < 40; ++number) {
    const std::shared_ptr<NumberPlan> plan = plans.take();
    EXPECT_EQ(plan->reserved, 100);
    plan->number = number;
    plans.put(plan);
    states[static_cast<size_t>(number % 5)] = plan;
  }
  EXPECT_EQ(plans.size(), count);
  EXPECT_GT(plans.for_states(1000), 1000u);
}

// A piece's tiles are those of its queries, its key blocks all up to its end.
TEST(GpuWork, APieceHasItsOwnQueriesAndAllKeysBeforeItsEnd) {
  Shape shape = shape_of(14, 2);
  shape.tokens = 300;
  shape.first_query = 512;
  const std::vector<int32_t> cu{0, 300};
  const Work dense = make_work(shape, cu, {true}, nullptr, 10);  // tiles of 18 tokens
  EXPECT_EQ(dense.tiling.tokens, 9);
  EXPECT_EQ(dense.cu_subtiles, (std::vector<int32_t>{0, 2 * 17}));
  int64_t queries = 0;
  for (const ForwardItem& item : dense.forward) {
    EXPECT_EQ(item.position, item.token + 512);
    EXPECT_EQ(item.token % 18, 0);
    queries += item.tokens;
  }
  EXPECT_EQ(queries, 2 * 300);
  ASSERT_EQ(dense.head_places, 7);  // 812 keys
  for (const BackwardItem& place : dense.places) {
    EXPECT_EQ(place.token, place.position);
    EXPECT_EQ(place.keys, place.position == 768 ? 44 : 128);
    EXPECT_EQ(place.subtiles, 34);
  }
}

}  // namespace
}  // namespace sb::gpu
