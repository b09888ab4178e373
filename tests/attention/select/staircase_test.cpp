#include "attention/select/staircase.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "core/random.h"

namespace sb {
namespace {

SequenceTiles make_tiles(int64_t tokens, int query_block, int64_t budget) {
  SequenceTiles tiles;
  tiles.tokens = tokens;
  tiles.block = 64;
  tiles.query_block = query_block;
  tiles.budget = budget;
  return tiles;
}

// Log masses of rows × count blocks; each row's masses sum to one.
std::vector<float> random_masses(int rows, int64_t count, uint64_t seed) {
  Random random(seed);
  std::vector<float> masses(rows * count);
  for (int r = 0; r < rows; ++r) {
    double sum = 0;
    for (int64_t j = 0; j < count; ++j) {
      masses[r * count + j] = static_cast<float>(2.0 * random.normal());
      sum += std::exp(masses[r * count + j]);
    }
    for (int64_t j = 0; j < count; ++j) masses[r * count + j] -= static_cast<float>(std::log(sum));
  }
  return masses;
}

std::vector<IndexEntry> select(const SequenceTiles& tiles, int64_t tile, const std::vector<float>& masses,
                               const StaircaseRule& rule) {
  std::vector<IndexEntry> out;
  Staircase staircase;
  const int64_t count = tiles.competing(tile);
  staircase.select(tiles, tile, {masses.data(), count, tiles.rows(tile), count}, rule, out);
  return out;
}

TEST(SequenceTiles, CountsBlocksAndForced) {
  const SequenceTiles tiles = make_tiles(1000, 16, 512);
  EXPECT_EQ(tiles.blocks(), 16);
  EXPECT_EQ(tiles.tiles(), 63);
  EXPECT_EQ(tiles.rows(62), 8);
  EXPECT_EQ(tiles.competing(0), 0);
  EXPECT_EQ(tiles.visible(0), 1);
  EXPECT_EQ(tiles.competing(4), 1);  // tokens 64 … 79: block 0 ends before
  EXPECT_EQ(tiles.visible(4), 2);
  EXPECT_EQ(tiles.forced_competing(4), 1);
  EXPECT_EQ(tiles.candidates(62), 15 - 3);
  EXPECT_EQ(tiles.quota(10), 8);
}

TEST(SequenceTiles, TileLongerThanABlockOwnsSeveral) {
  const SequenceTiles tiles = make_tiles(1000, 128, 512);
  EXPECT_EQ(tiles.competing(2), 4);
  EXPECT_EQ(tiles.visible(2), 6);
  EXPECT_EQ(tiles.visible(7), 16);
}

TEST(SequenceTiles, OddBudgetsAreMetOnAverage) {
  const SequenceTiles tiles = make_tiles(64 * 1000, 64, 1000);
  int64_t sum = 0;
  for (int64_t tile = 0; tile < 1000; ++tile) sum += tiles.quota(tile) * 64;
  EXPECT_EQ(sum / 1000, 1000);
}

TEST(SequenceTiles, NeverBelowTheMinimum) {
  const SequenceTiles tiles = make_tiles(6400, 16, 1);
  for (int64_t tile = 0; tile < tiles.tiles(); ++tile) EXPECT_EQ(tiles.quota(tile), 1 + 2 + 2);
}

TEST(StaircaseRule, SpreadsTheQuota) {
  const StaircaseRule rule = staircase_rule(StaircaseRule::Kind::topk, 40, 1, 16);
  EXPECT_EQ(rule.first, 25);
  EXPECT_EQ(rule.allowed(0), 25);
  EXPECT_EQ(rule.allowed(1), 26);
  EXPECT_EQ(rule.allowed(15), 40);
  const StaircaseRule two = staircase_rule(StaircaseRule::Kind::topk, 40, 2, 16);
  EXPECT_EQ(two.first, 20);  // 30 wanted, half allowed
  EXPECT_EQ(two.allowed(15), 40);
  const StaircaseRule small = staircase_rule(StaircaseRule::Kind::topk, 3, 1, 16);
  EXPECT_EQ(small.first, 2);
  EXPECT_EQ(small.allowed(14), 2);
  EXPECT_EQ(small.allowed(15), 3);
  const StaircaseRule token = staircase_rule(StaircaseRule::Kind::topk, 7, 1, 1);
  EXPECT_EQ(token.first, 7);
  EXPECT_EQ(token.allowed(0), 7);
  EXPECT_EQ(staircase_rule(StaircaseRule::Kind::topk, 0, 1, 16).allowed(15), 0);
}

// Independent restatement of the rule: every row takes its best blocks that are not there yet.
TEST(Staircase, TopkTakesTheBestInTurn) {
  for (const int query_block : {1, 4, 16, 64}) {
    const SequenceTiles tiles = make_tiles(64 * 40, query_block, 64 * 14);
    const int64_t tile = tiles.tiles() - 1, count = tiles.competing(tile);
    const std::vector<float> masses = random_masses(tiles.rows(tile), count, 11 + query_block);
    const StaircaseRule rule = staircase_rule(StaircaseRule::Kind::topk, tiles.free_quota(tile), 1, query_block);
    const std::vector<IndexEntry> out = select(tiles, tile, masses, rule);

    std::set<int64_t> selected;
    for (int64_t j = 0; j < count; ++j) {
      if (tiles.forced(tile, j)) selected.insert(j);
    }
    const size_t forced = selected.size();
    std::vector<int> first_row(count, 0);
    for (int row = 0; row < tiles.rows(tile); ++row) {
      while (static_cast<int64_t>(selected.size() - forced) < rule.allowed(row)) {
        int64_t best = -1;
        for (int64_t j = 0; j < count; ++j) {
          if (!selected.count(j) && (best < 0 || masses[row * count + j] > masses[row * count + best])) best = j;
        }
        selected.insert(best);
        first_row[best] = row;
      }
    }
    ASSERT_EQ(out.size(), selected.size() + 1);
    size_t i = 0;
    for (const int64_t j : selected) {
      EXPECT_EQ(out[i].block, j);
      EXPECT_EQ(out[i].first, first_row[j]);
      ++i;
    }
    EXPECT_EQ(out.back(), (IndexEntry{static_cast<uint16_t>(count), 0}));
    EXPECT_EQ(static_cast<int64_t>(out.size()), tiles.quota(tile));
  }
}

TEST(Staircase, LaterRowsNeverChangeEarlierSelections) {
  using RuleKind = StaircaseRule::Kind;
  for (const RuleKind kind : {RuleKind::topk, RuleKind::topp, RuleKind::mass}) {
    const SequenceTiles tiles = make_tiles(64 * 50, 16, 64 * 24);
    const int64_t tile = tiles.tiles() - 1, count = tiles.competing(tile);
    const std::vector<float> masses = random_masses(16, count, 3);
    StaircaseRule rule = staircase_rule(kind, tiles.free_quota(tile), 1, 16);
    rule.coverage = 0.8;
    rule.threshold = std::log(0.03f);
    rule.floor = 2;
    const std::vector<IndexEntry> before = select(tiles, tile, masses, rule);
    for (int cut = 0; cut < 16; ++cut) {
      std::vector<float> changed = random_masses(16, count, 1000 + cut);
      std::copy(masses.begin(), masses.begin() + (cut + 1) * count, changed.begin());
      const std::vector<IndexEntry> after = select(tiles, tile, changed, rule);
      const auto seen = [&](const std::vector<IndexEntry>& list) {
        std::vector<IndexEntry> kept;
        for (const IndexEntry& entry : list) {
          if (entry.first <= cut) kept.push_back(entry);
        }
        return kept;
      };
      EXPECT_EQ(seen(before), seen(after)) << "kind " << static_cast<int>(kind) << " cut " << cut;
    }
  }
}

TEST(Staircase, TopkTakesEverythingWhenItFits) {
  const SequenceTiles tiles = make_tiles(64 * 6, 16, 64 * 6);
  const int64_t tile = tiles.tiles() - 1;
  std::vector<IndexEntry> out;
  Staircase().select(tiles, tile, {nullptr, 0, 0, 0},
                     staircase_rule(StaircaseRule::Kind::topk, tiles.free_quota(tile), 1, 16), out);
  EXPECT_EQ(out.size(), 6u);
}

TEST(Staircase, ToppStopsAtCoverageAndAtTheCap) {
  const SequenceTiles tiles = make_tiles(64 * 60, 1, 64 * 40);
  const int64_t tile = tiles.tiles() - 1, count = tiles.competing(tile);
  const std::vector<float> masses = random_masses(1, count, 5);
  StaircaseRule rule = staircase_rule(StaircaseRule::Kind::topp, tiles.free_quota(tile), 1, 1);
  for (const double p : {0.3, 0.6, 0.9}) {
    rule.coverage = p;
    double held = 0, least = 2;
    for (const IndexEntry& entry : select(tiles, tile, masses, rule)) {
      if (entry.block >= count) continue;
      held += std::exp(masses[entry.block]);
      if (!tiles.forced(tile, entry.block)) least = std::min<double>(least, std::exp(masses[entry.block]));
    }
    EXPECT_GE(held, p - 1e-6);
    EXPECT_LT(held - least, p) << "one block fewer would do";
  }
  rule.coverage = 1.0;
  rule.total = 5;
  rule.first = 5;
  EXPECT_EQ(select(tiles, tile, masses, rule).size(), 5u + 3u + 1u);
}

TEST(Staircase, MassTakesWhatExceedsTheThreshold) {
  const SequenceTiles tiles = make_tiles(64 * 60, 1, 64 * 60);
  const int64_t tile = tiles.tiles() - 1, count = tiles.competing(tile);
  const std::vector<float> masses = random_masses(1, count, 6);
  StaircaseRule rule = staircase_rule(StaircaseRule::Kind::mass, count, 1, 1);
  rule.threshold = std::log(0.02f);
  size_t expected = 1;
  for (int64_t j = 0; j < count; ++j) expected += tiles.forced(tile, j) || masses[j] >= rule.threshold;
  const std::vector<IndexEntry> out = select(tiles, tile, masses, rule);
  EXPECT_EQ(out.size(), expected);
  for (const IndexEntry& entry : out) {
    if (entry.block < count && !tiles.forced(tile, entry.block)) {
      EXPECT_GE(masses[entry.block], rule.threshold);
    }
  }
  rule.threshold = 1.0f;  // nothing exceeds it
  rule.floor = 4;
  EXPECT_EQ(select(tiles, tile, masses, rule).size(), 4u + 3u + 1u);
}

TEST(Lookahead, TakesTheBestOfTheTile) {
  const SequenceTiles tiles = make_tiles(64 * 30, 64, 64 * 10);
  const int64_t tile = tiles.tiles() - 1, count = tiles.competing(tile);
  const std::vector<float> masses = random_masses(1, count, 8);
  std::vector<IndexEntry> out;
  Staircase().select(tiles, tile, {masses.data(), count, 1, count},
                     staircase_rule(StaircaseRule::Kind::topk, tiles.free_quota(tile), 1, 1), out);
  ASSERT_EQ(static_cast<int64_t>(out.size()), tiles.quota(tile));
  float worst_in = 1, best_out = -1000;
  std::set<int64_t> in;
  for (const IndexEntry& entry : out) in.insert(entry.block);
  for (int64_t j = 0; j < count; ++j) {
    if (tiles.forced(tile, j)) {
      EXPECT_TRUE(in.count(j));
    } else if (in.count(j)) {
      worst_in = std::min(worst_in, masses[j]);
    } else {
      best_out = std::max(best_out, masses[j]);
    }
  }
  EXPECT_GE(worst_in, best_out);
}

TEST(Window, SinksAndLatest) {
  const SequenceTiles tiles = make_tiles(64 * 30, 16, 64 * 8);
  std::vector<IndexEntry> out;
  select_window(tiles, tiles.tiles() - 1, out);
  ASSERT_EQ(out.size(), 8u);
  EXPECT_EQ(out[0].block, 0);
  for (int i = 1; i < 8; ++i) EXPECT_EQ(out[i].block, 30 - 8 + i);
  out.clear();
  select_window(tiles, 0, out);
  EXPECT_EQ(out.size(), 1u);
}

TEST(SelectEverything, FirstTokenSeesItsOwnBlock) {
  std::vector<IndexEntry> out;
  select_everything(make_tiles(1, 16, 1), 0, out);
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0], (IndexEntry{0, 0}));
}

