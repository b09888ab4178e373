#include "attention/gpu/plan/work.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <tuple>

#include "attention/gpu/plan/recent_plans.h"
#include "attention/gpu/select/select.h"
#include "attention/select/staircase.h"
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
      const int64_t share = fair_share(total, workers, std::ssize(columns), i >= last_head, least),
                    cost = columns[i];
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

SelectionConfig config_of(SelectionPattern pattern, int block = kBlock) {
  SelectionConfig config;
  config.pattern = pattern;
  config.score = BlockScore::moments;
  config.block = block;
  config.budget = 1300;
  return config;
}

// Row lists of `plan` have exactly (topk) or at most (others) the length that the staircase makes of random masses; and
// the masses that the plan provides for are those of the tokens that choose.
void check_plan(const SelectionConfig& config, bool exact, const ScoreTile& score_tile = {16}) {
  const Shape shape = shape_of(16, 2);
  const std::vector<int32_t> cu{0, 4001, 4500, 7000};
  std::vector<SequenceTiles> tiles;
  for (size_t s = 0; s + 1 < cu.size(); ++s)
    tiles.push_back({cu[s + 1] - cu[s], config.block, 16, 1, 2, config.budget});
  const int64_t batch = 40000;
  const SelectPlan plan = make_select_plan(shape, cu, {false, true, false}, tiles, config, score_tile, batch);
  const int expand = plan.select_block / plan.block;
  std::mt19937 random(5);
  std::normal_distribution<float> draw;
  int row = 0;
  int64_t pairs = 0;
  for (int head = 0; head < shape.kv_heads; ++head)
    for (size_t s = 0; s < tiles.size(); ++s)
      for (int64_t tile = 0; tile < tiles[s].tiles(); ++tile, ++row) {
        std::vector<IndexEntry> chosen;
        const int64_t competing = tiles[s].competing(tile);
        const auto kind =
            config.pattern == SelectionPattern::topk ? StaircaseRule::Kind::topk : StaircaseRule::Kind::topp;
        if (s == 1) {
          pairs += tile == 0 ? int64_t{499} * 500 / 2 : 0;
        } else if (config.pattern == SelectionPattern::window) {
          choose_window(tiles[s], tile, chosen);
        } else {
          std::vector<float> masses(competing * tiles[s].rows(tile));
          for (float& mass : masses) mass = draw(random);
          StaircaseRule rule = staircase_rule(kind, tiles[s].free_quota(tile), config.step, 16);
          Staircase().choose(tiles[s], tile, {masses.data(), competing, tiles[s].rows(tile), competing}, rule, chosen);
        }
        int64_t length = 0;
        for (const IndexEntry& entry : chosen) {
          for (int64_t p = tiles[s].begin(tile) + entry.first; p < tiles[s].end(tile); ++p)
            pairs += std::clamp<int64_t>(p - int64_t{entry.block} * config.block + 1, 0, config.block);
          for (int part = 0; part < expand; ++part)
            length += int64_t{entry.block} * config.block + part * plan.block < tiles[s].end(tile);
        }
        if (exact)
          ASSERT_EQ(plan.row_offsets[row + 1] - plan.row_offsets[row], length)
              << "head " << head << " sequence " << s << " tile " << tile;
        else
          ASSERT_GE(plan.row_offsets[row + 1] - plan.row_offsets[row], length);
      }
  EXPECT_EQ(plan.row_offsets.back(), plan.entries);
  if (exact) {
    EXPECT_EQ(plan.token_pairs, pairs);
  }

  // Every batch fits, its items have the masses of the tokens that choose, and no two share any.
  for (const SelectBatch& part : plan.batches) {
    std::map<int64_t, std::pair<int32_t, int32_t>> at;  // masses → token, competing
    for (int i = part.score_begin; i < part.score_begin + part.score_count; ++i) {
      const ScoreItem& score = plan.scores[i];
      EXPECT_LE(score.tokens, score_tile.tokens);
      EXPECT_EQ(score.stride, (score.competing + 63) / 64 * 64);
      for (int t = 0; t < score.tokens; ++t) {
        const int64_t place = score.masses + int64_t{t} * score.stride;
        const ScoreToken& token = plan.score_rows[int64_t{i} * plan.score_tokens + t];
        EXPECT_LE(place + score.stride, std::max(plan.masses, batch));
        const int32_t competing = score.stride - 64 + token.left;
        EXPECT_TRUE(score_tile.joins ? competing <= score.competing : competing == score.competing);
        EXPECT_TRUE(at.insert({place, {score.token + token.later, competing}}).second);
      }
    }
    for (int i = part.item_begin; i < part.item_begin + part.item_count; ++i) {
      const SelectItem& item = plan.items[i];
      if (item.everything || item.total == 0 || item.competing <= item.sinks + item.local) continue;
      int index = 0;
      const auto allowed = [&](int r) { return item.first + (item.total - item.first) * r / 15; };
      for (int r = 0; r < item.tokens; ++r) {
        if (config.pattern == SelectionPattern::topk && r > 0 && allowed(r) == allowed(r - 1)) continue;
        const auto found = at.find(item.masses + int64_t{index++} * item.stride);
        ASSERT_NE(found, at.end());
        const int32_t start = found->second.first - item.position - r;
        EXPECT_TRUE(start == 0 || start == 4500) << start;
        EXPECT_EQ(found->second.second, item.competing);
      }
    }
  }
}

