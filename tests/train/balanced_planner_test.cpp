#include "train/balanced_planner.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <cmath>
#include <fstream>
#include <functional>
#include <set>
#include <sstream>

#include "attention/selection/coverage.h"
#include "core/errors.h"
#include "core/random.h"
#include "parallel/context_layout.h"
#include "tests/data/temporary_folder.h"
#include "train/balanced_planner_config.h"
#include "train/cautious_coverage.h"

namespace sb {
namespace {

constexpr int kLayers = 4;

ModelShape shape() {
  ModelShape shape;
  shape.layers = kLayers;
  shape.hidden = 2048;
  shape.heads = 16;
  shape.kv_heads = 4;
  shape.head_dim = 128;
  shape.intermediate = 8192;
  shape.vocabulary = 32000;
  return shape;
}

BalancedPlannerOptions options(int dp = 2, int pp = 1) {
  BalancedPlannerOptions options;
  options.plan.batching.micro_batch_sequences = 1;
  options.plan.batching.micro_batch_tokens = 1 << 17;
  options.spec.budget = 4096;
  options.layout.dp = dp;
  options.layout.pp = pp;
  return options;
}

std::vector<Sequence> batch_of(int64_t step) {
  std::vector<Sequence> sequences;
  Random random(static_cast<uint64_t>(step));
  for (int64_t i = 0; i < 8; ++i)
    sequences.push_back(
        {(step - 1) * 8 + i, 1000 + static_cast<int64_t>(std::exp(random.uniform() * std::log(60.0)) * 1000)});
  return sequences;
}

// A machine that takes `slowness` times what the profile says, and has (k/n)^gamma coverage.
StepMeasurement measure(const Plan& plan, const BalancedPlannerOptions& options, double slowness, double gamma = 0.4) {
  const LatencyModel latency(analytic_profile("h200-analytic", shape()));
  const CostModel cost(latency, options.spec, options.layout);
  StepMeasurement measurement;
  measurement.step = plan.step;
  const std::vector<Sequence> sequences = batch_of(plan.step);
  double longest = 0;
  for (const PlannedRank& rank : plan.ranks) {
    auto& times = measurement.ranks.emplace_back();
    double total = 0;
    for (const PlannedMicroBatch& micro_batch : rank.micro_batches) {
      std::vector<int64_t> lengths;
      for (const int64_t id : micro_batch.sequences)
        lengths.push_back(sequences[static_cast<size_t>(id - sequences[0].id)].tokens);
      MicroBatchTimes& own = times.emplace_back();
      for (int s = 0; s < cost.stages(); ++s) {
        const StageTime stage = predict_stage(cost, micro_batch, lengths, s);
        own.forward.push_back(std::llround(1e3 * slowness * stage.forward));
        own.backward.push_back(std::llround(1e3 * slowness * stage.backward));
        total += slowness * (stage.forward + stage.backward);
      }
      for (const int64_t tokens : lengths)
        for (int layer = 0; layer < kLayers; ++layer) {
          MeasuredCoverage sample{layer, tokens, {}};
          for (const int64_t budget : coverage_grid(tokens, 128))
            sample.sample.curve.push_back(
                std::pow(std::min(1.0, static_cast<double>(budget) / static_cast<double>(tokens)), gamma));
          measurement.coverage.push_back(sample);
        }
    }
    longest = std::max(longest, total);
  }
  measurement.step_ns = std::llround(1e3 * longest + 5e6);
  return measurement;
}

std::unique_ptr<BalancedPlanner> planner(const BalancedPlannerOptions& options) {
  return std::make_unique<BalancedPlanner>(analytic_profile("h200-analytic", shape()), options);
}

// Runs steps first … last as the trainer does and returns what was planned. `slowness` is asked for every step.
std::vector<std::string> run(BalancedPlanner& planner, const BalancedPlannerOptions& options, int64_t first,
                             int64_t last, const std::function<double(int64_t)>& slowness) {
  std::vector<std::string> plans;
  for (int64_t step = first; step <= first + planner.ahead(); ++step) planner.announce(step, batch_of(step));
  for (int64_t step = first; step <= last; ++step) {
    const Plan plan = planner.next();
    EXPECT_EQ(plan.step, step);
    plans.push_back(write_plan(plan));
    planner.learn(measure(plan, options, slowness(step)));
    if (step < last) planner.announce(step + 1 + planner.ahead(), batch_of(step + 1 + planner.ahead()));
  }
  return plans;
}

double steady(int64_t) {
  return 1.7;
}

double metric(const std::vector<Metric>& metrics, const std::string& name) {
  for (const Metric& one : metrics)
    if (one.name == name) return one.value;
  ADD_FAILURE() << "no metric " << name;
  return 0;
}

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

// Losses against the base budget count more than estimated, gains less; what is dense is no estimate.
TEST(CautiousCoverage, DoubtsWhatIsNotAtTheBaseBudget) {
  const auto inner = layered_coverage(kLayers);
  AttentionSpec spec;
  spec.budget = 4096;
  const CautiousCoverage cautious(*inner, spec);
  const std::vector<int32_t> budgets = {1024, 4096, 9000, 40000, 50000};
  std::vector<double> logs;
  for (const int32_t budget : budgets) logs.push_back(std::log(budget));
  const Sequence sequence{7, 40000}, short_one{8, 3000};
  std::vector<double> all(kLayers * budgets.size());
  cautious.evaluate_layers(sequence, kLayers, budgets, logs, all);
  for (int layer = 0; layer < kLayers; ++layer) {
    const double base = inner->at(sequence, layer, 4096);
    const double* values = all.data() + static_cast<size_t>(layer) * budgets.size();
    EXPECT_NEAR(values[0], base - 1.15 * (base - inner->at(sequence, layer, 1024)), 1e-12);
    EXPECT_NEAR(values[1], base, 1e-12);
    EXPECT_NEAR(values[2], base + 0.85 * (inner->at(sequence, layer, 9000) - base), 1e-12);
    EXPECT_EQ(values[3], 1.0);
    EXPECT_EQ(values[4], 1.0);
    for (size_t i = 0; i < budgets.size(); ++i)
      EXPECT_NEAR(cautious.at(sequence, layer, budgets[i]), values[i], 1e-12) << layer << " " << budgets[i];
    EXPECT_EQ(cautious.at(short_one, layer, 1024), inner->at(short_one, layer, 1024)) << "it always runs dense";
  }
  std::vector<double> each(kLayers);
  cautious.evaluate_each(sequence, std::span(budgets).first(kLayers), std::span(logs).first(kLayers), each);
  for (size_t layer = 0; layer < kLayers; ++layer)
    EXPECT_NEAR(each[layer], all[layer * budgets.size() + layer], 1e-12) << layer;
}

TEST(BalancedPlanner, AReplayedPlanWithoutBudgetsHasTheConfiguredOnes) {
  TemporaryFolder folder;
  BalancedPlannerOptions written = options();
  written.log = std::filesystem::path(folder.path("plan.jsonl"));
  run(*planner(written), written, 1, 3, steady);
  BalancedPlannerOptions replay = options();
  replay.spec.dense_layers = {1};
  replay.replay = std::filesystem::path(folder.path("without.jsonl"));
  {
    PlanLog log(replay.replay);
    for (auto [step, logged] : read_plan_log(written.log).steps) {
      for (PlannedRank& rank : logged.plan.ranks)
        for (PlannedMicroBatch& micro_batch : rank.micro_batches) micro_batch.budgets.clear();
      log.plan(logged);
    }
  }
  const auto again = planner(replay);
  for (int64_t step = 1; step <= 3; ++step) again->announce(step, batch_of(step));
  for (int64_t step = 1; step <= 3; ++step) {
    const Plan plan = again->next();
    const std::vector<Sequence> sequences = batch_of(step);
    for (const PlannedRank& rank : plan.ranks)
      for (const PlannedMicroBatch& micro_batch : rank.micro_batches) {
        const size_t n = micro_batch.sequences.size();
        ASSERT_EQ(micro_batch.budgets.size(), n * kLayers);
        for (size_t k = 0; k < n; ++k) {
          const int64_t tokens = sequences[static_cast<size_t>(micro_batch.sequences[k] - sequences[0].id)].tokens;
          for (size_t layer = 0; layer < kLayers; ++layer)
            EXPECT_EQ(micro_batch.budgets[layer * n + k], layer == 1 ? tokens : std::min<int64_t>(tokens, 4096));
        }
      }
    again->learn(measure(plan, replay, 1.7));
  }
}

TEST(BalancedPlanner, EverySequenceRunsOnceUnderTheCap) {
  for (const auto& [dp, pp] : {std::pair{2, 1}, {1, 2}, {2, 2}}) {
    const BalancedPlannerOptions chosen = options(dp, pp);
    const auto planned = planner(chosen);
    for (const std::string& text : run(*planned, chosen, 1, 6, steady)) {
      const Plan plan = parse_plan(text, "plan");
      ASSERT_EQ(static_cast<int>(plan.ranks.size()), dp);
      std::set<int64_t> seen;
      for (const PlannedRank& rank : plan.ranks)
        for (const PlannedMicroBatch& micro_batch : rank.micro_batches) {
          EXPECT_LE(micro_batch.tokens, chosen.plan.batching.micro_batch_tokens);
          for (const int64_t id : micro_batch.sequences) EXPECT_TRUE(seen.insert(id).second);
        }
      EXPECT_EQ(seen.size(), 8u);
      EXPECT_EQ(*seen.begin(), (plan.step - 1) * 8);
      EXPECT_LE(plan.makespan_us, plan.baseline_us * (1 + 1e-9));
    }
  }
}

TEST(BalancedPlanner, PlansFollowFromWhatWasMeasured) {
  const BalancedPlannerOptions chosen = options();
  const auto slowness = [](int64_t step) { return 1.0 + 0.1 * static_cast<double>(step % 5); };
  EXPECT_EQ(run(*planner(chosen), chosen, 1, 12, slowness), run(*planner(chosen), chosen, 1, 12, slowness));
}

TEST(BalancedPlanner, AMeasurementCountsThreeStepsLater) {
  const BalancedPlannerOptions chosen = options();
  const auto usual = run(*planner(chosen), chosen, 1, 8, steady);
  const auto disturbed =
      run(*planner(chosen), chosen, 1, 8, [](int64_t step) { return step == 4 ? 3.0 : steady(step); });
  for (size_t i = 0; i < 6; ++i) EXPECT_EQ(usual[i], disturbed[i]) << "step " << i + 1;
  EXPECT_NE(usual[6], disturbed[6]);  // step 7 is the first that knows of step 4
}

TEST(BalancedPlanner, WithoutAdaptionAPlanFollowsFromTheStep) {
  BalancedPlannerOptions chosen = options();
  chosen.adapt = false;
  const auto planned = planner(chosen);
  const auto all = run(*planned, chosen, 1, 8, [](int64_t step) { return static_cast<double>(step); });
  EXPECT_EQ(planned->state(), "");
  const auto later = run(*planner(chosen), chosen, 5, 8, steady);
  EXPECT_EQ(std::vector(all.begin() + 4, all.end()), later);
}

TEST(BalancedPlanner, GoesOnFromItsState) {
  const BalancedPlannerOptions chosen = options();
  const auto slowness = [](int64_t step) { return 1.0 + 0.2 * static_cast<double>(step % 3); };
  const auto whole = run(*planner(chosen), chosen, 1, 11, slowness);
  const auto first = planner(chosen);
  run(*first, chosen, 1, 6, slowness);
  const auto second = planner(chosen);
  second->restore_state(first->state());
  const auto rest = run(*second, chosen, 7, 11, slowness);
  EXPECT_EQ(std::vector(whole.begin() + 6, whole.end()), rest);
  EXPECT_NE(error_of([&] { planner(chosen)->restore_state("{}"); }).find("balance state"), std::string::npos);
  std::string damaged = first->state();
  damaged.replace(damaged.find("corrections_ppm"), 15, "corrections_ppx");
  EXPECT_NE(error_of([&] { planner(chosen)->restore_state(damaged); }).find("corrections_ppm"), std::string::npos);
}

TEST(BalancedPlanner, GoesOnFromCoverageThatWasMeasuredInOrder) {
  const BalancedPlannerOptions chosen = options();
  const auto first = planner(chosen);
  run(*first, chosen, 1, 6, steady);
  ASSERT_FALSE(first->learned().coverage.curves().empty());
  InOrderPlanner plain(1, kLayers, {2, 10});
  plain.restore_state(first->state());
  EXPECT_EQ(*plain.coverage(), first->learned().coverage);
  const auto second = planner(chosen);
  second->restore_state(plain.state());
  BalanceState expected;
  expected.coverage = first->learned().coverage;
  EXPECT_EQ(second->learned(), expected) << "nothing is known of times and budgets";
  EXPECT_EQ(run(*second, chosen, 7, 11, steady).size(), 5u);
}

TEST(BalancedPlanner, LearnsTheMachineWithoutOvershooting) {
  const BalancedPlannerOptions chosen = options();
  const auto planned = planner(chosen);
  double highest = 0;
  for (int64_t step = 1; step <= 3; ++step) planned->announce(step, batch_of(step));
  for (int64_t step = 1; step <= 30; ++step) {
    planned->learn(measure(planned->next(), chosen, 2.5));
    highest = std::max(highest, static_cast<double>(planned->learned().corrections_ppm[0]) / 1e6);
    planned->announce(step + 3, batch_of(step + 3));
  }
  EXPECT_LE(highest, 2.5 * 1.01);
  for (const int64_t ppm : planned->learned().corrections_ppm) EXPECT_NEAR(static_cast<double>(ppm) / 1e6, 2.5, 0.03);
  EXPECT_LT(metric(planned->metrics(), "prediction_error"), 0.02);
  EXPECT_NEAR(metric(planned->metrics(), "predicted_makespan_ms"), metric(planned->metrics(), "measured_makespan_ms"),
              0.02 * metric(planned->metrics(), "measured_makespan_ms"));
  // Coverage (k/n)^0.4 was shown; a curve of its own for every layer.
  EXPECT_NEAR(planned->learned().coverage.at({0, 40000}, 2, 10000), std::pow(0.25, 0.4), 0.02);
  EXPECT_GT(metric(planned->metrics(), "imbalance"), 0.99);
  EXPECT_GT(metric(planned->metrics(), "planning_ms"), 0.0);
  EXPECT_GT(metric(planned->metrics(), "budget"), 1000.0);
}

TEST(BalancedPlanner, ReplaysTheLogOfAKilledProcess) {
  TemporaryFolder folder;
  BalancedPlannerOptions chosen = options();
  chosen.log = std::filesystem::path(folder.path("plan.jsonl"));
  const auto slow = [](int64_t step) { return 1.0 + 0.3 * static_cast<double>(step % 2); };
  const auto whole = run(*planner(chosen), chosen, 1, 9, slow);
  // A second process starts after step 4 on a machine that has become slower: up to step 9 the plans are the old ones.
  const auto again = run(*planner(chosen), chosen, 5, 11, [](int64_t) { return 3.0; });
  EXPECT_EQ(std::vector(whole.begin() + 4, whole.end()), std::vector(again.begin(), again.begin() + 5));
  const PlanRecord record = read_plan_log(chosen.log);
  EXPECT_EQ(record.damage, "");
  ASSERT_EQ(record.steps.size(), 11u);
  EXPECT_EQ(write_plan(record.steps.at(11).plan), again.back());
  ASSERT_TRUE(record.steps.at(7).measured);
  EXPECT_EQ(record.steps.at(7).measured->ranks.size(), 2u);
  EXPECT_FALSE(record.steps.at(7).in_order.ranks.empty());

  // And the whole of it in another run.
  BalancedPlannerOptions replay = options();
  replay.replay = chosen.log;
  replay.log = std::filesystem::path(folder.path("other.jsonl"));
  std::vector<std::string> expected(whole.begin(), whole.begin() + 8);
  EXPECT_EQ(run(*planner(replay), replay, 1, 8, steady), expected);
  EXPECT_EQ(read_plan_log(replay.log).steps.size(), 8u);
  const auto past_the_end = [&] { run(*planner(replay), replay, 9, 12, steady); };
  EXPECT_NE(error_of(past_the_end).find("no plan of step 12; it holds 1 to 11"), std::string::npos);
}

// A global batch that is no multiple of dp under a tight cap: pipelines with different numbers of micro-batches.
TEST(BalancedPlanner, ReplaysPipelinesOfDifferentLengths) {
  TemporaryFolder folder;
  BalancedPlannerOptions chosen = options(2, 2);
  chosen.plan.batching.policy = BatchingPolicy::length;
  chosen.plan.batching.micro_batch_tokens = 10000;
  chosen.log = std::filesystem::path(folder.path("plan.jsonl"));
  const std::vector<Sequence> three = {{0, 9000}, {1, 8000}, {2, 7000}};
  testing::internal::CaptureStderr();
  const auto first = planner(chosen);
  first->announce(1, three);
  const Plan plan = first->next();
  EXPECT_NE(plan.ranks[0].micro_batches.size(), plan.ranks[1].micro_batches.size());
  first->announce(2, three);
  first->next();
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("step 1: batching length found no room"), std::string::npos) << log;
  EXPECT_EQ(log.find("step 2"), std::string::npos) << log;  // said once

