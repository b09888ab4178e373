#include "plan/batching/partition.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/random.h"
#include "plan/batching/batching.h"
#include "plan/simulate/length_pool.h"

namespace sb {
namespace {

PartitionProblem random_problem(Random& random, int items, int bins) {
  PartitionProblem problem;
  problem.bins = bins;
  for (int i = 0; i < items; ++i) {
    problem.weight.push_back(std::floor(1 + 1000 * std::pow(random.uniform(), 3)));
    problem.tokens.push_back(1 + static_cast<int64_t>(random.below(100)));
  }
  return problem;
}

// Every assignment there is.
double best_of_all(const PartitionProblem& problem) {
  const size_t n = problem.weight.size();
  double best = std::numeric_limits<double>::infinity();
  Assignment bin(n, 0);
  for (;;) {
    if (respects_limits(problem, bin)) best = std::min(best, heaviest_bin(problem, bin));
    size_t i = 0;
    while (i < n && ++bin[i] == problem.bins) bin[i++] = 0;
    if (i == n) return best;
  }
}

TEST(Partition, ExactSearchEqualsEnumeration) {
  Random random(1);
  for (int trial = 0; trial < 120; ++trial) {
    const int bins = 2 + static_cast<int>(random.below(2)), items = bins + static_cast<int>(random.below(7));
    PartitionProblem problem = random_problem(random, items, bins);
    if (trial % 3 == 1) problem.cap = 60 + 50 * static_cast<int64_t>(items) / bins;
    if (trial % 3 == 2) problem.max_items = problem.min_items = items % bins == 0 ? items / bins : 0;
    if (problem.max_items == 0) problem.min_items = 1;
    const double best = best_of_all(problem);
    const Assignment found = exact_partition(problem);
    if (std::isinf(best)) {
      EXPECT_TRUE(found.empty());
      continue;
    }
    ASSERT_FALSE(found.empty());
    EXPECT_TRUE(respects_limits(problem, found));
    EXPECT_NEAR(heaviest_bin(problem, found), best, 1e-9);
    EXPECT_LE(partition_lower_bound(problem.weight, bins), best + 1e-9);
  }
}

TEST(Partition, TwelveItemsAreExact) {
  Random random(9);
  for (int trial = 0; trial < 10; ++trial) {
    const PartitionProblem problem = random_problem(random, 12, 3);
    EXPECT_NEAR(heaviest_bin(problem, balanced_partition(problem, 1000)), best_of_all(problem), 1e-9);
  }
}

TEST(Partition, SixtyFourIntoSixteenIsWithinOneAndAHalfPercentOfTheBound) {
  const LatencyModel latency(analytic_profile("h200-analytic", find_model_shape("qwen2.5-3b")));
  const CostModel cost(latency, {}, {});
  for (const std::string& name : named_length_pools()) {
    const auto pool = find_lengths(name);
    LengthSampler sampler(pool, 3);
    double ratio = 0;
    constexpr int batches = 60;
    for (int i = 0; i < batches; ++i) {
      const auto sequences = sampler.next(64);
      std::vector<int64_t> budgets;
      PartitionProblem problem;
      for (const Sequence& s : sequences) budgets.push_back(cost.spec().base_budget(s.tokens));
      int64_t total = 0, longest = 0;
      for (const SequenceCost& c : sequence_costs(cost, sequences, budgets))
        problem.weight.push_back(c.layer.forward + c.layer.backward);
      for (const Sequence& s : sequences) {
        problem.tokens.push_back(s.tokens);
        total += s.tokens;
        longest = std::max(longest, s.tokens);
      }
      problem.bins = 16;
      problem.cap = std::max(longest, total / 10);
      const Assignment bin = balanced_partition(problem, 4000);
      ASSERT_TRUE(respects_limits(problem, bin));
      ratio += heaviest_bin(problem, bin) / partition_lower_bound(problem.weight, 16);
    }
    EXPECT_LE(ratio / batches, 1.015) << name;
  }
}

TEST(Partition, LimitsHoldAndImprovementNeverHurts) {
  Random random(4);
  for (int trial = 0; trial < 200; ++trial) {
    const int bins = 1 + static_cast<int>(random.below(12)), items = bins + static_cast<int>(random.below(60));
    PartitionProblem problem = random_problem(random, items, bins);
    problem.cap = 100 + 60 * static_cast<int64_t>(items) / bins;
    Assignment bin = longest_first(problem);
    if (bin.empty()) continue;
    ASSERT_TRUE(respects_limits(problem, bin));
    const double before = heaviest_bin(problem, bin);
    improve_partition(problem, bin, 2000);
    EXPECT_TRUE(respects_limits(problem, bin));
    EXPECT_LE(heaviest_bin(problem, bin), before * (1 + 1e-12));
  }
}

TEST(Partition, KarmarkarKarpBeatsLongestFirstOnTheTextbookCase) {
  PartitionProblem problem;
  problem.weight = {8, 7, 6, 5, 4};
  problem.bins = 2;
  EXPECT_DOUBLE_EQ(heaviest_bin(problem, longest_first(problem)), 17);
  EXPECT_DOUBLE_EQ(heaviest_bin(problem, karmarkar_karp(problem)), 16);
  // Differencing leaves a bin empty here unless told otherwise.
  problem.weight = {100, 1, 1};
  problem.bins = 3;
  EXPECT_TRUE(respects_limits(problem, karmarkar_karp(problem)));
}

TEST(Partition, FewestBinsIsABoundAndATightOne) {
  Random random(8);
  int tight = 0;
  constexpr int kTrials = 300;
  for (int trial = 0; trial < kTrials; ++trial) {
    PartitionProblem problem = random_problem(random, 1 + static_cast<int>(random.below(9)), 1);
    problem.cap = 100;
    const int64_t bound = fewest_bins(problem.tokens, problem.cap);
    for (problem.bins = 1; exact_partition(problem).empty();) ++problem.bins;
    ASSERT_LE(bound, problem.bins) << "trial " << trial;
    tight += bound == problem.bins;
  }
  EXPECT_GT(tight, kTrials * 8 / 10);
  EXPECT_EQ(fewest_bins({}, 10), 0);
  EXPECT_EQ(fewest_bins({10, 10, 10}, 10), 3);
  EXPECT_EQ(fewest_bins({5, 5, 5, 5}, 10), 2);
  EXPECT_EQ(fewest_bins({6, 6, 5, 5}, 10), 3);        // no small one fits beside a large one
  EXPECT_EQ(fewest_bins({7, 7, 3, 3, 3, 3}, 10), 3);  // two do
}

TEST(Partition, MoreBinsThanItemsHasNoAnswer) {
  PartitionProblem problem;
  problem.weight = {1, 2};
  problem.bins = 3;
  EXPECT_TRUE(balanced_partition(problem, 100).empty());
  problem.bins = 2;
  problem.tokens = {10, 20};
  problem.cap = 15;
  EXPECT_TRUE(balanced_partition(problem, 100).empty());
}

}  // namespace
}  // namespace sb
