#include "plan/planner/step_planner.h"

#include <gtest/gtest.h>

#include <functional>
#include <tuple>
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

TEST(InOrderPlanner, CutsLongSequencesAndPacksShortOnesBetween) {
  InOrderPlanner planner(1, 3, {2, 100}, 8, 0, {32, 16, true});
  planner.announce(1, batch({10, 10, 100, 33, 5, 40}, 0));
  const Plan plan = planner.next();
  std::vector<std::tuple<std::vector<int64_t>, int64_t, int64_t, int64_t>> found;
  for (const PlannedMicroBatch& own : plan.ranks[0].micro_batches)
    found.emplace_back(own.sequences, own.tokens, own.begin, own.end);
  const decltype(found) expected{{{0, 1}, 20, 0, 0}, {{2}, 16, 0, 16}, {{2}, 32, 16, 48}, {{2}, 32, 48, 80},
                                 {{2}, 20, 80, 100}, {{3}, 16, 0, 16}, {{3}, 17, 16, 33}, {{4}, 5, 0, 0},
                                 {{5}, 16, 0, 16},   {{5}, 24, 16, 40}};
  EXPECT_EQ(found, expected);
  EXPECT_EQ(plan.ranks[0].ahead, 4);
  EXPECT_EQ(group_sizes(plan.ranks[0]), (std::vector<int>{1, 4, 2, 1, 2}));
  EXPECT_EQ(write_plan(parse_plan(write_plan(plan), "plan")), write_plan(plan));
}

TEST(PlanJson, PiecesThatDoNotFitEachOtherAreRefused) {
  InOrderPlanner planner(1, 3, {2, 100}, 8, 0, {32, 16, true});
  planner.announce(1, batch({40, 5}, 0));
  const Plan good = planner.next();
  const auto refused = [&](const std::function<void(Plan&)>& change, const char* why) {
    Plan plan = good;
    change(plan);
    try {
      parse_plan(write_plan(plan), "a plan");
      ADD_FAILURE() << "taken, though " << why;
    } catch (const UserError& error) {
      EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
    }
  };
  const auto piece = [](Plan& plan, size_t i) -> PlannedMicroBatch& { return plan.ranks[0].micro_batches[i]; };
  refused([&](Plan& plan) { piece(plan, 0).sequences = {9}; }, "is not its piece that ends there");
  refused([&](Plan& plan) { piece(plan, 1).begin = 8, piece(plan, 1).tokens = 32; },
          "is not its piece that ends there");
  refused([&](Plan& plan) { std::swap(piece(plan, 0), piece(plan, 1)); }, "is not its piece that ends there");
  refused([&](Plan& plan) { piece(plan, 1).tokens = 5; }, "does not have 5 tokens");
  refused([&](Plan& plan) { piece(plan, 1).sequences = {0, 1}; }, "the only sequence");
  refused([&](Plan& plan) { piece(plan, 1).budgets = {8, 8, 8}; }, "different budgets");
  refused([&](Plan& plan) { plan.ranks[0].ahead = 4; }, "`ahead` 4 must be from 1 to the rank's 3");
  refused([&](Plan& plan) { plan.ranks[0].ahead = 0; }, "`ahead` 0");
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
