#include "attention/hopper/work.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <tuple>

#include "attention/hopper/select.h"
#include "attention/selection/staircase.h"
#include "core/errors.h"

namespace sb::hopper {
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

TEST(HopperTiling, HoldsWholeTokensAndDividesTheQueryBlock) {
  const std::vector<int32_t> cu{0, 100, 100, 261};
  EXPECT_EQ(make_tiling(shape_of(16, 2), 2, 16, cu).tokens, 8);
  EXPECT_EQ(make_tiling(shape_of(14, 2), 2, 16, cu).tokens, 8);
  EXPECT_EQ(make_tiling(shape_of(14, 2), 2, 0, cu).tokens, 9);  // dense: 63 of 64 rows
  EXPECT_EQ(make_tiling(shape_of(8, 8), 8, 128, cu).tokens, 64);
  EXPECT_EQ(make_tiling(shape_of(8, 2), 8, 16, cu).tokens, 8);  // lists per query head
  EXPECT_EQ(make_tiling(shape_of(64, 1), 1, 0, cu).tokens, 1);
  // 100 tokens are 7 tiles of 16, 161 are 11.
  EXPECT_EQ(make_tiling(shape_of(16, 2), 2, 16, cu).subtiles, 2 * (7 + 11));
  EXPECT_THROW(make_tiling(shape_of(128, 1), 1, 0, cu), UserError);
  EXPECT_THROW(make_tiling(shape_of(16, 2), 3, 16, cu), UserError);
  EXPECT_THROW(make_tiling(shape_of(16, 2), 2, 256, cu), UserError);
  EXPECT_THROW(make_tiling(shape_of(16, 2), 2, 15, cu), UserError);
}

TEST(HopperWork, ColumnsHoldTheSamePairsAsRows) {
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

// Every token of every list head in exactly one tile; every entry (or dense tile) of every column in exactly one item.
void check_work(const Shape& shape, const std::vector<int32_t>& cu, const std::vector<bool>& dense,
                const RowLists* lists, int workers, bool expect_splits) {
  const Work work = make_work(shape, cu, dense, lists, workers);
  const int list_heads = lists ? lists->heads : shape.kv_heads;
  std::vector<int> tokens(static_cast<size_t>(cu.back()) * list_heads, 0);
  for (const ForwardItem& item : work.forward) {
    EXPECT_GE(item.tokens, 1);
    EXPECT_LE(item.tokens, 2 * work.tiling.tokens);
    for (int t = 0; t < item.tokens; ++t) ++tokens[static_cast<size_t>(item.head) * cu.back() + item.token + t];
  }
  EXPECT_EQ(std::count(tokens.begin(), tokens.end(), 1), static_cast<int64_t>(tokens.size()));

  // What each (sequence start, key block, list head) is made of.
  std::map<std::tuple<int, int, int>, std::vector<std::pair<int, int>>> ranges;
  std::map<int, int> slots;
  int64_t keys = 0;
  for (const BackwardItem& item : work.backward) {
    const int start = item.token - item.position;
    if (item.partial < 0) keys += item.keys;
    if (item.partial >= 0) ++slots[item.partial];
    for (int s = item.segment_begin; s < item.segment_begin + item.segment_count; ++s) {
      const ColumnSegment& segment = work.segments[s];
      EXPECT_EQ(segment.head / (list_heads / shape.kv_heads), item.head);
      ranges[{start, item.position / kBlock, segment.head}].emplace_back(segment.begin, segment.count);
    }
  }
  EXPECT_EQ(work.splits.empty(), !expect_splits);
  int covered = 0;
  for (const SplitColumn& split : work.splits) {
    keys += split.keys;
    for (int slot = split.begin; slot < split.begin + split.count; ++slot, ++covered) EXPECT_EQ(slots[slot], 1);
  }
  EXPECT_EQ(covered, work.partial_slots);
  EXPECT_EQ(keys, int64_t{cu.back()} * shape.kv_heads);  // dK and dV of every key are written once

  int column = 0;
  for (size_t s = 0; s + 1 < cu.size(); ++s)
    for (int b = 0; b * kBlock < cu[s + 1] - cu[s]; ++b, ++column)
      for (int head = 0; head < list_heads; ++head) {
        auto& parts = ranges[{cu[s], b, head}];
        std::sort(parts.begin(), parts.end());
        int at, end;
        if (dense[s]) {
          at = b * kBlock / (2 * work.tiling.tokens);
          end = (work.cu_subtiles[s + 1] - work.cu_subtiles[s]) / 2;
        } else {
          at = work.columns.offsets[head * work.columns.columns + column];
          end = work.columns.offsets[head * work.columns.columns + column + 1];
        }
        for (const auto& [begin, count] : parts) {
          EXPECT_EQ(begin, at);
          at += count;
        }
        EXPECT_EQ(at, end) << "sequence " << s << " block " << b << " head " << head;
      }
}

TEST(HopperWork, CoversEverythingOnce) {
  const std::vector<int32_t> cu{0, 1, 900, 900, 1700};
  check_work(shape_of(16, 2), cu, {true, true, true, true}, nullptr, 132, false);
  check_work(shape_of(14, 2), {0, 9001}, {true}, nullptr, 132, true);
  const RowLists lists = random_lists(cu, 2, 16, 0.3, 2);
  check_work(shape_of(16, 2), cu, {false, false, false, true}, &lists, 132, false);
  const RowLists per_head = random_lists(cu, 8, 64, 0.5, 3);
  check_work(shape_of(8, 2), cu, {false, true, false, false}, &per_head, 132, false);
}

TEST(HopperWork, SplitsHubColumns) {
  // Everybody chooses block 0 and their own.
  const std::vector<int32_t> cu{0, 20000};
  RowLists lists;
  lists.heads = 1;
  lists.query_block = 16;
  lists.rows = 1250;
  lists.offsets.push_back(0);
  for (int row = 0; row < lists.rows; ++row) {
    lists.entries.push_back(list_entry(0, 0));
    if (row * 16 / kBlock > 0) lists.entries.push_back(list_entry(row * 16 / kBlock, 0));
    lists.offsets.push_back(static_cast<int32_t>(lists.entries.size()));
  }
  check_work(shape_of(8, 1), cu, {false}, &lists, 132, true);
  const Work work = make_work(shape_of(8, 1), cu, {false}, &lists, 132);
  ASSERT_EQ(work.splits.size(), 1u);
  EXPECT_EQ(work.splits[0].token, 0);
  EXPECT_GT(work.splits[0].count, 4);
}

TEST(HopperWork, LongItemsOfAHeadComeFirst) {
  const std::vector<int32_t> cu{0, 3000};
  const Work work = make_work(shape_of(16, 2), cu, {true}, nullptr, 132);
  for (size_t i = 1; i < work.forward.size(); ++i) {
    EXPECT_LE(work.forward[i - 1].head, work.forward[i].head);
    if (work.forward[i].head != work.forward[i - 1].head) continue;
    EXPECT_LE(work.forward[i].position / kBlock, work.forward[i - 1].position / kBlock);
  }
}

TEST(HopperSelectPlan, KnowsTheLengthOfEveryListBeforehand) {
  const Shape shape = shape_of(16, 2);
  const std::vector<int32_t> cu{0, 4001, 4500, 7000};
  const int step = 1;
  std::vector<SequenceTiles> tiles;
  for (size_t s = 0; s + 1 < cu.size(); ++s) tiles.push_back({cu[s + 1] - cu[s], kBlock, 16, 1, 2, 1300});
  const SelectPlan plan = make_select_plan(shape, cu, {false, true, false}, tiles, step);
  std::mt19937 random(5);
  std::normal_distribution<float> draw;
  int row = 0;
  for (int head = 0; head < shape.kv_heads; ++head)
    for (size_t s = 0; s < tiles.size(); ++s)
      for (int64_t tile = 0; tile < tiles[s].tiles(); ++tile, ++row) {
        std::vector<IndexEntry> chosen;
        if (s != 1) {
          const int64_t competing = tiles[s].competing(tile);
          std::vector<float> masses(competing * tiles[s].rows(tile));
          for (float& mass : masses) mass = draw(random);
          Staircase().choose(tiles[s], tile, {masses.data(), competing, tiles[s].rows(tile), competing},
                             staircase_rule(StaircaseRule::Kind::topk, tiles[s].free_quota(tile), step, 16), chosen);
        }
        ASSERT_EQ(plan.row_offsets[row + 1] - plan.row_offsets[row], static_cast<int64_t>(chosen.size()))
            << "head " << head << " sequence " << s << " tile " << tile;
      }
  EXPECT_EQ(plan.row_offsets.back(), plan.entries);
  EXPECT_EQ(plan.columns.size(), 2u * (32 + 4 + 20));
  tiles[0].tokens = 10 * 1000 * 1000;
  EXPECT_THROW(make_select_plan(shape, std::vector<int32_t>{0, 10 * 1000 * 1000}, {false}, {tiles[0]}, step),
               UserError);
}

}  // namespace
}  // namespace sb::hopper
