// What the host plans for selection on a GPU.

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <tuple>

#include "attention/gpu/select/select.h"
#include "attention/select/staircase.h"
#include "core/errors.h"
#include "tests/attention/gpu/hopper/lists.h"

namespace sb::gpu {
namespace {

Shape heads_of(int query_heads, int kv_heads) {
  return {0, query_heads, kv_heads, 128, 0.1f};
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
// the masses that the plan provides for are those of the tokens that select.
void check_plan(const SelectionConfig& config, bool exact, const ScoreTile& score_tile = {16}) {
  const Shape shape = heads_of(16, 2);
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
        std::vector<IndexEntry> selected;
        const int64_t competing = tiles[s].competing(tile);
        const auto kind =
            config.pattern == SelectionPattern::topk ? StaircaseRule::Kind::topk : StaircaseRule::Kind::topp;
        if (s == 1) {
          pairs += tile == 0 ? int64_t{499} * 500 / 2 : 0;
        } else if (config.pattern == SelectionPattern::window) {
          select_window(tiles[s], tile, selected);
        } else {
          std::vector<float> masses(competing * tiles[s].rows(tile));
          for (float& mass : masses) mass = draw(random);
          StaircaseRule rule = staircase_rule(kind, tiles[s].free_quota(tile), config.step, 16);
          Staircase().select(tiles[s], tile, {masses.data(), competing, tiles[s].rows(tile), competing}, rule,
                             selected);
        }
        int64_t length = 0;
        for (const IndexEntry& entry : selected) {
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

  // Every batch fits, its items have the masses of the tokens that select, and no two share any.
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
  const SelectPlan plan = make_select_plan(heads_of(14, 2), cu, {false}, {tiles}, config, {24, 1, true}, 1 << 24);
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
  // A third of the tokens select; still all but the last items of the groups of 64 key blocks are full.
  const std::vector<int32_t> cu{0, 32768};
  const SelectionConfig config = config_of(SelectionPattern::topk);
  const std::vector<SequenceTiles> tiles{{32768, config.block, 16, 1, 2, 1638}};
  const SelectPlan plan =
      make_select_plan(heads_of(16, 2), cu, {false}, tiles, config, {192, 1, true, 32, 4}, int64_t{1} << 26);
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
  const SelectPlan plan = make_select_plan(heads_of(16, 2), cu, {false, true, false}, tiles, config, {16}, 1 << 20);
  ASSERT_EQ(plan.sequences.size(), 3u);
  ASSERT_EQ(plan.mass_classes.size(), 3u);
  for (size_t s = 0; s < 3; ++s) {
    EXPECT_EQ(plan.sequences[s].given, s == 1 ? 0 : 2 * given_blocks(tiles[s]));
    EXPECT_EQ(plan.sequences[s].wanted, s == 1 ? 0 : 2 * wanted_blocks(tiles[s]));
    EXPECT_LT(plan.mass_classes[s], kMassClasses);
  }
  EXPECT_NE(plan.mass_classes[0], plan.mass_classes[2]);
  config.order = SelectionOrder::lookahead;
  EXPECT_EQ(make_select_plan(heads_of(16, 2), cu, {false, true, false}, tiles, config, {16}, 1 << 20).mass_classes,
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
    const SelectPlan plan = make_select_plan(heads_of(16, 2), cu, {false, true, false}, tiles, config, c.tile, 1 << 20);
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
  const SelectPlan one = make_select_plan(heads_of(16, 2), cu, {false}, tiles, config, {16}, 20000);
  const SelectPlan three = make_select_plan(heads_of(96, 2), cu, {false}, tiles, config, {16, 3}, 60000);
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
  EXPECT_THROW(make_select_plan(heads_of(16, 2), std::vector<int32_t>{0, length}, {false}, {tiles}, config, {16}, 1000),
               UserError);
}

// The selections of all pieces together are laid out as those of the whole sequence, and judged by the same statistics.
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
