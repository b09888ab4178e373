#include "attention/gpu/plan/coverage_log.h"

#include <gtest/gtest.h>

#include <numeric>

#include "attention/gpu/attention_memory.h"
#include "attention/select/tiles.h"
#include "core/random.h"

namespace sb::gpu {
namespace {

// Host memory stands for the device's.
class Log {
 public:
  Log() : exec_{.device = DeviceKind::cpu, .pool = &pool_} {}

  // A forward over sequences of which so many tokens are measured, under two key/value heads; the number n of all
  // results so far is n.
  void add(int layer, const std::vector<int>& sampled, int points, bool goes_on = false) {
    CoveragePlan plan;
    for (const int tokens : sampled) {
      CoverageSequence one;
      one.whole_tokens = 1000;
      one.sampled = tokens;
      one.whole_sampled = goes_on || begun_ ? 2 * tokens : tokens;
      one.points = points;
      one.results = plan.results;
      one.goes_on = goes_on;
      plan.sequences.push_back(one);
      plan.results += int64_t{tokens} * kKvHeads * (1 + points);
    }
    begun_ = goes_on;
    std::vector<float> results(static_cast<size_t>(plan.results));
    std::iota(results.begin(), results.end(), static_cast<float>(number_));
    number_ += plan.results;
    log_.add(exec_, layer, plan, {1000, kHeads, kKvHeads, 64, 1.0f}, results.data());
    std::fill(results.begin(), results.end(), -1.0f);  // its memory serves others from here on
  }
  AttentionReport take() {
    AttentionReport report;
    report.layers.resize(kLayers);
    log_.take(report);
    number_ = 0;
    return report;
  }
  static constexpr int kLayers = 3, kHeads = 6, kKvHeads = 2;

