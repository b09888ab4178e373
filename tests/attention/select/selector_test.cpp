#include "attention/select/selector.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "attention/select/block_scores.h"
#include "attention/select/planes.h"
#include "core/errors.h"
#include "core/random.h"

namespace sb {
namespace {

struct Case {
  AttentionShape shape{4, 2, 16, 0.25f};
  int64_t tokens = 1500;
  std::vector<float> q, k;

  Case(int heads, int kv_heads, int64_t n, uint64_t seed) : shape{heads, kv_heads, 16, 0.25f}, tokens(n) {
    Random random(seed);
    q.resize(n * heads * 16);
    k.resize(n * kv_heads * 16);
    // Keys of a block share an offset, so that blocks differ and selections mean something.
    std::vector<float> offset(kv_heads * 16);
    for (int64_t t = 0; t < n; ++t) {
      if (t % 64 == 0) {
        for (float& x : offset) x = static_cast<float>(random.normal());
      }
      for (int c = 0; c < kv_heads * 16; ++c)
        k[t * kv_heads * 16 + c] = offset[c] + static_cast<float>(random.normal());
    }
    for (float& x : q) x = static_cast<float>(2.0 * random.normal());
  }

  SequenceTiles tiles(const SelectionConfig& config) const {
    return {tokens, config.block, config.query_block, config.sink_blocks, config.local_blocks, config.budget};
  }
};

BlockIndex run(Selector& selector, const Case& in, int threads, int layer = 0, const LayerPlanes* planes = nullptr) {
  ThreadPool pool(threads);
  Exec exec;
  exec.pool = &pool;
  const SelectionConfig& config = selector.config();
  const std::vector<int32_t> cu = {0, static_cast<int32_t>(in.tokens)};
  BlockIndex index;
  BlockIndexBuilder builder;
  builder.begin(index, {config.block, config.query_block, selector.list_heads(in.shape)}, cu, {}, threads);
  SelectionRequest request;
  request.layer = layer;
  request.shape = in.shape;
  request.tiles = in.tiles(config);
  request.q = in.q.data();
  request.k = in.k.data();
  request.place = index.sequences()[0];
  request.threshold = start_threshold(request.tiles);
  const BlockScoring scoring(config);
  std::vector<float> statistics(BlockStatistics::floats(scoring, in.shape, request.tiles.blocks()));
  BlockStatistics::fill(exec, in.shape, scoring, in.k.data(), in.tokens, statistics.data(), planes);
  request.statistics = statistics.data();
  request.planes = planes;
  selector.select(exec, request, builder);
  builder.finish(pool);
  return index;
}

SelectionConfig config_for(SelectionPattern pattern, SelectionOrder order, int query_block, int64_t budget) {
  SelectionConfig config;
  config.pattern = pattern;
  config.order = order;
  config.block = 64;
  config.query_block = query_block;
  config.budget = budget;
  return config;
}

// Estimated mass that the rows of one list head hold, forced and own blocks left out.
double held_mass(const BlockIndex& index, const Case& in, const SelectionConfig& config, int head) {
  ThreadPool pool(1);
  Exec exec;
  exec.pool = &pool;
  const SequenceTiles tiles = in.tiles(config);
  const BlockScoring scoring(config);
  std::vector<float> statistics(BlockStatistics::floats(scoring, in.shape, tiles.blocks()));
  BlockStatistics::fill(exec, in.shape, scoring, in.k.data(), in.tokens, statistics.data());
  BlockScorer scorer(in.shape, scoring, in.q.data(), statistics.data(), tiles.blocks());
  double held = 0;
  for (int64_t tile = 0; tile < tiles.tiles(); ++tile) {
    if (tiles.competing(tile) == 0) continue;
    const float* mass = scorer.tile_masses(head, tiles, tile, tile + 1, tiles.competing(tile));
    const BlockIndex::Row row = index.row(BlockIndex::row_id(index.sequences()[0], head, static_cast<int>(tile)));
    for (const uint16_t block : row.blocks) {
      if (block < tiles.competing(tile) && !tiles.forced(tile, block))
        held += std::exp(static_cast<double>(mass[block]));
    }
  }
  return held;
}

using Pattern = SelectionPattern;
using Order = SelectionOrder;

TEST(Selector, EveryPatternKeepsForcedBlocksAndQuotas) {
  for (const Pattern pattern : {Pattern::topk, Pattern::topp, Pattern::mass, Pattern::window}) {
    for (const Order order : {Order::causal, Order::lookahead}) {
      for (const int query_block : {1, 16, 128}) {
        const Case in(4, 2, 1500, 5);
        const SelectionConfig config = config_for(pattern, order, query_block, 64 * 9);
        Selector selector(config);
        const BlockIndex index = run(selector, in, 1);
        const SequenceTiles tiles = in.tiles(config);
        for (int head = 0; head < 2; ++head) {
          for (int64_t tile = 0; tile < tiles.tiles(); ++tile) {
            const BlockIndex::Row row =
                index.row(BlockIndex::row_id(index.sequences()[0], head, static_cast<int>(tile)));
            for (int64_t j = 0; j < tiles.visible(tile); ++j) {
              if (!tiles.forced(tile, j)) continue;
              const auto at = std::find(row.blocks.begin(), row.blocks.end(), static_cast<uint16_t>(j));
              ASSERT_NE(at, row.blocks.end());
              EXPECT_EQ(row.first[at - row.blocks.begin()], 0);
            }
            const int64_t size = static_cast<int64_t>(row.blocks.size());
            const bool short_tail = tiles.rows(tile) < query_block && order == Order::causal;
            if ((pattern == Pattern::topk && !short_tail) || pattern == Pattern::window) {
              EXPECT_EQ(size, std::min(tiles.visible(tile), tiles.quota(tile)))
                  << "pattern " << static_cast<int>(pattern) << " tile " << tile;
            } else if (pattern == Pattern::topk) {
              EXPECT_LE(size, tiles.quota(tile));
            } else if (pattern == Pattern::topp) {
              EXPECT_LE(size, tiles.quota(tile));
            }
          }
        }
      }
    }
  }
}

TEST(Selector, SameRowsForAnyNumberOfThreads) {
  for (const Pattern pattern :
       {Pattern::topk, Pattern::topp, Pattern::mass, Pattern::window, Pattern::vertical_slash}) {
    const Case in(6, 2, 2000, 17);
    for (const int score_tokens : {0, 8, 1}) {
      SelectionConfig config = config_for(pattern, Order::lookahead, 16, 64 * 8);
      config.score_tokens = score_tokens;
      Selector one(config), two(config);
      EXPECT_TRUE(run(one, in, 1) == run(two, in, 2));
      if (pattern == Pattern::vertical_slash) continue;
      config.order = Order::causal;
      Selector three(config), four(config);
      EXPECT_TRUE(run(three, in, 1) == run(four, in, 3));
    }
  }
}

// A part as long as the block is the block: the same selections.
TEST(Selector, PartsAsLongAsTheBlockChangeNothing) {
  for (const Order order : {Order::causal, Order::lookahead}) {
    const Case in(4, 2, 1500, 31);
    SelectionConfig config = config_for(Pattern::topk, order, 16, 64 * 8);
    Selector whole(config);
    config.score_tokens = 64;
    Selector parts(config);
    config.score_tokens = 8;
    Selector finer(config);
    const BlockIndex index = run(whole, in, 2);
    EXPECT_TRUE(index == run(parts, in, 2));
    EXPECT_FALSE(index == run(finer, in, 2)) << "finer parts make no difference: the test is blind";
  }
}

// One key a query looks for, in a block whose other keys point the other way: the block's mean hides it, parts show it.
TEST(Selector, SmallPartsFindASingleKey) {
  Case in(2, 1, 4096, 41);
  constexpr int64_t kNeedle = 64 * 20 + 37, kAsking = 4090;
  for (int64_t t = 64 * 20; t < 64 * 21; ++t) {
    for (int c = 0; c < 16; ++c) in.k[t * 16 + c] = -0.5f * in.q[kAsking * 32 + c];
  }
  for (int c = 0; c < 16; ++c) in.k[kNeedle * 16 + c] = 4.0f * in.q[kAsking * 32 + c];
  const auto found = [&](int score_tokens) {
    SelectionConfig config = config_for(Pattern::topk, Order::causal, 16, 64 * 8);
    config.score_tokens = score_tokens;
    Selector selector(config);
    const BlockIndex index = run(selector, in, 1);
    const BlockIndex::Row row = index.row(BlockIndex::row_id(index.sequences()[0], 0, kAsking / 16));
    const auto at = std::find(row.blocks.begin(), row.blocks.end(), uint16_t{20});
    return at != row.blocks.end() && row.first[at - row.blocks.begin()] <= kAsking % 16;
  };
  EXPECT_TRUE(found(1));
  EXPECT_TRUE(found(4));
  EXPECT_FALSE(found(0)) << "the whole block shows the key too: the test is blind";
}

LayerPlanes planes_of(const Case& in, int channels) {
  ThreadPool pool(1);
  Exec exec;
  exec.pool = &pool;
  return select_planes(in.shape, measure_planes(exec, in.shape, in.q.data(), in.k.data(), in.tokens), channels);
}

// All channels and one query head a kv head: the block of the largest exact product, staircase and all. Numbers that
// bf16 holds, so that ties are ties.
TEST(Selector, PlanesOfAllChannelsSelectByTheLargestKey) {
  Case in(2, 2, 1500, 31);
  for (auto* values : {&in.q, &in.k})
    for (float& x : *values) x = std::round(4.0f * std::clamp(x, -15.0f, 15.0f)) / 4.0f;
  const LayerPlanes planes = planes_of(in, 16);
  for (const int query_block : {1, 16, 64}) {
    SelectionConfig config = config_for(Pattern::topk, Order::causal, query_block, 64 * 8);
    config.score = BlockScore::planes;
    config.score_channels = 16;
    Selector selector(config);
    const BlockIndex index = run(selector, in, 2, 0, &planes);
    const SequenceTiles tiles = in.tiles(config);
    for (int head = 0; head < 2; ++head)
      for (int64_t tile = 0; tile < tiles.tiles(); ++tile) {
        const int64_t competing = tiles.competing(tile);
        std::vector<float> largest(tiles.rows(tile) * competing, -INFINITY);
        for (int64_t r = 0; r < tiles.rows(tile); ++r)
          for (int64_t m = 0; m < competing * 64; ++m) {
            double product = 0;
            for (int c = 0; c < 16; ++c)
              product += in.q[((tiles.begin(tile) + r) * 2 + head) * 16 + c] * in.k[(m * 2 + head) * 16 + c];
            float& top = largest[r * competing + m / 64];
            top = std::max(top, static_cast<float>(product));
          }
        std::vector<IndexEntry> expected;
        Staircase().select(tiles, tile, {largest.data(), competing, tiles.rows(tile), competing},
                           staircase_rule(StaircaseRule::Kind::topk, tiles.free_quota(tile), config.step, query_block),
                           expected);
        const BlockIndex::Row row = index.row(BlockIndex::row_id(index.sequences()[0], head, static_cast<int>(tile)));
        ASSERT_EQ(row.blocks.size(), expected.size());
        for (size_t i = 0; i < expected.size(); ++i) {
          EXPECT_EQ(row.blocks[i], expected[i].block) << "head " << head << " tile " << tile;
          EXPECT_EQ(row.first[i], expected[i].first) << "head " << head << " tile " << tile;
        }
      }
  }
}

TEST(Selector, PlanesGiveTheSameRowsForAnyNumberOfThreads) {
  for (const Pattern pattern : {Pattern::topk, Pattern::topp, Pattern::mass})
    for (const Order order : {Order::causal, Order::lookahead})
      for (const int block : {64, 128, 256}) {
        const Case in(6, 2, 2000, 17);
        SelectionConfig config = config_for(pattern, order, 16, 512);
        config.block = block;
        config.score = BlockScore::planes;
        config.score_channels = 8;
        config.local_blocks = 0;
        const LayerPlanes planes = planes_of(in, 8);
        Selector one(config), three(config);
        const BlockIndex index = run(one, in, 1, 0, &planes);
        EXPECT_TRUE(index == run(three, in, 3, 0, &planes));
        config.score = BlockScore::moments;
        Selector moments(config);
        EXPECT_FALSE(index == run(moments, in, 1)) << "planes select as moments do: the test is blind";
      }
}

TEST(Selector, PlanesFindASingleKey) {
  Case in(4, 1, 4096, 41);
  constexpr int64_t kNeedle = 64 * 20 + 37, kAsking = 4080;  // the first of its query block
  // All heads ask for it, in the four planes that carry the most.
  for (size_t i = 0; i < in.q.size(); ++i) in.q[i] *= i % 8 < 4 ? 2.0f : 0.25f;
  for (int h = 1; h < 4; ++h) std::copy_n(&in.q[kAsking * 64], 16, &in.q[kAsking * 64 + h * 16]);
  for (int64_t t = 64 * 20; t < 64 * 21; ++t)
    for (int c = 0; c < 16; ++c) in.k[t * 16 + c] = (t == kNeedle ? 4.0f : -0.5f) * in.q[kAsking * 64 + c];
  SelectionConfig config = config_for(Pattern::topk, Order::causal, 16, 64 * 8);
  config.score = BlockScore::planes;
  config.score_channels = 8;
  const LayerPlanes planes = planes_of(in, 8);
  EXPECT_EQ(planes.channel, (std::vector<int32_t>{0, 1, 2, 3, 8, 9, 10, 11}));
  Selector selector(config);
  const BlockIndex index = run(selector, in, 1, 0, &planes);
  const BlockIndex::Row row = index.row(BlockIndex::row_id(index.sequences()[0], 0, kAsking / 16));
  const auto at = std::find(row.blocks.begin(), row.blocks.end(), uint16_t{20});
  ASSERT_NE(at, row.blocks.end());
  EXPECT_EQ(row.first[at - row.blocks.begin()], 0);
}

TEST(Selector, MostMassIsNeverBelowTopk) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    for (const int query_block : {16, 64}) {
      const Case in(4, 2, 700 + static_cast<int64_t>(seed) * 61, seed);
      SelectionConfig topk = config_for(Pattern::topk, Order::lookahead, query_block, 64 * 6);
      SelectionConfig mass = config_for(Pattern::mass, Order::lookahead, query_block, 64 * 6);
      topk.score_tokens = mass.score_tokens = seed % 2 == 0 ? 0 : 16;
      Selector by_topk(topk), by_mass(mass);
      const BlockIndex a = run(by_topk, in, 1), b = run(by_mass, in, 1);
      EXPECT_EQ(a.entries(), b.entries());
      for (int head = 0; head < 2; ++head) {
        EXPECT_GE(held_mass(b, in, mass, head), held_mass(a, in, topk, head) * (1 - 1e-6)) << "seed " << seed;
      }
    }
  }
}