  BalancedPlannerOptions replay = options(2, 2);
  replay.replay = chosen.log;
  replay.plan.batching.micro_batch_tokens = 10000;
  const auto again = planner(replay);
  again->announce(1, three);
  EXPECT_EQ(write_plan(again->next()), write_plan(plan));
}

TEST(BalancedPlanner, PlansAnewWhatOtherOptionsHavePlanned) {
  TemporaryFolder folder;
  BalancedPlannerOptions chosen = options();
  chosen.log = std::filesystem::path(folder.path("plan.jsonl"));
  const auto tuned = run(*planner(chosen), chosen, 1, 9, steady);
  // Killed and resumed after step 4 without tuning.
  BalancedPlannerOptions changed = chosen;
  changed.plan.tuning.policy = TuningPolicy::off;
  changed.replan = "balance.tuning was optimal and is off";
  testing::internal::CaptureStderr();
  const auto plans = run(*planner(changed), changed, 5, 9, steady);
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("the plans from step 5 on are made anew, since balance.tuning was"), std::string::npos) << log;
  const PlanRecord record = read_plan_log(chosen.log);
  EXPECT_EQ(write_plan(record.steps.at(4).plan), tuned[3]);
  for (int64_t step = 5; step <= 9; ++step) {
    EXPECT_EQ(write_plan(record.steps.at(step).plan), plans[static_cast<size_t>(step - 5)]);
    const std::vector<Sequence> sequences = batch_of(step);
    for (const PlannedRank& rank : record.steps.at(step).plan.ranks)
      for (const PlannedMicroBatch& micro_batch : rank.micro_batches)
        for (size_t i = 0; i < micro_batch.budgets.size(); ++i) {
          const int64_t id = micro_batch.sequences[i % micro_batch.sequences.size()];
          const int64_t tokens = sequences[static_cast<size_t>(id - sequences[0].id)].tokens;
          EXPECT_EQ(micro_batch.budgets[i], chosen.spec.base_budget(tokens)) << "step " << step;
        }
  }
  // With the same options they are used, and that is said.
  testing::internal::CaptureStderr();
  EXPECT_EQ(run(*planner(chosen), chosen, 7, 9, steady), std::vector(plans.begin() + 2, plans.end()));
  EXPECT_NE(testing::internal::GetCapturedStderr().find("steps 7 to 9 run as"), std::string::npos);
}