 private:
  ThreadPool pool_{1};
  Exec exec_;
  CoverageLog log_{DeviceKind::cpu};
  int64_t number_ = 0;
  bool begun_ = false;
};

// Mean of the measured values from number `first` on, every `1 + points`-th of them.
double mean_of(int64_t first, int sampled, int points) {
  double sum = 0;
  for (int i = 0; i < sampled * Log::kKvHeads; ++i) sum += static_cast<double>(first + int64_t{i} * (1 + points));
  return sum / (sampled * Log::kHeads);
}

TEST(CoverageLog, KeepsSequencesAndLayersApart) {
  Log log;
  log.add(0, {3, 5}, 1);
  log.add(2, {4}, 2);
  const AttentionReport report = log.take();
  ASSERT_EQ(report.samples.size(), 3u);
  EXPECT_EQ(report.samples[0].layer, 0);
  EXPECT_DOUBLE_EQ(report.samples[0].sample.held, mean_of(0, 3, 1));
  EXPECT_DOUBLE_EQ(report.samples[0].sample.curve.at(0), mean_of(1, 3, 1));
  EXPECT_DOUBLE_EQ(report.samples[1].sample.held, mean_of(12, 5, 1));
  EXPECT_EQ(report.samples[2].layer, 2);
  EXPECT_DOUBLE_EQ(report.samples[2].sample.held, mean_of(32, 4, 2));
  EXPECT_DOUBLE_EQ(report.samples[2].sample.curve.at(1), mean_of(34, 4, 2));
  EXPECT_EQ(report.layers[0].covered_tokens, 2000);
  EXPECT_TRUE(log.take().samples.empty());
}

// More than all pages hold, in forwards that end within a page and in one that is longer than a page; twice, so that
// pages serve again.
TEST(CoverageLog, HoldsMoreThanItsPages) {
  constexpr int kSampled = 5001, kPoints = 6;
  constexpr int64_t kFloats = int64_t{kSampled} * Log::kKvHeads * (1 + kPoints);
  const auto forwards = static_cast<int>(CoverageLog::kPages * CoverageLog::kPageFloats / kFloats + 7);
  const auto large = static_cast<int>(CoverageLog::kPageFloats);
  Log log;
  for (int round = 0; round < 2; ++round) {
    log.add(1, {large}, 1);
    for (int i = 0; i < forwards; ++i) log.add(i % Log::kLayers, {kSampled}, kPoints);
    const AttentionReport report = log.take();
    ASSERT_EQ(std::ssize(report.samples), forwards + 1);
    EXPECT_NEAR(report.samples[0].sample.held, mean_of(0, large, 1), 1e-9 * mean_of(0, large, 1));
    int64_t first = int64_t{large} * Log::kKvHeads * 2;
    for (int i = 0; i < forwards; ++i, first += kFloats) {
      const MeasuredCoverage& one = report.samples[static_cast<size_t>(i) + 1];
      EXPECT_EQ(one.layer, i % Log::kLayers);
      EXPECT_NEAR(one.sample.held, mean_of(first, kSampled, kPoints), 1e-9 * mean_of(first, kSampled, kPoints));
    }
  }
}

// The sample of a sequence in pieces comes with its last one, also where somebody asks in between.
TEST(CoverageLog, JoinsThePiecesOfASequence) {
  Log log;
  log.add(0, {4}, 1, /*goes_on=*/true);
  EXPECT_TRUE(log.take().samples.empty());
  log.add(0, {4}, 1);
  const AttentionReport report = log.take();
  ASSERT_EQ(report.samples.size(), 1u);
  EXPECT_EQ(report.samples[0].sample.rows, 8);
  EXPECT_DOUBLE_EQ(report.samples[0].sample.held, mean_of(0, 4, 1));  // the mean of two that are alike
}

// Whatever the lengths, measuring takes no more scratch than planned.
TEST(GpuAttentionMemory, HasRoomForMeasuringCoverage) {
  Random random(5);
  for (int i = 0; i < 200; ++i) {
    SparseAttention::Options options;
    options.selection.block = 64 << random.below(3);
    options.coverage_rows = 1 + static_cast<int>(random.below(100));
    const int64_t longest = int64_t{1} << random.below(16);
    std::vector<int32_t> cu{0};
    std::vector<SequenceTiles> tiles;
    const auto max_tokens = 1 + static_cast<int32_t>(random.below(100'000));
    while (cu.back() < max_tokens && std::ssize(tiles) < max_tokens / 64 + 64) {
      const auto length = static_cast<int32_t>(
          std::min<int64_t>(max_tokens - cu.back(), 1 + static_cast<int64_t>(random.below(longest))));
      tiles.push_back({length, options.selection.block, 16, 1, 2, 1024});
      cu.push_back(cu.back() + length);
    }
    const AttentionShape shape{28, 4, 128, 0.1f};
    const CoveragePlan plan =
        make_coverage_plan({cu.back(), shape.heads, shape.kv_heads, shape.head_dim, shape.scale}, cu,
                           std::vector<bool>(tiles.size(), true), tiles, options.coverage_rows, nullptr, {});
    const AttentionMemory memory{options, 132, int64_t{1} << 26};
    EXPECT_LE(4 * (3 * (plan.scores + plan.ranks) + plan.results), memory.coverage_bytes(shape, max_tokens))
        << tiles.size() << " sequences, " << max_tokens << " tokens";
  }
}

// Nor does any piece of any sequence, wherever its measured tokens happen to lie.
TEST(GpuAttentionMemory, HasRoomForMeasuringCoverageInPieces) {
  Random random(6);
  for (int i = 0; i < 500; ++i) {
    const int block = 64 << random.below(3), rows = 1 + static_cast<int>(random.below(40));
    const auto longest = 1 + static_cast<int64_t>(random.below(60'000));
    const int64_t most = block * (1 + static_cast<int64_t>(random.below(32)));
    const int64_t planned = most_piece_coverage_floats(std::min<int64_t>(rows, longest), most, longest, block, 28, 4);
    const int64_t length = 1 + static_cast<int64_t>(random.below(static_cast<uint64_t>(longest)));
    for (int64_t begin = 0; begin < length; begin += most) {
      const auto tokens = static_cast<int32_t>(std::min(most, length - begin));
      const CoveragePlan plan =
          make_coverage_plan({tokens, 28, 4, 128, 0.1f, static_cast<int32_t>(begin)}, std::vector<int32_t>{0, tokens},
                             {true}, {{length, block, 16, 1, 2, 1024}}, rows, nullptr, {});
      EXPECT_LE(3 * (plan.scores + plan.ranks) + plan.results, planned)
          << tokens << " tokens from " << begin << " of " << length << ", at most " << longest;
    }
  }
}

}  // namespace
}  // namespace sb::gpu