TEST(Selector, VerticalSlashFindsPlantedColumnsAndDiagonals) {
  // Queries at position t look for the key at t - 320 and for key 100: both carry what the query asks for.
  Case in(2, 1, 2048, 1);
  in.shape = {2, 1, 16, 0.25f};
  std::fill(in.k.begin(), in.k.end(), 0.0f);
  std::fill(in.q.begin(), in.q.end(), 0.0f);
  // A rotating code over positions makes the distance 320 = 5 blocks stand out.
  const double pi = 3.14159265358979;
  for (int64_t t = 0; t < 2048; ++t) {
    for (int c = 0; c < 4; ++c) {
      const double rate = pi / (100.0 * std::pow(3.0, c));
      for (int h = 0; h < 2; ++h) {
        in.q[(t * 2 + h) * 16 + 2 * c] = static_cast<float>(6 * std::cos(rate * static_cast<double>(t - 320)));
        in.q[(t * 2 + h) * 16 + 2 * c + 1] = static_cast<float>(6 * std::sin(rate * static_cast<double>(t - 320)));
      }
      in.k[t * 16 + 2 * c] = static_cast<float>(2 * std::cos(rate * static_cast<double>(t)));
      in.k[t * 16 + 2 * c + 1] = static_cast<float>(2 * std::sin(rate * static_cast<double>(t)));
    }
    for (int h = 0; h < 2; ++h) in.q[(t * 2 + h) * 16 + 15] = 6.0f;
  }
  in.k[100 * 16 + 15] = 8.5f;
  SelectionConfig config = config_for(Pattern::vertical_slash, Order::lookahead, 64, 64 * 8);
  config.sink_blocks = 0;
  config.local_blocks = 0;
  config.vertical_coverage = 0.3;
  config.slash_coverage = 0.7;
  Selector selector(config);
  const BlockIndex index = run(selector, in, 1);
  const BlockIndex::Row row = index.row(BlockIndex::row_id(index.sequences()[0], 1, 31));
  EXPECT_TRUE(std::find(row.blocks.begin(), row.blocks.end(), 31) != row.blocks.end());
  EXPECT_TRUE(std::find(row.blocks.begin(), row.blocks.end(), 26) != row.blocks.end());
  // The same diagonals everywhere: block 20 looks at block 15.
  const BlockIndex::Row earlier = index.row(BlockIndex::row_id(index.sequences()[0], 0, 20));
  EXPECT_TRUE(std::find(earlier.blocks.begin(), earlier.blocks.end(), 15) != earlier.blocks.end());
  // There column 100 lies on no selected diagonal, so it is gathered.
  EXPECT_TRUE(std::find(earlier.columns.begin(), earlier.columns.end(), 100) != earlier.columns.end());
}