TEST(BalancedPlanner, WhatReplayedStepsTookStaysInALogThatIsWrittenAnew) {
  TemporaryFolder folder;
  BalancedPlannerOptions chosen = options();
  chosen.log = std::filesystem::path(folder.path("plan.jsonl"));
  run(*planner(chosen), chosen, 1, 9, steady);
  // Resumed after step 2; from step 8 on the data are others, which is seen when step 5 is done.
  const auto batch = [](int64_t step) {
    std::vector<Sequence> sequences = batch_of(step);
    if (step >= 8) sequences[0].tokens += 1;
    return sequences;
  };
  const auto resumed = planner(chosen);
  for (int64_t step = 3; step <= 3 + resumed->ahead(); ++step) resumed->announce(step, batch(step));
  std::map<int64_t, int64_t> took;
  testing::internal::CaptureStderr();
  for (int64_t step = 3; step <= 7; ++step) {
    const StepMeasurement measured = measure(resumed->next(), chosen, 2.0 + static_cast<double>(step));
    took[step] = measured.step_ns;
    resumed->learn(measured);
    resumed->announce(step + 1 + resumed->ahead(), batch(step + 1 + resumed->ahead()));
  }
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("from here on it is planned anew"), std::string::npos) << log;
  const PlanRecord record = read_plan_log(chosen.log);
  EXPECT_EQ(record.damage, "");
  for (const auto& [step, step_ns] : took) {
    ASSERT_TRUE(record.steps.contains(step)) << step;
    ASSERT_TRUE(record.steps.at(step).measured) << step;
    EXPECT_EQ(record.steps.at(step).measured->step_ns, step_ns) << step;
  }
}