TEST(GpuSelectPlan, KnowsTheLengthOfEveryListBeforehand) {
  check_plan(config_of(SelectionPattern::topk), true);
  check_plan(config_of(SelectionPattern::topk, 64), true);
  check_plan(config_of(SelectionPattern::topk, 256), true);
  check_plan(config_of(SelectionPattern::window), true);
  check_plan(config_of(SelectionPattern::topp), false);
}

TEST(GpuSelectPlan, JoinsTokensWithDifferentKeyBlocks) {
  check_plan(config_of(SelectionPattern::topk), true, {24, 1, true});
  check_plan(config_of(SelectionPattern::topk, 64), true, {192, 1, true});
  check_plan(config_of(SelectionPattern::topp), false, {24, 1, true});
  // All items are full but the last of each 64 key blocks.
  const std::vector<int32_t> cu{0, 32768};
  const SequenceTiles tiles{32768, kBlock, 16, 1, 2, 1638};
  SelectionConfig config = config_of(SelectionPattern::topk);
  config.budget = 1638;
  const SelectPlan plan = make_select_plan(shape_of(14, 2), cu, {false}, {tiles}, config, {24, 1, true}, 1 << 24);
  EXPECT_LE(std::ranges::count_if(plan.scores, [](const ScoreItem& item) { return item.tokens < 24; }), 8);
  EXPECT_GT(plan.scores.size(), 500u);
}

TEST(GpuSelectPlan, AllowanceIsTheStaircaseOfTheRule) {
  for (const int query_block : {1, 2, 7, 16, 128})
    for (const int first : {0, 1, 5, 40})
      for (const int total : {first, first + 1, first + 7, first + 15, first + 300}) {
        StaircaseRule rule;
        rule.first = first;
        rule.total = total;
        rule.rows = query_block;
        Allowance allowance(first, total, query_block);
        for (int row = 0; row < query_block; ++row, allowance.next()) {
          ASSERT_EQ(allowance.allowed, rule.allowed(row)) << query_block << " " << first << " " << total << " " << row;
          ASSERT_EQ(allowed_until(first, total, query_block, row), rule.allowed(row));
          ASSERT_EQ(allowance.grew, rule.allowed(row) > (row == 0 ? 0 : rule.allowed(row - 1)));
        }
      }
}

TEST(GpuSelectPlan, FewTokensOfAQueryBlockFillAnItem) {
  // A third of the tokens choose; still all but the last items of the groups of 64 key blocks are full.
  const std::vector<int32_t> cu{0, 32768};
  const SelectionConfig config = config_of(SelectionPattern::topk);
  const std::vector<SequenceTiles> tiles{{32768, config.block, 16, 1, 2, 1638}};
  const SelectPlan plan =
      make_select_plan(shape_of(16, 2), cu, {false}, tiles, config, {192, 1, true, 32, 4}, int64_t{1} << 26);
  int64_t tokens = 0;
  for (const ScoreItem& item : plan.scores) tokens += item.tokens;
  EXPECT_GT(tokens, 2 * 32768 / 4);
  EXPECT_LT(tokens, 2 * 32768 / 2);
  EXPECT_LE(std::ranges::count_if(plan.scores, [](const ScoreItem& item) { return item.tokens < 192; }), 8);
}

