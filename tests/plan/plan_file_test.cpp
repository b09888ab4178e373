#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <vector>

#include "core/errors.h"
#include "plan/plan.h"
#include "tests/core/message_of.h"

namespace sb {
namespace {

using Json = nlohmann::ordered_json;

// Two ranks: three pieces of one sequence, and a pack of two with budgets that differ by layer; then nothing tuned.
Plan small_plan() {
  Plan plan;
  plan.step = 7;
  plan.layers = 3;
  plan.notes = {"said once"};
  PlannedRank pieces, rest;
  for (int64_t i = 0; i < 3; ++i)
    pieces.micro_batches.push_back({{4}, 128, {640, 640, 384}, {1.0, 2.0}, {2.0, 4.0}, 128 * i, 128 * (i + 1)});
  pieces.micro_batches.push_back({{5, 9}, 30, {10, 20, 10, 20, 8, 20}, {1.0, 1.0}, {2.0, 2.0}});
  pieces.ahead = 3;
  pieces.makespan_us = 40;
  rest.micro_batches.push_back({{1}, 11, {}, {3.0, 3.0}, {6.0, 6.0}});
  rest.makespan_us = 18;
  plan.ranks = {pieces, rest};
  return plan;
}

TEST(PlanFile, GoesThereAndBack) {
  const Plan plan = small_plan(), again = parse_plan(write_plan(plan), "plan.jsonl:1");
  ASSERT_EQ(again.ranks.size(), 2u);
  EXPECT_EQ(again.step, 7);
  EXPECT_EQ(again.layers, 3);
  EXPECT_EQ(again.notes, plan.notes);
  for (size_t r = 0; r < 2; ++r) {
    EXPECT_EQ(again.ranks[r].ahead, plan.ranks[r].ahead);
    EXPECT_EQ(again.ranks[r].makespan_us, plan.ranks[r].makespan_us);
    ASSERT_EQ(again.ranks[r].micro_batches.size(), plan.ranks[r].micro_batches.size());
    for (size_t i = 0; i < plan.ranks[r].micro_batches.size(); ++i) {
      const PlannedMicroBatch &a = again.ranks[r].micro_batches[i], &b = plan.ranks[r].micro_batches[i];
      EXPECT_EQ(a.sequences, b.sequences);
      EXPECT_EQ(a.tokens, b.tokens);
      EXPECT_EQ(a.budgets, b.budgets);
      EXPECT_EQ(a.forward_us, b.forward_us);
      EXPECT_EQ(a.backward_us, b.backward_us);
      EXPECT_EQ(a.begin, b.begin);
      EXPECT_EQ(a.end, b.end);
    }
  }
  // Layers that are alike are written once.
  EXPECT_EQ(Json::parse(write_plan(plan))["ranks"][0]["micro_batches"][3]["budgets"],
            Json::parse("[[10, 2, 8, 1], [20, 3]]"));
}

TEST(PlanFile, DamageIsNamedWithItsPlace) {
  const Json whole = Json::parse(write_plan(small_plan()));
  const struct {
    const char *path, *value, *said;
  } cases[] = {
      {"/step", "\"7\"", "`step` must be an integer"},
      {"/step", "7.5", "`step` must be an integer"},
      {"/layers", "0", "`layers` must be from 1 to 16384"},
      {"/layers", "16385", "`layers` must be from 1 to 16384"},
      {"/layers", "4", "budgets of 3 layers, the plan has 4"},
      {"/layers", "2", "does not fit 2 layers"},
      {"/makespan_us", "null", "`makespan_us` must be a number"},
      {"/imbalance", "\"1\"", "`imbalance` must be a number"},
      {"/notes", "\"a\"", "`notes` must be a list"},
      {"/notes", "[1]", "`notes` must hold words"},
      {"/ranks", "{}", "`ranks` must be a list"},
      {"/ranks/0", "[]", "is missing from the plan"},
      {"/ranks/1/micro_batches", "3", "`micro_batches` must be a list"},
      {"/ranks/0/ahead", "0", "`ahead` 0 must be from 1 to the rank's 4 micro-batches"},
      {"/ranks/0/ahead", "5", "`ahead` 5 must be from 1 to the rank's 4 micro-batches"},
      {"/ranks/1/ahead", "4294967297", "`ahead` 4294967297 must be from 1"},
      {"/ranks/1/micro_batches/0/sequences", "[]", "a micro-batch is empty"},
      {"/ranks/1/micro_batches/0/sequences", "[1.5]", "a sequence id must be an integer"},
      {"/ranks/1/micro_batches/0/tokens", "true", "`tokens` must be an integer"},
      {"/ranks/1/micro_batches/0/forward_us", "[1, \"2\"]", "`forward_us` must hold numbers"},
      {"/ranks/1/micro_batches/0/backward_us", "6", "`backward_us` must be a list"},
      {"/ranks/1/micro_batches/0/budgets", "[[8, 3], [8, 3]]", "1 sequences and 2 lists of budgets"},
      {"/ranks/1/micro_batches/0/budgets", "[[8]]", "budgets must be pairs of budget and layers"},
      {"/ranks/1/micro_batches/0/budgets", "[8]", "budgets must be pairs of budget and layers"},
      {"/ranks/1/micro_batches/0/budgets", "[[]]", "budgets of 0 layers, the plan has 3"},
      {"/ranks/1/micro_batches/0/budgets", "[[0, 3]]", "budget 0 over 3 layers does not fit"},
      {"/ranks/1/micro_batches/0/budgets", "[[8, 0]]", "budget 8 over 0 layers does not fit"},
      {"/ranks/1/micro_batches/0/budgets", "[[8, -3]]", "budget 8 over -3 layers does not fit"},
      {"/ranks/1/micro_batches/0/budgets", "[[8, 2]]", "budgets of 2 layers, the plan has 3"},
      {"/ranks/1/micro_batches/0/budgets", "[[8, 2, 9, 2]]", "budget 9 over 2 layers does not fit 3 layers"},
      {"/ranks/0/micro_batches/0/piece", "[0]", "`piece` must be where it begins and ends"},
      {"/ranks/0/micro_batches/3/piece", "[0, 30]", "`piece` must be where it begins and ends in the only sequence"},
      {"/ranks/0/micro_batches/0/piece", "[0, 129]", "a piece from 0 to 129 does not have 128 tokens"},
      {"/ranks/0/micro_batches/0/piece", "[-128, 0]", "a piece from -128 to 0 does not have 128 tokens"},
      {"/ranks/0/micro_batches/0/piece", "[128, 256]", "sequence 4 continues at 128, and the micro-batch before"},
      {"/ranks/0/micro_batches/2/piece", "[128, 256]", "sequence 4 continues at 128, and the micro-batch before"},
      {"/ranks/0/micro_batches/1/sequences", "[6]", "sequence 6 continues at 128, and the micro-batch before"},
      {"/ranks/0/micro_batches/1/budgets", "[[640, 3]]", "the pieces of sequence 4 have different budgets"},
      {"/ranks/0/micro_batches/1/budgets", "[]", "the pieces of sequence 4 have different budgets"},
  };
  for (const auto& [path, value, said] : cases) {
    Json changed = whole;
    changed[Json::json_pointer(path)] = Json::parse(value);
    const std::string message = message_of([&] { parse_plan(changed.dump(), "plan.jsonl:3"); });
    EXPECT_EQ(message.rfind("plan.jsonl:3: ", 0), 0u) << path << ": " << message;
    EXPECT_NE(message.find(said), std::string::npos) << path << " = " << value << ": " << message;
  }
  for (const auto& [key, value] : whole.items()) {
    if (key == "notes") continue;
    Json without = whole;
    without.erase(key);
    EXPECT_NE(message_of([&] { parse_plan(without.dump(), "p"); }).find("`" + key + "` is missing from the plan"),
              std::string::npos)
        << key;
  }
  Json other = whole;
  other["version"] = Plan::kVersion + 1;
  EXPECT_NE(message_of<OtherPlanVersion>([&] { parse_plan(other.dump(), "p"); }).find("move the file away"),
            std::string::npos);
}

TEST(PlanFile, GroupsAndSchedulesOfARank) {
  const Plan plan = small_plan();
  EXPECT_EQ(group_sizes(plan.ranks[0]), (std::vector<int>{3, 1}));
  EXPECT_EQ(group_sizes(plan.ranks[1]), std::vector<int>{1});
  EXPECT_EQ(rank_schedule(plan.ranks[0], 2)->micro_batches(), 4);
  // All three pieces wait on the last stage, and the pack, whose forward runs ahead by three, once two of them are
  // back.
  EXPECT_EQ(rank_schedule(plan.ranks[0], 2)->slots(1), 3);
  EXPECT_EQ(rank_schedule(plan.ranks[0], 2)->slots(0), 4);
  // Another cut sequence right behind: two groups, though pieces touch.
  PlannedRank rank = plan.ranks[0];
  rank.micro_batches.pop_back();
  for (int64_t i = 0; i < 2; ++i)
    rank.micro_batches.push_back({{8}, 64, {}, {1.0, 1.0}, {1.0, 1.0}, 64 * i, 64 * (i + 1)});
  EXPECT_EQ(group_sizes(rank), (std::vector<int>{3, 2}));
}

TEST(PlanFile, ExpectedBudgetsAreKeptByClassAndBounded) {
  AttentionSpec spec;
  ExpectedBudgets expected;
  expected.observe(spec, 30000, 12288);
  const ExpectedBudgets copy = [&] {
    ExpectedBudgets other;
    other.set_ppm(expected.ppm());
    return other;
  }();
  for (const int64_t tokens : {1, 100, 8192, 8193, 20000, 30000, 33000, 1000000})
    EXPECT_EQ(copy.of(spec, tokens), expected.of(spec, tokens)) << tokens;
  // Dense ones are as long as they are, whatever their class has seen.
  EXPECT_EQ(expected.of(spec, 8192), 8192);
  EXPECT_EQ(expected.of(spec, 1), 1);
  EXPECT_GT(expected.of(spec, 30000), spec.budget);
  EXPECT_LE(expected.of(spec, 30000), 12288);
  // No more than the sequence has.
  for (int i = 0; i < 200; ++i) expected.observe(spec, 8300, 100000);
  EXPECT_LE(expected.of(spec, 8300), 8300);
}

TEST(Tuning, SummariesByHand) {
  AttentionSpec spec;
  spec.budget = 4096;
  spec.dense_layers = {1};
  const auto coverage = power_coverage(0.5);
  const std::vector<Sequence> sequences{{0, 16384}, {1, 1000}, {2, 65536}};
  const Budgets base = base_budgets(spec, sequences, 2);
  EXPECT_EQ(base, (Budgets{4096, 16384, 1000, 1000, 4096, 65536}));
  // √(k / n): of the base 0.5, 1, 1, 1, 0.25, 1; and below it 0.25 and 0.125.
  const Budgets less{1024, 16384, 1000, 1000, 1024, 65536};
  const CoverageSummary summary = summarize_coverage(*coverage, spec, sequences, 2, less);
  const double tokens = 2 * (16384.0 + 1000 + 65536);
  EXPECT_NEAR(summary.base_mean, (16384 * 1.5 + 2000 + 65536 * 1.25) / tokens, 1e-12);
  EXPECT_NEAR(summary.mean, (16384 * 1.25 + 2000 + 65536 * 1.125) / tokens, 1e-12);
  EXPECT_NEAR(summary.min, 0.125, 1e-12);
  EXPECT_NEAR(summary.worst_loss, 0.5, 1e-12);
  const CoverageSummary same = summarize_coverage(*coverage, spec, sequences, 2, base);
  EXPECT_NEAR(same.mean, same.base_mean, 1e-12);
  EXPECT_EQ(same.worst_loss, 0);
  ThreadPool pool(2);
  EXPECT_EQ(summarize_coverage(*coverage, spec, sequences, 2, less, &pool).mean, summary.mean);
}

// The borders of the deadline: at 0 every budget at its floor or better, at 1 the base makespan; nothing to lose at p
// 0.
TEST(Tuning, BordersOfTheDeadlineAndOfTheLoss) {
  ModelShape shape = find_model_shape("qwen2.5-0.5b");
  shape.layers = 4;
  const LatencyModel latency(analytic_profile("h200-analytic", shape));
  const CostModel cost(latency, {}, {.dp = 2});
  const auto coverage = power_coverage(0.22);
  const std::vector<Sequence> sequences{{0, 30000}, {1, 12000}, {2, 60000}, {3, 9000}};
  PlanOptions options;
  options.batching.micro_batch_sequences = 1;
  const auto planned = [&](double target, double p) {
    options.tuning.target = target;
    options.tuning.p = p;
    return plan_step(0, cost, *coverage, sequences, options, {});
  };
  double coverage_before = 0, time_before = 0;
  for (const double target : {0.0, 0.25, 0.5, 1.0}) {
    const Plan plan = planned(target, 0.1);
    EXPECT_GE(plan.mean_coverage, coverage_before - 1e-9) << target;
    EXPECT_GE(plan.makespan_us, time_before * (1 - 1e-6)) << target;
    EXPECT_LE(plan.worst_loss, 0.1 + 1e-9) << target;
    coverage_before = plan.mean_coverage;
    time_before = plan.makespan_us;
  }
  const Plan careful = planned(0.0, 0.0);
  EXPECT_LE(careful.worst_loss, 1e-9);
  EXPECT_GE(careful.mean_coverage, careful.base_coverage - 1e-12);
  // A single sequence that is dense anyway leaves nothing to choose.
  const std::vector<Sequence> dense{{0, 5000}, {1, 5000}};
  const Plan nothing = plan_step(0, cost, *coverage, dense, options, {});
  EXPECT_EQ(nothing.mean_coverage, 1.0);
  for (const PlannedRank& rank : nothing.ranks)
    for (const int32_t budget : rank.micro_batches[0].budgets) EXPECT_EQ(budget, 5000);
}

}  // namespace
}  // namespace sb