TEST(BalancedPlanner, RefusesPlansOfOtherRanksOrData) {
  TemporaryFolder folder;
  BalancedPlannerOptions chosen = options();
  chosen.log = std::filesystem::path(folder.path("plan.jsonl"));
  run(*planner(chosen), chosen, 1, 6, steady);

  BalancedPlannerOptions replay = options(4);
  replay.replay = chosen.log;
  EXPECT_NE(error_of([&] { planner(replay)->announce(1, batch_of(1)); }).find("2 data-parallel ranks, not 4"),
            std::string::npos);
  replay.layout.dp = 2;
  std::vector<Sequence> other = batch_of(1);
  other[3].tokens += 1;
  EXPECT_NE(error_of([&] { planner(replay)->announce(1, other); }).find("other data"), std::string::npos);

  // The own log of a run that goes on with more ranks: planned anew from there, and the log says so from there on.
  BalancedPlannerOptions wider = options(4);
  wider.log = chosen.log;
  testing::internal::CaptureStderr();
  const auto plans = run(*planner(wider), wider, 4, 6, steady);
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("is for 2 data-parallel ranks, not 4; from here on it is planned anew"), std::string::npos) << log;
  EXPECT_EQ(log.find("run as"), std::string::npos) << log;
  EXPECT_EQ(parse_plan(plans[0], "plan").ranks.size(), 4u);
  const PlanRecord record = read_plan_log(chosen.log);
  EXPECT_EQ(record.steps.at(3).plan.ranks.size(), 2u);
  EXPECT_EQ(record.steps.at(4).plan.ranks.size(), 4u);
}