TEST(Selector, VerticalSlashOfEverythingIsDense) {
  const Case in(4, 2, 777, 3);
  SelectionConfig config = config_for(Pattern::vertical_slash, Order::lookahead, 16, 64);
  config.vertical_coverage = config.slash_coverage = 1.0;
  config.slash_cap = config.vertical_cap = 1 << 20;
  Selector selector(config);
  const BlockIndex index = run(selector, in, 2);
  EXPECT_EQ(index.token_pairs(), index.causal_token_pairs());
  EXPECT_FALSE(index.has_gathered_columns());
}

TEST(SelectionConfig, RefusesWhatDoesNotWork) {
  const auto refused = [](auto change) {
    SelectionConfig config;
    change(config);
    EXPECT_THROW(Selector{config}, UserError);
  };
  refused([](SelectionConfig& c) { c.block = 100; });
  refused([](SelectionConfig& c) { c.query_block = 24; });
  refused([](SelectionConfig& c) { c.query_block = 256; });
  refused([](SelectionConfig& c) { c.score_tokens = -1; });
  refused([](SelectionConfig& c) { c.score_tokens = 3; });
  refused([](SelectionConfig& c) { c.score_tokens = 256; });
  refused([](SelectionConfig& c) { c.budget = 0; });
  refused([](SelectionConfig& c) { c.sink_blocks = -1; });
  refused([](SelectionConfig& c) { c.local_blocks = -1; });
  refused([](SelectionConfig& c) { c.step = -1; });
  refused([](SelectionConfig& c) { c.coverage = 0; });
  refused([](SelectionConfig& c) { c.slash_coverage = 1.5; });
  refused([](SelectionConfig& c) { c.pattern = SelectionPattern::vertical_slash; });
  EXPECT_THROW(parse_selection_pattern("topq"), UserError);
  EXPECT_THROW(parse_selection_order("random"), UserError);
  EXPECT_THROW(parse_block_score("max"), UserError);
  EXPECT_EQ(parse_block_score("planes"), BlockScore::planes);
  EXPECT_EQ(parse_selection_pattern("vertical_slash"), SelectionPattern::vertical_slash);
}