TEST(GpuSelectPlan, SequencesCountWhatTheyWant) {
  SelectionConfig config = config_of(SelectionPattern::mass);
  const std::vector<int32_t> cu{0, 9000, 9100, 12000};
  std::vector<SequenceTiles> tiles;
  for (size_t s = 0; s + 1 < cu.size(); ++s) tiles.push_back({cu[s + 1] - cu[s], config.block, 16, 1, 2, 1300});
  const SelectPlan plan = make_select_plan(shape_of(16, 2), cu, {false, true, false}, tiles, config, {16}, 1 << 20);
  ASSERT_EQ(plan.sequences.size(), 3u);
  ASSERT_EQ(plan.mass_classes.size(), 3u);
  for (size_t s = 0; s < 3; ++s) {
    EXPECT_EQ(plan.sequences[s].given, s == 1 ? 0 : 2 * given_blocks(tiles[s]));
    EXPECT_EQ(plan.sequences[s].wanted, s == 1 ? 0 : 2 * wanted_blocks(tiles[s]));
    EXPECT_LT(plan.mass_classes[s], kMassClasses);
  }
  EXPECT_NE(plan.mass_classes[0], plan.mass_classes[2]);
  config.order = SelectionOrder::lookahead;
  EXPECT_EQ(make_select_plan(shape_of(16, 2), cu, {false, true, false}, tiles, config, {16}, 1 << 20).mass_classes,
            std::vector<int32_t>(3, 0));
}

TEST(GpuSelectPlan, EveryPartHasARowOfStatistics) {
  // A tile of 64 rows is one part of 64 neighbouring key blocks, from the sequence's first on.
  struct Case {
    BlockScore score;
    int score_tokens;
    ScoreTile tile;
    int parts, statistics, width;  // of a row
  };
  const std::vector<int32_t> cu{0, 9000, 9100, 12000};
  for (const Case& c : {Case{BlockScore::moments, 0, {16}, 1, 2, 2 * 128},
                        {BlockScore::moments, 1, {16}, 128, 1, 128},
                        {BlockScore::moments, 32, {16}, 4, 2, 2 * 128},
                        {BlockScore::planes, 0, {16}, 128, 1, 24},
                        {BlockScore::planes, 0, {192, 1, true, 32, 4}, 32, 1, 128}}) {
    SelectionConfig config = config_of(SelectionPattern::topk);
    config.score = c.score;
    config.score_tokens = c.score_tokens;
    config.score_channels = 24;
    std::vector<SequenceTiles> tiles;
    for (size_t s = 0; s + 1 < cu.size(); ++s) tiles.push_back({cu[s + 1] - cu[s], config.block, 16, 1, 2, 1300});
    const SelectPlan plan = make_select_plan(shape_of(16, 2), cu, {false, true, false}, tiles, config, c.tile, 1 << 20);
    EXPECT_EQ(plan.parts, c.parts);
    EXPECT_EQ(plan.statistics, c.statistics);
    EXPECT_EQ(plan.row_width, c.width);
    std::map<int32_t, int> rows;
    for (const SelectBlock& block : plan.blocks)
      for (int part = 0; part < plan.parts; ++part) ++rows[block.row + part * kStatisticsGroup];
    EXPECT_EQ(rows.size(), plan.blocks.size() * plan.parts);
    EXPECT_LT(rows.rbegin()->first, plan.statistics_rows);
    for (const ScoreItem& score : plan.scores) {
      const int32_t first_token = score.token < cu[1] ? 0 : cu[2];
      for (int32_t b = 0; b < score.competing; ++b) {
        const int32_t row = score.statistics + b / 64 * 64 * plan.parts + b % 64;
        const auto block = std::ranges::find(plan.blocks, row, &SelectBlock::row);
        ASSERT_NE(block, plan.blocks.end());
        ASSERT_EQ(block->token, first_token + b * config.block);
        ASSERT_EQ(block->head, score.head);
      }
    }
  }
}

TEST(GpuSelectPlan, EverySliceIsScored) {
  // The same tokens once for each part of the group, in the same batches.
  const std::vector<int32_t> cu{0, 4000};
  const SelectionConfig config = config_of(SelectionPattern::topk);
  const std::vector<SequenceTiles> tiles{{4000, config.block, 16, 1, 2, 1300}};
  const SelectPlan one = make_select_plan(shape_of(16, 2), cu, {false}, tiles, config, {16}, 20000);
  const SelectPlan three = make_select_plan(shape_of(96, 2), cu, {false}, tiles, config, {16, 3}, 60000);
  ASSERT_GT(one.batches.size(), 1u);
  ASSERT_EQ(three.batches.size(), one.batches.size());
  EXPECT_EQ(three.masses, one.masses);
  for (size_t b = 0; b < one.batches.size(); ++b) {
    std::map<std::tuple<int32_t, int64_t, int32_t>, int> slices;  // token, masses, key/value head → bits of the slices
    const auto scores = [&](const SelectPlan& plan) {
      return std::span(plan.scores).subspan(plan.batches[b].score_begin, plan.batches[b].score_count);
    };
    for (const ScoreItem& item : scores(three))
      slices[{item.token, item.masses - item.head % 3 * three.masses, item.head / 3}] += 1 << item.head % 3;
    EXPECT_EQ(slices.size(), scores(one).size());
    for (const ScoreItem& item : scores(one)) EXPECT_EQ((slices[{item.token, item.masses, item.head}]), 7);
  }
}

