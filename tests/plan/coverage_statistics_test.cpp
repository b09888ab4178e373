#include "plan/coverage/coverage_statistics.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "core/errors.h"
#include "core/random.h"

namespace sb {
namespace {

void show(CoverageStatistics& statistics, int layer, int64_t tokens, double gamma) {
  std::vector<int64_t> budgets, ppm;
  for (int64_t budget = 512; budget < tokens; budget += budget / 2) budgets.push_back(budget);
  budgets.push_back((tokens + 127) / 128 * 128);
  for (const int64_t budget : budgets)
    ppm.push_back(
        std::llround(1e6 * std::pow(std::min(1.0, static_cast<double>(budget) / static_cast<double>(tokens)), gamma)));
  statistics.observe(layer, tokens, budgets, ppm);
}

// Layer 0 at one length, layer 1 at two.
CoverageStatistics three_curves() {
  CoverageStatistics statistics;
  for (int i = 0; i < 10; ++i) {
    show(statistics, 0, 30000, 0.1);
    show(statistics, 1, 30000, 0.6);
    show(statistics, 1, 4000, 0.3);
  }
  return statistics;
}

TEST(CoverageStatistics, ColdStartIsThePowerFamily) {
  const CoverageStatistics statistics;
  EXPECT_TRUE(statistics.uniform_layers());
  for (const int64_t k : {128, 1000, 5000, 19999})
    EXPECT_NEAR(statistics.at({0, 20000}, 3, k), std::pow(static_cast<double>(k) / 20000, 0.22), 1e-9);
  EXPECT_EQ(statistics.at({0, 20000}, 3, 20000), 1.0);
  EXPECT_EQ(statistics.at({0, 10}, 3, 20000), 1.0);
}

TEST(CoverageStatistics, LearnsCurvesOfLayersAndLengths) {
  const CoverageStatistics statistics = three_curves();
  EXPECT_FALSE(statistics.uniform_layers());
  for (const double share : {0.9, 0.5, 0.25, 0.1, 0.03}) {
    const auto k = static_cast<int64_t>(share * 30000);
    EXPECT_NEAR(statistics.at({0, 30000}, 0, k), std::pow(share, 0.1), 0.01) << share;
    EXPECT_NEAR(statistics.at({0, 30000}, 1, k), std::pow(share, 0.6), 0.02) << share;
  }
  EXPECT_NEAR(statistics.at({0, 4000}, 1, 1000), std::pow(0.25, 0.3), 0.01);
  // The nearest class that was seen.
  EXPECT_EQ(statistics.at({0, 64000}, 1, 16000), statistics.at({0, 32000}, 1, 8000));
  EXPECT_NEAR(statistics.at({0, 1000}, 1, 250), std::pow(0.25, 0.3), 0.01);
  // Rising everywhere, also below the smallest share kept.
  double before = 0;
  for (int64_t k = 16; k <= 30000; k += 16) {
    const double now = statistics.at({0, 30000}, 1, k);
    EXPECT_GE(now, before) << k;
    before = now;
  }
  EXPECT_EQ(before, 1.0);
}

// All layers at once, and every layer at its own budget, give what one question at a time gives.
TEST(CoverageStatistics, ManyQuestionsAtOnce) {
  CoverageStatistics statistics;
  Random random(5);
  constexpr int kSevenLayers = 7;
  for (int i = 0; i < 60; ++i) {
    const int layer = static_cast<int>(random.below(kSevenLayers - 1));  // the last is never seen
    const auto tokens = static_cast<int64_t>(std::exp(6.5 + 6 * random.uniform()));
    std::vector<int64_t> budgets{256, 1024, 4096, std::max<int64_t>(tokens, 4097)}, ppm;
    const double gamma = 0.05 + random.uniform();
    for (const int64_t budget : budgets)
      ppm.push_back(std::llround(
          1e6 * std::pow(std::min(1.0, static_cast<double>(budget) / static_cast<double>(budgets.back())), gamma)));
    statistics.observe(layer, tokens, budgets, ppm, i % 3 == 0 ? 0 : 512,
                       1 + static_cast<int64_t>(random.below(900'000)));
  }
  const std::vector<int32_t> budgets{1, 16, 64, 100, 512, 513, 4096, 30000, 100000, 2000000};
  std::vector<double> logs;
  for (const int32_t budget : budgets) logs.push_back(std::log(budget));
  for (const int64_t tokens : {1, 17, 512, 513, 5000, 50000, 800000}) {
    const Sequence sequence{3, tokens};
    std::vector<double> all(kSevenLayers * budgets.size());
    statistics.evaluate_layers(sequence, kSevenLayers, budgets, logs, all);
    for (int l = 0; l < kSevenLayers; ++l)
      for (size_t i = 0; i < budgets.size(); ++i)
        EXPECT_NEAR(all[static_cast<size_t>(l) * budgets.size() + i], statistics.at(sequence, l, budgets[i]), 1e-12)
            << tokens << " " << l << " " << budgets[i];
    std::vector<int32_t> own;
    std::vector<double> own_logs, each(kSevenLayers);
    for (int l = 0; l < kSevenLayers; ++l) {
      own.push_back(budgets[random.below(budgets.size())]);
      own_logs.push_back(std::log(own.back()));
    }
    statistics.evaluate_each(sequence, own, own_logs, each);
    for (int l = 0; l < kSevenLayers; ++l) {
      const auto at = static_cast<size_t>(l);
      EXPECT_NEAR(each[at], statistics.at(sequence, l, own[at]), 1e-12) << tokens << " " << l;
    }
  }
}

// The nearest length class that was seen, the longer one of two; whatever the order in which they were seen.
TEST(CoverageStatistics, TheNearestClassCounts) {
  const std::vector<std::pair<int64_t, double>> seen{{1024, 0.1}, {4096, 0.4}, {65536, 0.8}};  // classes 20, 24, 32
  std::vector<std::pair<int64_t, double>> asked{{1, 0.1},     {1024, 0.1},  {1500, 0.1},  {2048, 0.4},   {4096, 0.4},
                                                {11000, 0.4}, {16384, 0.8}, {65536, 0.8}, {1 << 20, 0.8}};
  std::vector<size_t> order{0, 1, 2};
  do {
    CoverageStatistics statistics;
    for (const size_t i : order)
      for (int k = 0; k < 3; ++k) show(statistics, 0, seen[i].first, seen[i].second);
    for (const auto& [tokens, gamma] : asked) {
      if (tokens < 4) continue;
      EXPECT_NEAR(statistics.at({0, tokens}, 0, tokens / 2), std::pow(0.5, gamma), 0.01) << tokens;
    }
    CoverageStatistics again;
    again.set_curves(statistics.curves(), "test");
    for (const auto& [tokens, gamma] : asked)
      EXPECT_EQ(again.at({0, tokens}, 0, 1 + tokens / 3), statistics.at({0, tokens}, 0, 1 + tokens / 3)) << tokens;
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(CoverageStatistics, ForgetsSlowly) {
  CoverageStatistics statistics;
  for (int i = 0; i < 100; ++i) show(statistics, 0, 8192, 0.5);
  const double settled = statistics.at({0, 8192}, 0, 1024);
  show(statistics, 0, 8192, 0.1);
  const double after_one = statistics.at({0, 8192}, 0, 1024);
  EXPECT_GT(after_one, settled);
  EXPECT_LT(after_one - settled, 0.1 * (std::pow(0.125, 0.1) - settled));
  for (int i = 0; i < 200; ++i) show(statistics, 0, 8192, 0.1);
  EXPECT_NEAR(statistics.at({0, 8192}, 0, 1024), std::pow(0.125, 0.1), 0.01);
}

TEST(CoverageStatistics, WhatTheListsHeldCorrectsTheCurve) {
  CoverageStatistics statistics;
  // Coverage (k/n)^0.3 at each token's best; lists hold what the best blocks of 0.4 of their budget would.
  const std::vector<int64_t> budgets = {256, 512, 1024, 2048, 4096, 8192};
  std::vector<int64_t> ppm;
  for (const int64_t budget : budgets)
    ppm.push_back(std::llround(1e6 * std::pow(static_cast<double>(budget) / 8192, 0.3)));
  for (int i = 0; i < 5; ++i)
    statistics.observe(0, 8192, budgets, ppm, 2048, std::llround(1e6 * std::pow(0.4 * 0.25, 0.3)));
  for (const double share : {0.125, 0.25, 0.5})
    EXPECT_NEAR(statistics.at({0, 8192}, 0, static_cast<int64_t>(share * 8192)), std::pow(0.4 * share, 0.3), 0.01)
        << share;
  EXPECT_EQ(statistics.at({0, 8192}, 0, 8192), 1.0);
  const int64_t shift = statistics.curves().begin()->second.shift_ppm;
  EXPECT_NEAR(static_cast<double>(shift), -1e6 * std::log(0.4), 3e4);
  // Dense lists say nothing; nor does what is not known.
  statistics.observe(0, 8192, budgets, ppm, 8192, 1'000'000);
  statistics.observe(0, 8192, budgets, ppm, 2048, 0);
  EXPECT_EQ(statistics.curves().begin()->second.shift_ppm, shift);
  // Lists of tokens that help each other hold more than their own best blocks.
  CoverageStatistics better;
  better.observe(0, 8192, budgets, ppm, 2048, std::llround(1e6 * std::pow(1.5 * 0.25, 0.3)));
  EXPECT_LT(better.curves().begin()->second.shift_ppm, 0);
  EXPECT_LE(better.at({0, 8192}, 0, 8191), 1.0);
}

TEST(CoverageStatistics, WhatWasLearnedIsACoverageFile) {
  const CoverageStatistics statistics = three_curves();
  const CoverageTable table = parse_coverage(write_coverage(statistics.table(2)), "coverage.json");
  ASSERT_EQ(table.layers, 2);
  // Half octaves: 2^11.5 … 2^12 and 2^14.5 … 2^15.
  EXPECT_EQ(table.length_classes, (std::vector<int64_t>{4095, 32767}));
  const auto model = table_coverage(table, "file");
  for (const int64_t k : {1000, 2000, 8000, 30000}) {  // nothing was shown below 512 of 30000
    const double share = static_cast<double>(k) / 32767;
    EXPECT_NEAR(model->at({0, 32767}, 0, k), std::pow(share, 0.1), 0.02) << k;
    EXPECT_NEAR(model->at({0, 32767}, 1, k), std::pow(share, 0.6), 0.02) << k;
  }
  EXPECT_NEAR(model->at({0, 4095}, 1, 1024), std::pow(0.25, 0.3), 0.02);
  EXPECT_EQ(model->at({0, 4095}, 1, 4095), 1.0);
}

TEST(CoverageStatistics, LayersWithoutSamplesAreMarkedInTheFile) {
  CoverageStatistics statistics;
  show(statistics, 1, 30000, 0.6);
  show(statistics, 3, 4000, 0.3);
  const CoverageTable table = parse_coverage(write_coverage(statistics.table(6)), "coverage.json");
  EXPECT_EQ(table.assumed_layers, (std::vector<int>{0, 2, 4, 5}));
  const auto model = table_coverage(table, "file");
  const int64_t k = table.budgets[3];
  EXPECT_NEAR(model->at({0, 32767}, 4, k), std::pow(static_cast<double>(k) / 32767, 0.22), 1e-9);
  EXPECT_TRUE(parse_coverage(write_coverage(three_curves().table(2)), "coverage.json").assumed_layers.empty());
}

TEST(CoverageStatistics, CurvesGoIntoACheckpointAndBack) {
  CoverageStatistics statistics, other;
  show(statistics, 0, 8192, 0.5);
  show(statistics, 2, 700, 0.2);
  other.set_curves(statistics.curves(), "state");
  EXPECT_TRUE(statistics == other);
  CoverageStatistics::Curves curves = statistics.curves();
  curves.begin()->second.ppm[3] = 2'000'000;
  EXPECT_THROW(other.set_curves(curves, "state"), UserError);
  curves = statistics.curves();
  curves.begin()->second.ppm[5] = curves.begin()->second.ppm[4] + 1000;
  EXPECT_THROW(other.set_curves(curves, "state"), UserError);
}

// Averages of whole numbers may cross by one; what is asked of them must not.
TEST(CoverageStatistics, RisesWhereAveragesCross) {
  CoverageStatistics::Curve curve;
  curve.seen = 1;
  for (size_t i = 0; i < curve.ppm.size(); ++i) curve.ppm[i] = 900'000 + static_cast<int64_t>(i % 2);
  CoverageStatistics statistics;
  statistics.set_curves({{{0, 30}, curve}}, "a test");
  std::vector<int32_t> budgets;
  std::vector<double> logs;
  for (int32_t k = 512; k < 40000; k += 128) {
    budgets.push_back(k);
    logs.push_back(std::log(static_cast<double>(k)));
  }
  std::vector<double> values(budgets.size()), layers(budgets.size());
  statistics.evaluate({0, 40000}, 0, budgets, logs, values);
  statistics.evaluate_layers({0, 40000}, 1, budgets, logs, layers);
  EXPECT_TRUE(std::is_sorted(values.begin(), values.end()));
  EXPECT_TRUE(std::is_sorted(layers.begin(), layers.end()));
  EXPECT_EQ(statistics.curves().at({0, 30}), curve);  // what a checkpoint gets is as it was
}

TEST(CoverageStatistics, SequencesOfOneTokenAndOneBlock) {
  CoverageStatistics statistics;
  const int64_t budget = 128, all = 1'000'000;
  statistics.observe(0, 1, {&budget, 1}, {&all, 1});
  statistics.observe(0, 100, {&budget, 1}, {&all, 1});
  EXPECT_EQ(statistics.at({0, 1}, 0, 1), 1.0);
  EXPECT_TRUE(statistics.curves().empty());
}

}  // namespace
}  // namespace sb
