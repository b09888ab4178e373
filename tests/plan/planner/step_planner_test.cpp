#include "plan/planner/step_planner.h"

#include <gtest/gtest.h>

#include "attention/select/coverage.h"
#include "core/errors.h"

namespace sb {
namespace {

std::vector<Sequence> batch(const std::vector<int64_t>& lengths, int64_t first_id) {
  std::vector<Sequence> sequences;
  for (const int64_t length : lengths) sequences.push_back({first_id++, length});
  return sequences;
}

std::vector<std::vector<std::vector<int64_t>>> ids(const Plan& plan) {
  std::vector<std::vector<std::vector<int64_t>>> result;
  for (const PlannedRank& rank : plan.ranks) {
    result.emplace_back();
    for (const PlannedMicroBatch& micro_batch : rank.micro_batches) result.back().push_back(micro_batch.sequences);
  }
  return result;
}

TEST(InOrderPlanner, CutsTheBatchIntoEqualPartsAndPacksEach) {
  InOrderPlanner planner(2, 3, {2, 10});
  planner.announce(7, batch({4, 5, 6, 1, 1, 10, 3}, 100));
  const Plan plan = planner.next();
  EXPECT_EQ(plan.step, 7);
  EXPECT_EQ(plan.layers, 3);
  EXPECT_EQ(ids(plan),
            (std::vector<std::vector<std::vector<int64_t>>>{{{100, 101}, {102}}, {{103, 104}, {105}, {106}}}));
  EXPECT_EQ(plan.ranks[0].micro_batches[0].tokens, 9);
  EXPECT_TRUE(plan.ranks[0].micro_batches[0].budgets.empty());
}

TEST(InOrderPlanner, SurvivesTheTrip) {
  InOrderPlanner planner(2, 3, {2, 10});
  planner.announce(1, batch({4, 5, 6}, 0));
  const Plan plan = planner.next();
  const Plan back = parse_plan(write_plan(plan), "plan");
  EXPECT_EQ(back.step, plan.step);
  EXPECT_EQ(ids(back), ids(plan));
  EXPECT_TRUE(back.ranks[1].micro_batches[0].budgets.empty());
}

TEST(InOrderPlanner, CoverageOutlivesTheProcess) {
  const auto measured = [](int64_t tokens, double share) {
    StepMeasurement measurement;
    CoverageSample sample;
    const size_t budgets = coverage_grid(tokens, 64).size();
    for (size_t i = 0; i < budgets; ++i)
      sample.curve.push_back(i + 1 == budgets ? 1.0
                                              : share * static_cast<double>(i + 1) / static_cast<double>(budgets));
    sample.held = 0.5 * share;
    measurement.coverage = {{0, tokens, sample}, {2, tokens, sample}};
    return measurement;
  };
  InOrderPlanner whole(1, 3, {2, 10}, 64, 320), first(1, 3, {2, 10}, 64, 320), second(1, 3, {2, 10}, 64, 320);
  EXPECT_EQ(first.state(), "") << "as checkpoints of runs without sparse attention have it";
  second.restore_state("");
  EXPECT_TRUE(second.coverage()->curves().empty());
  for (const auto& [tokens, share] : {std::pair(1000, 0.8), std::pair(4000, 0.6)}) {
    whole.learn(measured(tokens, share));
    first.learn(measured(tokens, share));
  }
  second.restore_state(first.state());
  EXPECT_EQ(*second.coverage(), *first.coverage());
  whole.learn(measured(1000, 0.4));
  second.learn(measured(1000, 0.4));
  EXPECT_EQ(*second.coverage(), *whole.coverage());
  EXPECT_EQ(second.coverage()->curves().size(), 4u);
  EXPECT_THROW(second.restore_state("{}"), UserError);
}

TEST(InOrderPlanner, ABatchSmallerThanTheRanksIsRefused) {
  InOrderPlanner planner(4, 1, {2, 10});
  EXPECT_THROW(planner.announce(1, batch({4, 5, 6}, 0)), UserError);
}

}  // namespace
}  // namespace sb
