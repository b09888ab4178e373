#include "attention/select/learned_selection.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "attention/select/selector.h"
#include "core/random.h"

namespace sb {
namespace {

SequenceTiles tiles_of(int64_t tokens, int64_t budget) {
  return {.tokens = tokens, .block = 64, .query_block = 16, .sink_blocks = 1, .local_blocks = 1, .budget = budget};
}

TEST(LearnedSelection, ClassesAreOfLengthAndShare) {
  EXPECT_EQ(mass_key(2, tiles_of(4096, 1024)), (MassKey{2, 12, 4}));
  EXPECT_EQ(mass_key(2, tiles_of(8192, 2048)), (MassKey{2, 13, 4}));
  EXPECT_EQ(mass_key(0, tiles_of(4100, 1020)), (MassKey{0, 12, 4}));
  EXPECT_EQ(mass_key(0, tiles_of(4096, 4096 / 6)), (MassKey{0, 12, 5}));
}

TEST(LearnedSelection, CountsOfASequence) {
  const SequenceTiles tiles = tiles_of(700, 320);
  int64_t given = 0, wanted = 0;
  for (int64_t tile = 0; tile < tiles.tiles(); ++tile) {
    int64_t forced = 0;
    for (int64_t j = 0; j < tiles.visible(tile); ++j) forced += j >= tiles.competing(tile) || tiles.forced(tile, j);
    given += forced;
    wanted += std::min(std::max<int64_t>(tiles.quota(tile) - forced, 0), tiles.visible(tile) - forced);
  }
  EXPECT_EQ(given_blocks(tiles), given);
  EXPECT_EQ(wanted_blocks(tiles), wanted);
  EXPECT_GT(wanted, 0);
}

TEST(LearnedSelection, WhatWasNotSeenTakesTheNearest) {
  const SequenceTiles tiles = tiles_of(4096, 1024);
  LearnedSelection learned;
  EXPECT_EQ(mass_threshold(learned, 0, tiles), start_threshold(tiles));
  learned.thresholds = {{{0, 11, 4}, {0.5f}}, {{0, 13, 2}, {1.0f}}, {{0, 14, 4}, {9.0f}}, {{1, 12, 4}, {7.0f}}};
  EXPECT_EQ(mass_threshold(learned, 0, tiles), start_threshold(tiles) + 0.5f);  // the shorter one of two as near
  learned.thresholds[{0, 12, 2}] = {2.0f};
  EXPECT_EQ(mass_threshold(learned, 0, tiles), start_threshold(tiles) + 2.0f);
  learned.thresholds[{0, 12, 6}] = {3.0f};
  EXPECT_FLOAT_EQ(mass_threshold(learned, 0, tiles), start_threshold(tiles) + 2.5f);  // between two
  EXPECT_EQ(mass_threshold(learned, 2, tiles), start_threshold(tiles));
}

// Masses as unlike as those of a trained model, and so alike that a hair of threshold moves half of the blocks; with
// noise from step to step. `slope`: the logarithm of the count over the threshold.
TEST(LearnedSelection, CountsSettleAtWhatIsWanted) {
  for (const double slope : {0.3, 1.0, 3.0, 20.0})
    for (const double noise : {0.0, 0.1}) {
      Random random(7);
      const SequenceTiles tiles = tiles_of(4096, 1024);
      const MassKey key = mass_key(0, tiles);
      LearnedSelection learned;
      const double right = start_threshold(tiles) + 1.5;
      double sum = 0, worst = 0;
      for (int step = 0; step < 120; ++step) {
        const double count = 1e5 * std::exp(slope * (right - mass_threshold(learned, 0, tiles)) +
                                            noise * static_cast<double>(random.normal()));
        const auto selected = static_cast<int64_t>(std::clamp(count, 0.25e5, 2e5));  // floor and cap of the lists
        learned = learn(learned, {{}, {{key, {selected, 100000}}}});
        if (step < 60) continue;
        sum += static_cast<double>(selected);
        worst = std::max(worst, std::abs(static_cast<double>(selected) / 1e5 - 1));
      }
      SCOPED_TRACE(testing::Message() << "slope " << slope << " noise " << noise);
      EXPECT_NEAR(sum / 60 / 1e5, 1.0, 0.03);
      EXPECT_LT(worst, noise == 0 ? 0.05 : 1.0);
    }
}

TEST(LearnedSelection, PlanesFadeAndSumsThatAreNotFiniteTeachNothing) {
  const PlaneSums first{10, {1, 2}, {3, 4}, {5, 6}}, second{5, {2, 2}, {2, 2}, {2, 2}};
  LearnedSelection learned = learn({}, {{{}, first}, {}});
  ASSERT_EQ(learned.planes.size(), 2u);
  EXPECT_EQ(learned.planes[0].tokens, 0);
  EXPECT_EQ(learned.planes[1], first);
  learned = learn(learned, {{{}, second}, {}});
  EXPECT_FLOAT_EQ(static_cast<float>(learned.planes[1].tokens), 10 * 0.95f + 5);
  EXPECT_FLOAT_EQ(static_cast<float>(learned.planes[1].query_squares[1]), 2 * 0.95f + 2);
  for (const double value : learned.planes[1].key_squares) EXPECT_EQ(value, static_cast<float>(value));
  const LearnedSelection before = learned;
  PlaneSums bad = second;
  bad.key_sums[0] = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(learn(learned, {{{}, bad}, {}}), before);
  EXPECT_EQ(learn(learned, {{}, {}}), before);  // a step that saw nothing
}

TEST(LearnedSelection, TheOrderOfObservationsDoesNotMatter) {
  const MassKey a = mass_key(0, tiles_of(2048, 512)), b = mass_key(1, tiles_of(1024, 512));
  const SelectionObservations one{{}, {{a, {10, 20}}}}, two{{}, {{a, {7, 3}}, {b, {1, 2}}}};
  SelectionObservations forth = one, back = two;
  forth += two;
  back += one;
  EXPECT_EQ(forth, back);
  EXPECT_EQ(learn({}, forth), learn({}, back));
}

// Sequences whose blocks differ, in the second layer more than in the first, of mixed lengths and budgets as a planner
// gives them. What one step counts.
SelectionObservations mixed_step(const SelectionConfig& config, const LearnedSelection& learned, Random& random) {
  ThreadPool pool(2);
  Exec exec;
  exec.pool = &pool;
  const AttentionShape shape{1, 1, 16, 0.25f};
  const Selector selector(config);
  SelectionObservations seen;
  for (int sequence = 0; sequence < 8; ++sequence) {
    const auto tokens = static_cast<int64_t>(1024 * std::exp2(2 * random.uniform()));
    const auto budget = static_cast<int64_t>(static_cast<double>(tokens) * (0.15 + 0.3 * random.uniform()));
    const SequenceTiles tiles = sequence_tiles(config, tokens, budget);
    for (int layer = 0; layer < 2; ++layer) {
      std::vector<float> q(tokens * 16), k(tokens * 16), offset(16);
      for (int64_t t = 0; t < tokens; ++t) {
        for (float& x : offset)
          if (t % 64 == 0) x = (layer == 0 ? 1.0f : 2.5f) * static_cast<float>(random.normal());
        for (int c = 0; c < 16; ++c) k[t * 16 + c] = offset[c] + static_cast<float>(random.normal());
      }
      for (float& x : q) x = static_cast<float>(random.normal());
      const std::vector<int32_t> cu = {0, static_cast<int32_t>(tokens)};
      BlockIndex index;
      BlockIndexBuilder builder;
      builder.begin(index, {config.block, config.query_block, 1}, cu, {}, 2);
      std::vector<float> statistics(BlockStatistics::floats(BlockScoring(config), shape, tiles.blocks()));
      BlockStatistics::fill(exec, shape, BlockScoring(config), k.data(), tokens, statistics.data());
      SelectionRequest request;
      request.shape = shape;
      request.tiles = tiles;
      request.q = q.data();
      request.k = k.data();
      request.statistics = statistics.data();
      request.place = index.sequences()[0];
      request.threshold = mass_threshold(learned, layer, tiles);
      seen.masses[mass_key(layer, tiles)] += selector.select(exec, request, builder);
    }
  }
  return seen;
}

TEST(LearnedSelection, PairsMeetMixedBudgets) {
  SelectionConfig config;
  config.pattern = SelectionPattern::mass;
  config.score = BlockScore::moments;
  config.block = 64;
  config.local_blocks = 1;
  Random random(3);
  LearnedSelection learned;
  std::map<int, MassCounts> layers, first;
  std::map<MassKey, MassCounts> classes;
  for (int i = 0; i < 60; ++i) {
    const SelectionObservations seen = mixed_step(config, learned, random);
    learned = learn(learned, seen);
    for (const auto& [key, counts] : seen.masses) {
      if (i == 5) first[key.layer] += counts;
      if (i < 20) continue;
      layers[key.layer] += counts;
      classes[key] += counts;
    }
  }
  const auto ratio = [](const MassCounts& counts) {
    return static_cast<double>(counts.selected) / static_cast<double>(counts.wanted);
  };
  for (const auto& [layer, counts] : first) EXPECT_NEAR(ratio(counts), 1.0, 0.25) << "layer " << layer << ", step 6";
  for (const auto& [layer, counts] : layers) EXPECT_NEAR(ratio(counts), 1.0, 0.03) << "layer " << layer;
  // Of classes that most steps have seen.
  int settled = 0;
  for (const auto& [key, counts] : classes) {
    if (counts.wanted < 10000) continue;
    ++settled;
    EXPECT_NEAR(ratio(counts), 1.0, 0.06) << key.layer << ", " << key.length_class << ", " << key.budget_class;
  }
  EXPECT_GE(settled, 12);
}

}  // namespace
}  // namespace sb
