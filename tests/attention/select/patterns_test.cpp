#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <vector>

#include "attention/select/by_mass.h"
#include "attention/select/selector.h"
#include "attention/select/staircase.h"
#include "attention/select/vertical_slash.h"
#include "core/errors.h"
#include "core/random.h"
#include "tests/core/message_of.h"

namespace sb {
namespace {

using Kind = StaircaseRule::Kind;
using Pattern = SelectionPattern;

std::vector<int64_t> blocks_of(const std::vector<IndexEntry>& row) {
  std::vector<int64_t> blocks;
  for (const IndexEntry& entry : row) blocks.push_back(entry.block);
  return blocks;
}

// Every odd size: what the numbers of a tile mean, token by token.
TEST(SequenceTiles, AreWhatTheirTokensSee) {
  for (const int block : {64, 128})
    for (const int query_block : {1, 16, 64, 128})
      for (const int64_t tokens : {1, 15, 16, 17, 63, 64, 65, 127, 129, 1000, 1025}) {
        SequenceTiles tiles;
        tiles.tokens = tokens;
        tiles.block = block;
        tiles.query_block = query_block;
        tiles.budget = 300;
        int64_t rows = 0;
        for (int64_t tile = 0; tile < tiles.tiles(); ++tile) {
          ASSERT_GT(tiles.rows(tile), 0);
          ASSERT_LE(tiles.rows(tile), query_block);
          rows += tiles.rows(tile);
          std::set<int64_t> before, seen;
          for (int64_t key = 0; key < tiles.end(tile); ++key) seen.insert(key / block);
          for (int64_t j : seen)
            if ((j + 1) * block <= tiles.begin(tile)) before.insert(j);
          EXPECT_EQ(tiles.competing(tile), std::ssize(before));
          EXPECT_EQ(tiles.visible(tile), std::ssize(seen));
          int64_t forced = 0, given = 0;
          for (const int64_t j : seen) {
            const bool own = !before.contains(j);
            const bool must = j < 1 || j >= std::ssize(before) - 2;  // one sink, two local blocks
            EXPECT_EQ(tiles.forced(tile, j), must || own) << j;
            forced += must && !own ? 1 : 0;
            given += must || own ? 1 : 0;
          }
          EXPECT_EQ(tiles.forced_competing(tile), forced);
          EXPECT_EQ(tiles.given(tile), given);
          EXPECT_EQ(tiles.candidates(tile), std::ssize(before) - forced);
          EXPECT_LE(tiles.wanted(tile) + tiles.given(tile), std::max(tiles.quota(tile), given));
        }
        EXPECT_EQ(rows, tokens);
        EXPECT_EQ(tiles.everything_fits(), tokens <= 300);
      }
}

TEST(Staircase, TiesGoToTheLowerBlock) {
  SequenceTiles tiles;
  tiles.tokens = 64 * 20;
  tiles.block = 64;
  tiles.query_block = 16;
  const int64_t tile = tiles.tiles() - 1, count = tiles.competing(tile);  // 19 blocks: 0 is a sink, 17 and 18 are local
  const int rows = 16;
  const auto selected = [&](const std::vector<float>& masses, const StaircaseRule& rule) {
    std::vector<IndexEntry> out;
    Staircase().select(tiles, tile, {masses.data(), count, rows, count}, rule, out);
    return out;
  };
  for (const float value : {-3.0f, 0.0f, -INFINITY, INFINITY}) {
    const std::vector<float> equal(static_cast<size_t>(rows * count), value);
    const auto out = selected(equal, staircase_rule(Kind::topk, 5, 0, rows));
    EXPECT_EQ(blocks_of(out), (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 17, 18, 19})) << value;
    for (const IndexEntry& entry : out) EXPECT_EQ(entry.first, 0);
  }
  // Two that are better share the first places whatever their place; the rest follow from below.
  std::vector<float> two(static_cast<size_t>(rows * count), -5.0f);
  for (int row = 0; row < rows; ++row)
    two[static_cast<size_t>(row * count + 16)] = two[static_cast<size_t>(row * count + 9)] = -1;
  EXPECT_EQ(blocks_of(selected(two, staircase_rule(Kind::topk, 3, 0, rows))),
            (std::vector<int64_t>{0, 1, 9, 16, 17, 18, 19}));
  // One after the other where each token adds one: half stays with the first.
  const auto stairs = selected(two, staircase_rule(Kind::topk, 6, 1, rows));
  EXPECT_EQ(blocks_of(stairs), (std::vector<int64_t>{0, 1, 2, 3, 4, 9, 16, 17, 18, 19}));
  const std::vector<int> first{0, 0, 5, 10, 15, 0, 0, 0, 0, 0};
  for (size_t i = 0; i < stairs.size(); ++i) EXPECT_EQ(stairs[i].first, first[i]) << stairs[i].block;
}

// Masses that floats barely hold, or do not: an order is still an order.
TEST(Staircase, HugeAndVanishingMasses) {
  SequenceTiles tiles;
  tiles.tokens = 64 * 9;
  tiles.block = 64;
  tiles.query_block = 1;
  const int64_t tile = tiles.tiles() - 1, count = tiles.competing(tile);  // 8 blocks: 0, 6 and 7 are forced
  ASSERT_EQ(count, 8);
  const std::vector<float> masses{0, -3e38f, 3e38f, INFINITY, -INFINITY, 1e-40f, 0, 0};
  const auto selected = [&](const StaircaseRule& rule) {
    std::vector<IndexEntry> out;
    Staircase().select(tiles, tile, {masses.data(), count, 1, count}, rule, out);
    return blocks_of(out);
  };
  const std::vector<std::vector<int64_t>> best{{}, {3}, {2, 3}, {2, 3, 5}, {1, 2, 3, 5}, {1, 2, 3, 4, 5}};
  for (size_t room = 0; room < best.size(); ++room) {
    std::vector<int64_t> expected{0};
    expected.insert(expected.end(), best[room].begin(), best[room].end());
    expected.insert(expected.end(), {6, 7, 8});
    EXPECT_EQ(selected(staircase_rule(Kind::topk, static_cast<int64_t>(room), 1, 1)), expected) << room;
  }
  StaircaseRule threshold = staircase_rule(Kind::mass, 5, 1, 1);
  threshold.threshold = 0;
  EXPECT_EQ(selected(threshold), (std::vector<int64_t>{0, 2, 3, 5, 6, 7, 8}));
  threshold.threshold = INFINITY;
  EXPECT_EQ(selected(threshold), (std::vector<int64_t>{0, 3, 6, 7, 8}));
  threshold.threshold = -INFINITY;
  EXPECT_EQ(selected(threshold), (std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8}));
}

