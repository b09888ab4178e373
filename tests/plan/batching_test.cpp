#include "plan/batching/batching.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>

#include "core/errors.h"
#include "core/random.h"
#include "plan/batching/partition.h"
#include "plan/simulate/compared_batchings.h"

namespace sb {
namespace {

// Every way to fill micro-batches, those of `simulate` too.
std::vector<BatchingOptions> all_policies(BatchingOptions options) {
  std::vector<BatchingOptions> all;
  for (const BatchingPolicy policy : {BatchingPolicy::in_order, BatchingPolicy::sab}) {
    options.policy = policy;
    all.push_back(options);
  }
  options.policy = BatchingPolicy::compared;
  for (const ComparedBatching& compared : compared_batchings()) {
    options.compared = &compared;
    all.push_back(options);
  }
  return all;
}

const LatencyModel& latency() {
  static const LatencyModel model(analytic_profile("h200-analytic", find_model_shape("qwen2.5-0.5b")));
  return model;
}

CostModel cost_of(int dp, int pp) {
  Layout layout;
  layout.dp = dp;
  layout.pp = pp;
  layout.comm = layout.head = false;
  return CostModel(latency(), {}, layout);
}

std::vector<Sequence> random_sequences(Random& random, int64_t count) {
  std::vector<Sequence> sequences;
  for (int64_t i = 0; i < count; ++i)
    sequences.push_back({i, 1 + static_cast<int64_t>(std::exp(6 + 2.0 * random.normal()))});
  return sequences;
}

std::vector<int64_t> base(const CostModel& cost, const std::vector<Sequence>& sequences) {
  std::vector<int64_t> budgets;
  for (const Sequence& s : sequences) budgets.push_back(cost.spec().base_budget(s.tokens));
  return budgets;
}

TEST(Batching, EverySequenceOnceUnderTheCapAndNoEmptyRank) {
  Random random(1);
  for (int trial = 0; trial < 150; ++trial) {
    const int dp = 1 + static_cast<int>(random.below(8)), pp = 1 << random.below(4);
    const int64_t count = dp + static_cast<int64_t>(random.below(60));
    const CostModel cost = cost_of(dp, pp);
    const auto sequences = random_sequences(random, count);
    int64_t longest = 0, total = 0;
    for (const Sequence& s : sequences) {
      longest = std::max(longest, s.tokens);
      total += s.tokens;
    }
    BatchingOptions given;
    if (trial % 3 != 0) given.micro_batch_sequences = 1 + static_cast<int64_t>(random.below(5));
    if (trial % 3 != 1)
      given.micro_batch_tokens = longest + static_cast<int64_t>(random.below(static_cast<uint64_t>(total)));
    if (trial % 2 != 0)
      given.max_sequences =
          std::max<int64_t>(1, given.micro_batch_sequences) * static_cast<int64_t>(1 + random.below(3));
    for (const BatchingOptions& options : all_policies(given)) {
      const Batches batches = make_batches(cost, sequences, base(cost, sequences), options);
      ASSERT_EQ(batches.ranks(), dp);
      std::set<int> seen;
      std::set<int> counts;
      for (int r = 0; r < dp; ++r) {
        ASSERT_GT(batches.micro_batches(r), 0);
        counts.insert(batches.micro_batches(r));
        for (int i = batches.first(r); i < batches.first(r) + batches.micro_batches(r); ++i) {
          int64_t tokens = 0;
          ASSERT_FALSE(batches.members(i).empty());
          for (int member : batches.members(i)) {
            EXPECT_TRUE(seen.insert(member).second);
            tokens += sequences[static_cast<size_t>(member)].tokens;
          }
          if (options.micro_batch_tokens > 0) {
            EXPECT_LE(tokens, options.micro_batch_tokens);
          }
          if (options.max_sequences > 0) {
            EXPECT_LE(std::ssize(batches.members(i)), options.max_sequences) << options.name();
          }
        }
      }
      EXPECT_EQ(static_cast<int64_t>(seen.size()), count);
      // Equal numbers for a pipeline; consecutive packing may need one more where sequences do not divide.
      if (pp > 1) {
        EXPECT_LE(*counts.rbegin() - *counts.begin(), count % dp == 0 ? 0 : 1);
      }
      EXPECT_EQ(batches, make_batches(cost, sequences, base(cost, sequences), options)) << options.name();
    }
  }
}

TEST(Batching, InOrderIsConsecutive) {
  const CostModel cost = cost_of(2, 2);
  std::vector<Sequence> sequences;
  for (int64_t i = 0; i < 8; ++i) sequences.push_back({i, 100 * (i + 1)});
  BatchingOptions options;
  options.policy = BatchingPolicy::in_order;
  options.micro_batch_sequences = 2;
  const Batches batches = make_batches(cost, sequences, base(cost, sequences), options);
  EXPECT_EQ(batches.rank_begin, (std::vector<int>{0, 2, 4}));
  EXPECT_EQ(batches.micro_batch_begin, (std::vector<int>{0, 2, 4, 6, 8}));
  EXPECT_EQ(batches.sequences, (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7}));
  // The cap asks for more micro-batches.
  options.micro_batch_tokens = 800;
  const Batches more = make_batches(cost, sequences, base(cost, sequences), options);
  EXPECT_GT(more.micro_batches(), 4);
  EXPECT_EQ(more.sequences, batches.sequences);
}

TEST(Batching, MicroBatchSequencesFixesTheirNumber) {
  Random random(5);
  const CostModel cost = cost_of(4, 4);
  const auto sequences = random_sequences(random, 32);
  BatchingOptions given;
  given.micro_batch_sequences = 2;
  for (const BatchingOptions& options : all_policies(given)) {
    EXPECT_EQ(make_batches(cost, sequences, base(cost, sequences), options).micro_batches(), 16);
  }
}

TEST(Batching, SabBalancesDataParallelRanksExactlyWhenSmall) {
  Random random(6);
  const CostModel cost = cost_of(3, 1);
  for (int trial = 0; trial < 20; ++trial) {
    const auto sequences = random_sequences(random, 10);
    BatchingOptions options;
    options.micro_batch_sequences = 2;
    const auto budgets = base(cost, sequences);
    const auto costs = sequence_costs(cost, sequences, budgets);
    const Batches batches = make_batches(cost, sequences, budgets, options);
    PartitionProblem problem;
    for (const SequenceCost& c : costs) problem.weight.push_back(c.layer.forward + c.layer.backward);
    problem.bins = 3;
    double heaviest = 0;
    for (int r = 0; r < 3; ++r) {
      double load = 0;
      for (int i = batches.first(r); i < batches.first(r) + batches.micro_batches(r); ++i)
        for (int member : batches.members(i)) load += problem.weight[static_cast<size_t>(member)];
      heaviest = std::max(heaviest, load);
    }
    EXPECT_NEAR(heaviest, heaviest_bin(problem, exact_partition(problem)), 1e-9 * heaviest);
  }
}

TEST(Batching, BadInput) {
  const auto error_of = [](const std::function<void()>& body) -> std::string {
    try {
      body();
    } catch (const UserError& error) {
      return error.what();
    }
    return "";
  };
  const CostModel cost = cost_of(4, 1);
  BatchingOptions options;
  options.micro_batch_sequences = 1;
  const auto run = [&](const std::vector<Sequence>& sequences) {
    return error_of([&] { make_batches(cost, sequences, std::vector<int64_t>(sequences.size(), 8192), options); });
  };
  EXPECT_NE(run({}).find("empty"), std::string::npos);
  EXPECT_NE(run({{0, 5}, {1, 5}}).find("smaller than dp 4"), std::string::npos);
  EXPECT_NE(run({{0, 5}, {1, 5}, {2, 0}, {7, 5}}).find("sequence 2 has 0 tokens"), std::string::npos);
  EXPECT_NE(run({{0, 5}, {1, 5}, {2, -3}, {7, 5}}).find("positive"), std::string::npos);
  options.micro_batch_tokens = 100;
  EXPECT_NE(run({{0, 5}, {1, 5}, {2, 101}, {7, 5}}).find("more than the cap of 100"), std::string::npos);
  options = {};
  EXPECT_NE(run({{0, 5}, {1, 5}, {2, 5}, {7, 5}}).find("the size of a micro-batch is not set"), std::string::npos);
}

}  // namespace
}  // namespace sb