TEST(SelectionConfig, RefusesChannelsThatMakeNoPlanes) {
  const auto message = [](int channels, int score_tokens, int head_dim) -> std::string {
    SelectionConfig config;
    config.score = BlockScore::planes;
    config.score_channels = channels;
    config.score_tokens = score_tokens;
    try {
      check_selection_config(config);
      check_score_channels(config, head_dim);
    } catch (const UserError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(message(32, 0, 64), "");
  EXPECT_EQ(message(64, 0, 64), "");
  for (const int channels : {-2, 0, 1, 31})
    EXPECT_NE(message(channels, 0, 64).find("attention.score_channels"), std::string::npos) << channels;
  EXPECT_NE(message(66, 0, 64).find("attention.score_channels: 66, but the model's heads have 64"), std::string::npos);
  EXPECT_NE(message(8, 0, 7).find("attention.score_channels"), std::string::npos);
  EXPECT_NE(message(32, 1, 64).find("attention.score_tokens"), std::string::npos);
}

TEST(Selector, MostMassSelectsNotANumberLast) {
  SelectionConfig config;
  config.block = 64;
  config.query_block = 64;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const SequenceTiles tiles = sequence_tiles(config, 64 * 40, 64 * 8);
    Random random(seed);
    std::vector<std::vector<float>> masses(tiles.tiles());
    int64_t numbers = 0;
    for (int64_t tile = 0; tile < tiles.tiles(); ++tile)
      for (int64_t j = 0; j < tiles.competing(tile); ++j) {
        masses[tile].push_back(random.below(3) == 0 ? NAN : static_cast<float>(random.normal()));
        if (!tiles.forced(tile, j) && !std::isnan(masses[tile].back())) ++numbers;
      }
    const auto rows = most_mass_rows(tiles, masses, numbers / 2);
    float least = INFINITY, most_left = -INFINITY;
    int64_t selected = 0;
    for (int64_t tile = 0; tile < tiles.tiles(); ++tile)
      for (int64_t j = 0; j < tiles.competing(tile); ++j) {
        if (tiles.forced(tile, j)) continue;
        const bool taken =
            std::any_of(rows[tile].begin(), rows[tile].end(), [&](const IndexEntry& e) { return e.block == j; });
        if (taken) {
          ASSERT_FALSE(std::isnan(masses[tile][j])) << "seed " << seed;
          least = std::min(least, masses[tile][j]);
          ++selected;
        } else if (!std::isnan(masses[tile][j])) {
          most_left = std::max(most_left, masses[tile][j]);
        }
      }
    EXPECT_EQ(selected, numbers / 2);
    EXPECT_GE(least, most_left) << seed;
  }
}

}  // namespace
}  // namespace sb
