#include "tests/plan/planner/planned_steps.h"

#include <gtest/gtest.h>

#include <cmath>

#include "attention/select/coverage.h"
#include "core/errors.h"
#include "core/random.h"

namespace sb::test {

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

BalancedPlannerOptions options(int dp, int pp) {
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

StepMeasurement measure(const Plan& plan, const BalancedPlannerOptions& options, double slowness, double gamma) {
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

std::unique_ptr<BalancedPlanner> planner(const BalancedPlannerOptions& options, const ReplayedSteps& steps) {
  return std::make_unique<BalancedPlanner>(analytic_profile("h200-analytic", shape()), options, steps);
}

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

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

}  // namespace sb::test