TEST(Staircase, MassesOfAnotherShapeAreRefused) {
  SequenceTiles tiles;
  tiles.tokens = 64 * 20;
  tiles.block = 64;
  tiles.query_block = 16;
  const int64_t tile = tiles.tiles() - 1, count = tiles.competing(tile);
  const std::vector<float> masses(static_cast<size_t>(16 * count), 0.0f);
  const StaircaseRule rule = staircase_rule(Kind::topk, 2, 1, 16);
  for (const auto& [rows, of] : {std::pair{15, count}, {16, count - 1}, {1, count}}) {
    std::vector<IndexEntry> out;
    EXPECT_THROW(Staircase().select(tiles, tile, {masses.data(), of, rows, of}, rule, out), Error);
  }
}

// NaN last, equal ones by their place: an order that sorting can rely on.
TEST(SelectedBefore, IsAStrictOrder) {
  const std::vector<float> values{NAN, -INFINITY, -1, 0, -0.0f, 1, 1, INFINITY, NAN};
  const auto before = [&](size_t a, size_t b) {
    return selected_before(values[a], static_cast<int64_t>(a), values[b], static_cast<int64_t>(b));
  };
  for (size_t a = 0; a < values.size(); ++a) {
    EXPECT_FALSE(before(a, a));
    for (size_t b = 0; b < values.size(); ++b) {
      if (a != b) {
        EXPECT_NE(before(a, b), before(b, a)) << a << " " << b;
      }
      for (size_t c = 0; c < values.size(); ++c)
        if (before(a, b) && before(b, c)) {
          EXPECT_TRUE(before(a, c)) << a << " " << b << " " << c;
        }
    }
  }
  std::vector<size_t> order(values.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), before);
  EXPECT_EQ(order, (std::vector<size_t>{7, 5, 6, 3, 4, 2, 1, 0, 8}));
}