TEST(PlanLog, DamagedAndUnfinishedLines) {
  TemporaryFolder folder;
  BalancedPlannerOptions chosen = options();
  chosen.log = std::filesystem::path(folder.path("plan.jsonl"));
  const auto whole = run(*planner(chosen), chosen, 1, 6, steady);
  std::ifstream in(chosen.log);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  ASSERT_EQ(lines.size(), 12u);  // a plan and a measurement a step
  const auto write = [&](const std::string& text) { std::ofstream(chosen.log, std::ios::binary) << text; };
  const auto joined = [&](size_t count) {
    std::string text;
    for (size_t i = 0; i < count; ++i) text += lines[i] + "\n";
    return text;
  };

  write(joined(8) + lines[8].substr(0, lines[8].size() / 2));
  PlanRecord record = read_plan_log(chosen.log);
  EXPECT_EQ(record.steps.size(), 4u);
  EXPECT_NE(record.damage.find("line 9: the line is not finished"), std::string::npos);

  // A digit of a budget: still JSON, and caught by the checksum.
  std::string damaged = lines[2];
  const size_t digit = damaged.find("\"budgets\":[[") + 12;
  damaged[digit] = damaged[digit] == '1' ? '2' : '1';
  write(lines[0] + "\n" + lines[1] + "\n" + damaged + "\n" + lines[3] + "\n");
  record = read_plan_log(chosen.log);
  EXPECT_EQ(record.steps.size(), 1u);
  EXPECT_NE(record.damage.find("line 3"), std::string::npos);
  EXPECT_NE(record.damage.find("checksum"), std::string::npos);

  // The run goes on from what is left, and its log is whole again.
  const auto rest = run(*planner(chosen), chosen, 1, 6, steady);
  EXPECT_EQ(rest, whole);
  record = read_plan_log(chosen.log);
  EXPECT_EQ(record.damage, "");
  EXPECT_EQ(record.steps.size(), 6u);
  EXPECT_THROW(read_plan_log(folder.path("none.jsonl")), UserError);
}

