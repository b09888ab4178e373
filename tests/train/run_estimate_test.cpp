#include "train/run_estimate.h"

#include <gtest/gtest.h>

#include "data/synthetic/synthetic.h"
#include "device/context.h"
#include "model/flops.h"
#include "tests/train/tiny_run.h"

namespace sb {
namespace {

struct Estimated {
  RunConfig config;
  ModelConfig model;
  std::unique_ptr<SequenceSource> source;
  RunEstimate at(double rate, const TrainState& state = {}) const {
    return estimate_run(config, model, *source, state, rate);
  }
};

Estimated run_of(const std::vector<std::string>& overrides = {}) {
  Estimated run;
  run.config = parse_run_config(
      "model: {init: {vocab_size: 64}}\n"
      "data: {synthetic: {task: copy, vocab_size: 64, length: 4096}}\n"
      "batch: {global_batch_size: 4}\ntrain: {max_steps: 100}\n",
      "run.yaml", overrides);
  run.model = *run.config.model.init;
  run.source = make_synthetic_source(*run.config.data.synthetic, 1);
  return run;
}

TEST(RunEstimate, FollowsFromTheProductsOfTheStepsThatAreLeft) {
  const Estimated run = run_of();
  const RunEstimate estimate = run.at(1e12);
  const double products = training_flops(run.model, std::vector<int64_t>(4, 4096)) / 1e12;
  EXPECT_GT(estimate.step_seconds, products);
  EXPECT_LT(estimate.step_seconds, 3 * products);
  EXPECT_EQ(estimate.steps, 100);
  EXPECT_DOUBLE_EQ(estimate.run_seconds(), 100 * estimate.step_seconds);
  EXPECT_DOUBLE_EQ(run.at(2e12).step_seconds, estimate.step_seconds / 2);
  TrainState resumed;
  resumed.step = 75;
  EXPECT_EQ(run.at(1e12, resumed).steps, 25);
  resumed.step = 100;
  EXPECT_EQ(run.at(1e12, resumed).run_seconds(), 0.0) << "nothing is left";
}

TEST(RunEstimate, RanksAndSparseAttentionShortenIt) {
  const double one = run_of().at(1e12).step_seconds;
  EXPECT_DOUBLE_EQ(run_of({"parallel.dp=4"}).at(1e12).step_seconds, one / 4);
  const double sparse = run_of({"attention={pattern: topk, budget: 512}"}).at(1e12).step_seconds;
  EXPECT_LT(sparse, one);
  EXPECT_EQ(run_of({"attention={pattern: topk, budget: 8192}"}).at(1e12).step_seconds, one) << "all of it is dense";
}

TEST(RunEstimate, DaysAreWarnedOf) {
  const Estimated run = run_of();
  const auto warning = [&](double step_seconds) {
    testing::internal::CaptureStderr();
    warn_of_long_run({step_seconds, 100, 1e12}, run.config);
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(warning(60), "");
  const std::string said = warning(3600);
  EXPECT_NE(said.find("about 4.2 days"), std::string::npos) << said;
  EXPECT_NE(said.find("device: cuda"), std::string::npos) << said;
  EXPECT_NE(describe({3.25, 100, 2e12}).find("about 3.2 s per step, 5m25s for 100 steps"), std::string::npos)
      << describe({3.25, 100, 2e12});
}

TEST(RunEstimate, TheRateIsThatOfThisMachine) {
  ThreadPool pool(1);
  const DeviceContext context(DeviceKind::cpu, pool);
  const double rate = measure_products(context.exec(), run_of().model, DType::f32, 256);
  EXPECT_GT(rate, 1e7) << "slower than any processor";
  EXPECT_LT(rate, 1e15) << "faster than any";
}

}  // namespace
}  // namespace sb