// The sinks, then as many of the latest as the quota leaves: for every tile of odd sequences.
TEST(Window, IsTheQuotaOfTheLatestBlocks) {
  for (const int64_t tokens : {1, 64, 65, 1000, 64 * 12 + 1})
    for (const int64_t budget : {1, 320, 500, 640})
      for (const int query_block : {1, 16, 128}) {
        SequenceTiles tiles;
        tiles.tokens = tokens;
        tiles.block = 64;
        tiles.query_block = query_block;
        tiles.budget = budget;
        for (int64_t tile = 0; tile < tiles.tiles(); ++tile) {
          std::vector<IndexEntry> row;
          select_window(tiles, tile, row);
          // As many as may be: the quota, but the sinks, two local blocks and the tile's own in any case.
          const int64_t own = tiles.visible(tile) - tiles.competing(tile);
          const int64_t most = std::min(tiles.visible(tile), std::max(tiles.quota(tile), own + 3));
          ASSERT_EQ(std::ssize(row), most) << tokens << " " << budget << " " << tile;
          EXPECT_EQ(row[0].block, 0);
          for (int64_t i = 1; i < most; ++i)
            EXPECT_EQ(row[static_cast<size_t>(i)].block, tiles.visible(tile) - most + i);
        }
      }
}

struct Sequence {
  AttentionShape shape{4, 2, 16, 0.25f};
  int64_t tokens;
  std::vector<float> q, k;
  Sequence(int64_t n, float size, uint64_t seed) : tokens(n) {
    Random random(seed);
    q.resize(static_cast<size_t>(n * 4 * 16));
    k.resize(static_cast<size_t>(n * 2 * 16));
    for (float& x : q) x = size * static_cast<float>(random.normal());
    for (float& x : k) x = size * static_cast<float>(random.normal());
  }
};

BlockIndex select(const SelectionConfig& config, const Sequence& in) {
  ThreadPool pool(1);
  Exec exec;
  exec.pool = &pool;
  const Selector selector(config);
  const std::vector<int32_t> cu = {0, static_cast<int32_t>(in.tokens)};
  BlockIndex index;
  BlockIndexBuilder builder;
  builder.begin(index, {config.block, config.query_block, selector.list_heads(in.shape)}, cu, {}, 1);
  SelectionRequest request;
  request.shape = in.shape;
  request.tiles = sequence_tiles(config, in.tokens, config.budget);
  request.q = in.q.data();
  request.k = in.k.data();
  request.place = index.sequences()[0];
  request.threshold = start_threshold(request.tiles);
  const BlockScoring scoring(config);
  std::vector<float> statistics(
      static_cast<size_t>(BlockStatistics::floats(scoring, in.shape, request.tiles.blocks())));
  BlockStatistics::fill(exec, in.shape, scoring, in.k.data(), in.tokens, statistics.data());
  request.statistics = statistics.data();
  selector.select(exec, request, builder);
  builder.finish(pool);
  return index;
}