TEST(GpuSelectPlan, RefusesWhatListsCannotName) {
  const int32_t length = 10 * 1000 * 1000;
  SelectionConfig config = config_of(SelectionPattern::topk);
  const SequenceTiles tiles{length, kBlock, 16, 1, 2, 1300};
  EXPECT_THROW(make_select_plan(shape_of(16, 2), std::vector<int32_t>{0, length}, {false}, {tiles}, config, {16}, 1000),
               UserError);
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

// The choices of all pieces together are laid out as those of the whole sequence, and judged by the same statistics.
TEST(GpuSelect, PiecesArePlannedAsTheWhole) {
  SelectionConfig config;
  config.budget = 700;
  for (const auto& [block, query_block, parts] : {std::tuple{128, 16, 0}, {64, 128, 16}, {256, 32, 0}}) {
    config.block = block;
    config.query_block = query_block;
    config.score_tokens = parts;
    config.score = BlockScore::moments;
    constexpr int32_t kTokens = 3000, kPiece = 768;
    const std::vector<SequenceTiles> tiles{{kTokens, block, query_block, 1, 2, 700}};
    const Shape whole_shape{kTokens, 4, 2, 64, 0.1f};
    const std::vector<int32_t> all{0, kTokens};
    const SelectPlan whole = make_select_plan(whole_shape, all, {false}, tiles, config, {16, 1, true}, 1 << 24);
    int64_t rows = 0, entries = 0, pairs = 0, given = 0, wanted = 0;
    std::map<int32_t, int32_t> statistics;  // row of a block, its token
    for (int32_t begin = 0; begin < kTokens; begin += kPiece) {
      const int32_t tokens = std::min(kPiece, kTokens - begin);
      Shape shape{tokens, 4, 2, 64, 0.1f};
      shape.first_query = begin;
      const std::vector<int32_t> cu{0, tokens};
      const SelectPlan piece =
          make_select_plan(shape, cu, {false}, tiles, config, {16, 1, true}, 1 << 24, nullptr, /*piece=*/true);
      EXPECT_EQ(piece.statistics_rows, whole.statistics_rows);
      EXPECT_EQ(piece.columns, 2 * ((begin + tokens + piece.block - 1) / piece.block));
      rows += piece.rows;
      entries += piece.entries;
      pairs += piece.token_pairs;
      given += piece.sequences[0].given;
      wanted += piece.sequences[0].wanted;
      for (const SelectBlock& one : piece.blocks) EXPECT_TRUE(statistics.emplace(one.row, one.token + begin).second);
      for (const ScoreItem& item : piece.scores) EXPECT_LT(item.token, tokens);
      int32_t columns = 0;
      for (const SelectGroup& group : piece.groups) {
        EXPECT_EQ(group.column, columns);
        columns += group.columns;
        // Its first query block sees its first key block, the one before does not.
        const int key = (group.key_block + begin / piece.block) * piece.block;
        EXPECT_GT(begin + (group.first_block + 1) * query_block, key);
        if (group.first_block > 0) {
          EXPECT_LE(begin + group.first_block * query_block, key + query_block - 1);
        }
        EXPECT_EQ(group.first_block + group.query_blocks, piece.rows);
      }
      EXPECT_EQ(columns, piece.columns);
    }
    EXPECT_EQ(rows, whole.rows);
    EXPECT_EQ(entries, whole.entries);
    EXPECT_EQ(pairs, whole.token_pairs);
    EXPECT_EQ(given, whole.sequences[0].given);
    EXPECT_EQ(wanted, whole.sequences[0].wanted);
    ASSERT_EQ(statistics.size(), whole.blocks.size());
    for (const SelectBlock& one : whole.blocks) EXPECT_EQ(statistics.at(one.row), one.token);
  }
}

}  // namespace
}  // namespace sb::gpu