// A diverged step brings NaN; which blocks it then reads matters little, but numbers come first and nothing crashes.
TEST(Staircase, NotANumberIsSelectedLast) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    const SequenceTiles tiles = make_tiles(64 * 64, 1, 64 * 16);
    const int64_t tile = tiles.tiles() - 1, count = tiles.competing(tile);
    std::vector<float> masses = random_masses(1, count, seed);
    Random random(seed + 100);
    for (float& mass : masses)
      if (random.below(3) == 0) mass = NAN;
    const std::vector<IndexEntry> out = select(tiles, tile, masses, staircase_rule(StaircaseRule::Kind::topk, 9, 0, 1));
    std::set<int64_t> selected;
    for (const IndexEntry& entry : out) selected.insert(entry.block);
    float least = INFINITY, most_left = -INFINITY;
    for (int64_t j = 0; j < count; ++j) {
      if (tiles.forced(tile, j)) continue;
      if (selected.count(j) == 0 && !std::isnan(masses[j])) most_left = std::max(most_left, masses[j]);
      if (selected.count(j) == 0) continue;
      ASSERT_FALSE(std::isnan(masses[j])) << "seed " << seed << " block " << j;
      least = std::min(least, masses[j]);
    }
    EXPECT_GE(least, most_left) << seed;
  }
}

}  // namespace
}  // namespace sb