// One token, one block, one more than a block, keys of nothing and keys beyond what exponentials hold: every row has
// the forced blocks, rises, and ends with the tile's own.
TEST(Selector, EveryPatternWorksOnOddSizesAndOddValues) {
  for (const Pattern pattern : {Pattern::topk, Pattern::topp, Pattern::mass, Pattern::window, Pattern::vertical_slash})
    for (const SelectionOrder order : {SelectionOrder::causal, SelectionOrder::lookahead})
      for (const int64_t tokens : {1, 63, 64, 65, 127, 64 * 9, 64 * 9 + 1, 1000})
        for (const float size : {0.0f, 1.0f, 1e4f}) {
          if (pattern == Pattern::vertical_slash && order == SelectionOrder::causal) continue;
          SelectionConfig config;
          config.pattern = pattern;
          config.order = order;
          config.block = 64;
          config.budget = 64 * 6;
          const Sequence in(tokens, size, static_cast<uint64_t>(tokens));
          const BlockIndex index = select(config, in);
          const SequenceTiles tiles = sequence_tiles(config, tokens, config.budget);
          const int heads = pattern == Pattern::vertical_slash ? 4 : 2;
          ASSERT_EQ(index.rows(), heads * tiles.tiles());
          for (int head = 0; head < heads; ++head)
            for (int64_t tile = 0; tile < tiles.tiles(); ++tile) {
              const BlockIndex::Row row =
                  index.row(BlockIndex::row_id(index.sequences()[0], head, static_cast<int>(tile)));
              ASSERT_FALSE(row.blocks.empty());
              EXPECT_TRUE(std::is_sorted(row.blocks.begin(), row.blocks.end()));
              EXPECT_EQ(row.blocks.back(), tiles.visible(tile) - 1);
              const std::set<int64_t> listed(row.blocks.begin(), row.blocks.end());
              EXPECT_EQ(listed.size(), row.blocks.size());
              for (int64_t j = 0; j < tiles.visible(tile); ++j)
                if (tiles.forced(tile, j)) {
                  EXPECT_TRUE(listed.contains(j)) << "pattern " << static_cast<int>(pattern) << " tile " << tile;
                }
              for (const uint8_t first : row.first) EXPECT_LT(first, tiles.rows(tile));
            }
        }
}

// Keys that are all alike leave nothing to choose by: the lowest candidates.
TEST(Selector, EqualKeysSelectTheLowestBlocks) {
  SelectionConfig config;
  config.block = 64;
  config.budget = 64 * 6;
  const Sequence in(64 * 16, 0.0f, 1);
  const BlockIndex index = select(config, in);
  const SequenceTiles tiles = sequence_tiles(config, in.tokens, config.budget);
  const auto last = static_cast<int>(tiles.tiles() - 1);
  const BlockIndex::Row row = index.row(BlockIndex::row_id(index.sequences()[0], 1, last));
  // Six: a sink, two local ones and its own; 1 and 2 besides.
  EXPECT_EQ(std::vector<int>(row.blocks.begin(), row.blocks.end()), (std::vector<int>{0, 1, 2, 13, 14, 15}));
}

TEST(VerticalSlash, TiesNothingAndEverything) {
  const std::vector<double> equal(6, 1.0), none(6, 0.0);
  using Places = std::vector<int32_t>;
  // Half of six equal columns: the first three. Of the distances the diagonal counts: half are it and two more.
  VerticalSlash found = select_vertical_slash(equal, equal, {0.5, 0.5, 100, 100});
  EXPECT_EQ(found.verticals, (Places{0, 1, 2}));
  EXPECT_EQ(found.slashes, (Places{0, 1, 2}));
  found = select_vertical_slash(equal, equal, {1.0, 1.0, 100, 100});
  EXPECT_EQ(found.verticals.size(), 6u);
  EXPECT_EQ(found.slashes.size(), 6u);
  // No mass at all is reached at once, but everything is everything; caps of nothing leave the diagonal.
  found = select_vertical_slash(none, none, {0.9, 0.9, 100, 100});
  EXPECT_EQ(found.verticals, Places{});
  EXPECT_EQ(found.slashes, Places{0});
  EXPECT_EQ(select_vertical_slash(none, none, {1.0, 1.0, 100, 100}).verticals.size(), 6u);
  found = select_vertical_slash(equal, equal, {1.0, 1.0, 0, 0});
  EXPECT_EQ(found.verticals, Places{});
  EXPECT_EQ(found.slashes, Places{0});
  EXPECT_EQ(select_vertical_slash(equal, std::vector<double>{5.0}, {0.1, 0.9, 9, 9}).slashes, Places{0});
}