std::string text_of(const std::filesystem::path& file) {
  std::ostringstream text;
  text << std::ifstream(file, std::ios::binary).rdbuf();
  return text.str();
}

size_t times_in(const std::string& text, const std::string& what) {
  size_t count = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++count;
  return count;
}

TEST(RecordedPlans, AreReadOneAtATime) {
  TemporaryFolder folder;
  BalancedPlannerOptions chosen = options();
  chosen.log = std::filesystem::path(folder.path("plan.jsonl"));
  const auto whole = run(*planner(chosen), chosen, 1, 6, steady);
  RecordedPlans plans(chosen.log);
  EXPECT_EQ(plans.damage(), "");
  EXPECT_EQ(plans.first(), 1);
  EXPECT_EQ(plans.last(), 6);
  const PlanRecord record = read_plan_log(chosen.log);
  // What replaces the file does not matter to who has it open.
  std::filesystem::rename(chosen.log, folder.path("moved.jsonl"));
  std::ofstream(chosen.log) << "something else";
  for (const int64_t step : {6, 1, 4, 4}) {
    const LoggedStep read = plans.read(step);
    EXPECT_EQ(write_plan(read.plan), whole[static_cast<size_t>(step - 1)]) << step;
    EXPECT_EQ(write_plan(read.in_order), write_plan(record.steps.at(step).in_order)) << step;
    EXPECT_EQ(read.predicted_step_us, record.steps.at(step).predicted_step_us) << step;
  }
  plans.forget_before(3);
  plans.forget_from(6);
  EXPECT_EQ(plans.first(), 3);
  EXPECT_EQ(plans.last(), 5);
  EXPECT_FALSE(plans.contains(6));
  // A file that is cut off, or written over, under who reads it.
  std::filesystem::resize_file(folder.path("moved.jsonl"), 100);
  EXPECT_NE(error_of([&] { plans.read(4); }).find("line 7: the plan of step 4 was there and is not any more"),
            std::string::npos);
  std::ofstream(folder.path("moved.jsonl")) << std::string(100'000, '\n');
  EXPECT_NE(error_of([&] { plans.read(4); }).find("line 7"), std::string::npos);
}

// In a log of many steps. (Sanitizers do not count; the test says nothing there.)
TEST(RecordedPlans, TakeLittleMemory) {
  TemporaryFolder folder;
  BalancedPlannerOptions chosen = options();
  chosen.log = std::filesystem::path(folder.path("plan.jsonl"));
  const auto first = planner(chosen);
  first->announce(1, batch_of(1));
  LoggedStep logged;
  logged.plan = first->next();
  constexpr int64_t kSteps = 2000;
  {
    PlanLog log(chosen.log);
    for (logged.plan.step = 2; logged.plan.step <= kSteps; ++logged.plan.step) log.plan(logged);
  }
  logged.plan.step = kSteps;
  const size_t before = mallinfo2().uordblks;
  const auto resumed = planner(chosen);
  resumed->announce(kSteps, batch_of(1));
  const size_t after = mallinfo2().uordblks;
  EXPECT_EQ(write_plan(resumed->next()), write_plan(logged.plan));
  EXPECT_LT(after, before + std::filesystem::file_size(chosen.log) / 10);
}

TEST(BalancedPlanner, AResumedRunKeepsTheLogAsItIsUpToItsCheckpoint) {
  TemporaryFolder folder;
  BalancedPlannerOptions chosen = options();
  chosen.log = std::filesystem::path(folder.path("plan.jsonl"));
  run(*planner(chosen), chosen, 1, 4, steady);
  const std::string four = text_of(chosen.log);
  run(*planner(chosen), chosen, 5, 7, steady);
  run(*planner(chosen), chosen, 5, 7, steady);
  EXPECT_EQ(text_of(chosen.log).substr(0, four.size()), four);
  for (int64_t step = 1; step <= 7; ++step) {
    EXPECT_EQ(times_in(text_of(chosen.log), fmt::format("{{\"step\":{},\"crc32c\"", step)), 1u) << step;
    EXPECT_EQ(times_in(text_of(chosen.log), fmt::format("{{\"step\":{},\"measured\"", step)), 1u) << step;
  }
  // Nothing to take out: not a byte is written before the first step.
  const auto written = std::filesystem::last_write_time(chosen.log);
  const std::string seven = text_of(chosen.log);
  planner(chosen)->announce(8, batch_of(8));
  EXPECT_EQ(std::filesystem::last_write_time(chosen.log), written);
  EXPECT_EQ(text_of(chosen.log), seven);
}

// It was killed while it wrote a line.
TEST(BalancedPlanner, AResumedReplayHasAWholeLog) {
  TemporaryFolder folder;
  BalancedPlannerOptions chosen = options();
  chosen.log = std::filesystem::path(folder.path("plan.jsonl"));
  const auto whole = run(*planner(chosen), chosen, 1, 8, steady);
  BalancedPlannerOptions replay = options();
  replay.replay = chosen.log;
  replay.log = std::filesystem::path(folder.path("other.jsonl"));
  run(*planner(replay), replay, 1, 5, steady);
  std::filesystem::resize_file(replay.log, std::filesystem::file_size(replay.log) - 10);
  const auto again = run(*planner(replay), replay, 4, 6, steady);
  EXPECT_EQ(again, std::vector(whole.begin() + 3, whole.begin() + 6));
  const PlanRecord record = read_plan_log(replay.log);
  EXPECT_EQ(record.damage, "");
  ASSERT_EQ(record.steps.size(), 6u);
  for (const auto& [step, logged] : record.steps) EXPECT_TRUE(logged.measured) << step;
  EXPECT_EQ(times_in(text_of(replay.log), "{\"step\":5,\"crc32c\""), 1u);
}

// Files that this process has open and that are not there any more.
size_t removed_and_open() {
  size_t count = 0;
  std::error_code gone;  // the listing's own
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    count += std::filesystem::read_symlink(entry.path(), gone).string().ends_with(" (deleted)");
  return count;
}

TEST(BalancedPlanner, ALogThatIsNotNeededAnyMoreTakesNoRoom) {
  TemporaryFolder folder;
  BalancedPlannerOptions chosen = options();
  chosen.log = std::filesystem::path(folder.path("plan.jsonl"));
  run(*planner(chosen), chosen, 1, 6, steady);
  const size_t before = removed_and_open();
  {
    const auto resumed = planner(chosen);  // replaces the log and goes on reading the old one
    resumed->announce(3, batch_of(3));
    EXPECT_EQ(removed_and_open(), before + 1);
    for (int64_t step = 4; step <= 6; ++step) resumed->announce(step, batch_of(step));
    EXPECT_EQ(removed_and_open(), before);
  }
  BalancedPlannerOptions changed = chosen;
  changed.replan = "something changed";
  const auto anew = planner(changed);
  anew->announce(3, batch_of(3));
  EXPECT_EQ(removed_and_open(), before);
}

TEST(BalancedPlanner, RefusesToReplayItsOwnLog) {
  TemporaryFolder folder;
  BalancedPlannerOptions chosen = options();
  chosen.log = std::filesystem::path(folder.path("plan.jsonl"));
  run(*planner(chosen), chosen, 1, 6, steady);
  const std::string six = text_of(chosen.log);
  chosen.replay = std::filesystem::path(folder.path("./plan.jsonl"));
  EXPECT_NE(error_of([&] { planner(chosen)->announce(3, batch_of(3)); }).find("is this run's own log"),
            std::string::npos);
  EXPECT_TRUE(text_of(chosen.log) == six);
}

TEST(RecordedPlans, SayWhenTheFileCannotBeRead) {
  TemporaryFolder folder;
  std::filesystem::create_directory(folder.path("plan.jsonl"));
  for (const std::string& error : {error_of([&] { RecordedPlans plans(folder.path("plan.jsonl")); }),
                                   error_of([&] { read_plan_log(folder.path("plan.jsonl")); })})
    EXPECT_NE(error.find("plan.jsonl: cannot be read"), std::string::npos) << error;
}

ModelConfig small_model() {
  ModelConfig model;
  model.layers = kLayers;
  model.hidden_size = 256;
  model.intermediate_size = 512;
  model.heads = 4;
  model.kv_heads = 2;
  model.head_dim = 64;
  model.vocab_size = 1000;
  return model;
}

// Every sequence may leave a rank a remainder, and a balanced micro-batch may have many short ones.
TEST(BalancedPlannerConfig, RanksThatShareSequencesHaveRoomForWhatIsPlanned) {
  RunConfig config;
  config.parallel.cp = 3;
  config.attention.selection.block = 64;
  config.batch.global_batch_size = 36;
  config.batch.micro_batch_sequences = 3;
  config.batch.micro_batch_tokens = 8192;
  std::vector<Sequence> sequences;
  for (int64_t i = 0; i < 36; ++i) sequences.push_back({i, i < 11 ? 8192 : 324});
  const PackingLimits limits = packing_limits(config.batch, 8192);
  TemporaryFolder folder;
  for (const auto batching :
       {BalanceOptions::Batching::in_order, BalanceOptions::Batching::length, BalanceOptions::Batching::quadratic,
        BalanceOptions::Batching::wlb, BalanceOptions::Batching::sab})
    for (const auto placement : {ContextPlacement::zigzag, ContextPlacement::triangular}) {
      config.balance.batching = batching;
      config.balance.ordering = BalanceOptions::Ordering::automatic;
      config.parallel.placement = placement;
      config.train.output_dir =
          folder.path(fmt::format("{}-{}", static_cast<int>(batching), static_cast<int>(placement)));
      std::filesystem::create_directories(config.train.output_dir);
      const auto planner = make_balanced_planner(config, small_model(), limits);
      planner->announce(1, sequences);
      const Plan plan = planner->next();
      for (const PlannedMicroBatch& micro_batch : plan.ranks.at(0).micro_batches) {
        std::vector<int32_t> cu_seqlens = {0};
        for (const int64_t id : micro_batch.sequences)
          cu_seqlens.push_back(cu_seqlens.back() + static_cast<int32_t>(sequences[static_cast<size_t>(id)].tokens));
        const ContextLayout layout(placement, config.parallel.cp, config.attention.selection.block, cu_seqlens);
        for (int rank = 0; rank < config.parallel.cp; ++rank)
          EXPECT_LE(std::ssize(layout.tokens(rank)), most_rank_tokens(config, limits));
        EXPECT_LE(std::ssize(micro_batch.sequences), 4 * config.batch.micro_batch_sequences);
      }
    }
}

TEST(BalancedPlannerConfig, TakesItFromTheRun) {
  RunConfig config;
  EXPECT_FALSE(wants_balancing(config.balance));
  config.balance.batching = BalanceOptions::Batching::length;
  EXPECT_TRUE(wants_balancing(config.balance));
  EXPECT_TRUE(attention_spec(config).always_dense(1'000'000));  // the default pattern is dense
  config.attention.selection.pattern = SelectionPattern::topk;
  config.attention.selection.budget = 2048;
  EXPECT_FALSE(attention_spec(config).always_dense(2049));
  EXPECT_TRUE(attention_spec(config).always_dense(2048));
  config.attention.selection.score_tokens = 4;
  EXPECT_DOUBLE_EQ(work_of(attention_spec(config), 8192, 2048).scores, 8192.0 * 8192.0 / 2 / 4);
  config.attention.selection.pattern = SelectionPattern::window;  // as wide as its budget
  EXPECT_EQ(attention_spec(config).budget, 2048);
  config.attention.selection.pattern = SelectionPattern::topk;
  config.attention.selection.score_tokens = 0;

  const ModelConfig model = small_model();
  TemporaryFolder folder;
  config.train.output_dir = folder.path("");
  config.balance.profile = "a100-analytic";
  config.parallel.dp = 2;
  const auto planned = make_balanced_planner(config, model, {1, 4096});
  planned->announce(1, {{0, 4000}, {1, 300}, {2, 2000}});
  EXPECT_EQ(planned->next().ranks.size(), 2u);

  // A measured profile of another model.
  Profile profile = analytic_profile("a100-analytic", shape());
  profile.held_out.count = 3;
  std::ofstream(std::filesystem::path(folder.path("profile.json"))) << write_profile(profile);
  config.balance.profile = std::filesystem::path(folder.path("profile.json"));
  EXPECT_THROW(make_balanced_planner(config, model, {1, 4096}), UserError);

  // One of this model, measured with other blocks.
  profile.shape = model_shape(model);
  profile.recompute = "attention";
  profile.blocks = {64, 16, 0};
  std::ofstream(std::filesystem::path(folder.path("profile.json"))) << write_profile(profile);
  config.train.recompute = Recompute::attention;
  config.attention.selection.block = 64;
  EXPECT_EQ(run_profile(config, model).shape.layers, kLayers);
  config.attention.selection.score_tokens = 8;
  EXPECT_THROW(run_profile(config, model), UserError);
  config.attention.selection.pattern = SelectionPattern::dense;  // has no blocks
  EXPECT_NO_THROW(make_balanced_planner(config, model, {1, 4096}));
}

}  // namespace
}  // namespace sb