TEST(VerticalSlash, CapsFollowTheBudget) {
  SelectionConfig config;
  config.budget = 8192;
  config.vertical_cap = 100;
  config.slash_cap = 10;
  const struct {
    int64_t budget, verticals, slashes;
  } cases[] = {{8192, 100, 10}, {4096, 50, 5}, {16384, 200, 20}, {1, 0, 1}, {12288, 150, 15}, {4178, 51, 5}};
  for (const auto& [budget, verticals, slashes] : cases) {
    const VerticalSlashLimits limits = vertical_slash_limits(config, budget);
    EXPECT_EQ(limits.vertical_cap, verticals) << budget;
    EXPECT_EQ(limits.slash_cap, slashes) << budget;
    EXPECT_EQ(limits.vertical_coverage, config.vertical_coverage);
  }
}

TEST(SelectionConfig, SaysWhatIsWrongAndWhatWorks) {
  const struct {
    void (*change)(SelectionConfig&);
    const char* said;
  } cases[] = {
      {[](SelectionConfig& c) { c.block = 0; }, "attention.block: 0 tokens are not supported; use 64, 128 or 256"},
      {[](SelectionConfig& c) { c.query_block = 0; },
       "attention.query_block: 0 tokens; must be a power of two from 1 to 128"},
      {[](SelectionConfig& c) { c.score_tokens = 48; },
       "attention.score_tokens: 48 does not divide attention.block 128"},
      {[](SelectionConfig& c) { c.budget = -1; }, "attention.budget: -1 keys per query; must be at least 1"},
      {[](SelectionConfig& c) { c.step = 65; }, "attention.step: 65; must be 0 to 64 blocks per token"},
      {[](SelectionConfig& c) { c.coverage = NAN; }, "attention.coverage: nan; must be above 0 and at most 1"},
      {[](SelectionConfig& c) { c.vertical_coverage = -1; },
       "attention.vertical_coverage: -1; must be above 0 and at most 1"},
      {[](SelectionConfig& c) { c.slash_cap = -1; }, "attention.vertical_cap and slash_cap must not be negative"},
      {[](SelectionConfig& c) { c.pattern = Pattern::vertical_slash; },
       "set attention.selection: lookahead to confirm"},
  };
  for (const auto& [change, said] : cases) {
    SelectionConfig config;
    change(config);
    EXPECT_NE(message_of([&] { check_selection_config(config); }).find(said), std::string::npos) << said;
  }
  // Which patterns go piece by piece, and why the others do not.
  for (const auto& [pattern, order, reason] :
       {std::tuple{Pattern::topk, SelectionOrder::causal, ""},
        {Pattern::mass, SelectionOrder::lookahead, "attention.selection: lookahead lets later tokens decide"},
        {Pattern::window, SelectionOrder::lookahead, ""},
        {Pattern::dense, SelectionOrder::lookahead, ""},
        {Pattern::vertical_slash, SelectionOrder::lookahead,
         "attention.pattern: vertical_slash selects with the last"}}) {
    SelectionConfig config;
    config.pattern = pattern;
    config.order = order;
    EXPECT_EQ(selection_looks_ahead(config), *reason != '\0');
    EXPECT_EQ(why_not_in_pieces(config).substr(0, std::string(reason).size()), reason);
  }
}

TEST(Selector, WhatRunsDense) {
  SelectionConfig config;
  config.budget = 1000;
  config.dense_layers = {0, 7};
  const auto dense = [&](int layer, int64_t tokens, int64_t budget) {
    return runs_dense(config, layer, sequence_tiles(config, tokens, budget));
  };
  EXPECT_TRUE(dense(1, 1000, 640));  // up to the configured budget
  EXPECT_FALSE(dense(1, 1001, 640));
  EXPECT_TRUE(dense(1, 1001, 1001));  // its own budget holds it
  EXPECT_TRUE(dense(7, 5000, 640));
  config.dense_below = 0;
  EXPECT_FALSE(dense(1, 900, 640));
  EXPECT_TRUE(dense(0, 900, 640));
  config.pattern = Pattern::dense;
  EXPECT_TRUE(dense(1, 100000, 640));
}

}  // namespace
}  // namespace sb
