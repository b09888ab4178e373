#include "train/lr_schedule.h"

#include <gtest/gtest.h>

#include "core/errors.h"

#include <cmath>
#include <limits>

namespace sb {
namespace {

using Schedule = OptimizerOptions::Schedule;

OptimizerOptions options(Schedule schedule, int64_t warmup, double ratio = 0.0) {
  OptimizerOptions result;
  result.schedule = schedule;
  result.learning_rate = 2e-3;
  result.warmup_steps = warmup;
  result.min_learning_rate_ratio = ratio;
  return result;
}

TEST(LrSchedule, WarmupRisesLinearlyToThePeakInEveryKind) {
  for (const Schedule kind : {Schedule::constant, Schedule::linear, Schedule::cosine, Schedule::warmup_stable_decay}) {
    const OptimizerOptions o = options(kind, 4);
    EXPECT_DOUBLE_EQ(learning_rate(o, 100, 1), 0.5e-3);
    EXPECT_DOUBLE_EQ(learning_rate(o, 100, 2), 1.0e-3);
    EXPECT_DOUBLE_EQ(learning_rate(o, 100, 3), 1.5e-3);
    EXPECT_DOUBLE_EQ(learning_rate(o, 100, 4), 2e-3);
    EXPECT_DOUBLE_EQ(learning_rate(o, 100, 5), 2e-3);  // the decay starts from the peak
  }
}

TEST(LrSchedule, ConstantStays) {
  for (const int64_t step : {1, 2, 50, 100, 1000})
    EXPECT_DOUBLE_EQ(learning_rate(options(Schedule::constant, 0), 100, step), 2e-3);
}

TEST(LrSchedule, LinearFallsByEqualSteps) {
  const OptimizerOptions o = options(Schedule::linear, 10);
  for (int64_t step = 11; step <= 110; ++step)
    EXPECT_NEAR(learning_rate(o, 110, step), 2e-3 * static_cast<double>(111 - step) / 100.0, 1e-15) << step;
  EXPECT_DOUBLE_EQ(learning_rate(o, 110, 111), 0.0);
}

TEST(LrSchedule, LinearEndsAtTheMinimum) {
  const OptimizerOptions o = options(Schedule::linear, 0, 0.1);
  EXPECT_DOUBLE_EQ(learning_rate(o, 10, 1), 2e-3);
  EXPECT_NEAR(learning_rate(o, 10, 6), 2e-4 + 1.8e-3 * 0.5, 1e-15);
  EXPECT_NEAR(learning_rate(o, 10, 11), 2e-4, 1e-15);
  EXPECT_NEAR(learning_rate(o, 10, 5000), 2e-4, 1e-15);
}

TEST(LrSchedule, CosineMeetsItsClosedForm) {
  const OptimizerOptions o = options(Schedule::cosine, 20, 0.25);
  for (int64_t step = 21; step <= 120; ++step) {
    const double angle = 3.14159265358979323846 * static_cast<double>(step - 21) / 100.0;
    EXPECT_NEAR(learning_rate(o, 120, step), 0.5e-3 + 1.5e-3 * (1.0 + std::cos(angle)) / 2.0, 1e-15) << step;
  }
  EXPECT_NEAR(learning_rate(o, 120, 71), 1.25e-3, 1e-15);  // half-way
}

TEST(LrSchedule, StableThenLinearDecay) {
  OptimizerOptions o = options(Schedule::warmup_stable_decay, 5, 0.5);
  o.decay_steps = 20;
  for (int64_t step = 6; step <= 81; ++step) EXPECT_DOUBLE_EQ(learning_rate(o, 100, step), 2e-3) << step;
  EXPECT_NEAR(learning_rate(o, 100, 91), 1.5e-3, 1e-15);
  EXPECT_NEAR(learning_rate(o, 100, 100), 1e-3 + 1e-3 / 20.0, 1e-15);
  EXPECT_NEAR(learning_rate(o, 100, 101), 1e-3, 1e-15);
}

TEST(LrSchedule, NoStepIsWastedAtRateZero) {
  for (const Schedule kind : {Schedule::linear, Schedule::cosine}) {
    for (int64_t step = 1; step <= 30; ++step) EXPECT_GT(learning_rate(options(kind, 3), 30, step), 0.0) << step;
  }
}

TEST(LrSchedule, DegenerateLengths) {
  EXPECT_DOUBLE_EQ(learning_rate(options(Schedule::cosine, 0), 1, 1), 2e-3);
  EXPECT_DOUBLE_EQ(learning_rate(options(Schedule::linear, 3), 3, 3), 2e-3);  // all warm-up
  EXPECT_TRUE(std::isfinite(learning_rate(options(Schedule::cosine, 3), 3, 4)));
}

TEST(SettleSteps, EpochsAndSharesBecomeSteps) {
  RunConfig config;
  config.batch.global_batch_size = 16;
  config.train.max_steps = 7;
  config.optimizer.warmup_steps = 3;
  settle_steps(config, 1000);
  EXPECT_EQ(config.train.max_steps, 7) << "nothing was asked for";
  EXPECT_EQ(config.optimizer.warmup_steps, 3);
  config.train.num_train_epochs = 3;
  config.optimizer.warmup_ratio = 0.2;
  settle_steps(config, 1000);
  EXPECT_EQ(config.train.max_steps, 188);        // 3000 / 16 = 187.5
  EXPECT_EQ(config.optimizer.warmup_steps, 38);  // 37.6
  settle_steps(config, 1000);
  EXPECT_EQ(config.train.max_steps, 188) << "a run.yaml with both is read again on resume";
  config.train.num_train_epochs = 0.01;
  settle_steps(config, 1000);
  EXPECT_EQ(config.train.max_steps, 1);
}

TEST(SettleSteps, SharesThatDoublesCannotHoldAddNoStep) {
  RunConfig config;
  config.batch.global_batch_size = 1;
  config.train.num_train_epochs = 1.1;  // times 100, in doubles: above 110
  settle_steps(config, 100);
  EXPECT_EQ(config.train.max_steps, 110);
  config.train.num_train_epochs = 1;
  config.optimizer.warmup_ratio = 0.07;  // times 100, in doubles: above 7
  settle_steps(config, 100);
  EXPECT_EQ(config.optimizer.warmup_steps, 7);
  config.optimizer.warmup_ratio = 0.0700001;
  settle_steps(config, 100);
  EXPECT_EQ(config.optimizer.warmup_steps, 8);
  config.optimizer.warmup_ratio = 1e-20;
  settle_steps(config, 100);
  EXPECT_EQ(config.optimizer.warmup_steps, 1);
  // A share of a step counts as a whole one, however many there are.
  config.optimizer.warmup_ratio = 0;
  config.optimizer.warmup_steps = 0;
  config.batch.global_batch_size = 1000;
  settle_steps(config, 1'000'000'000'001);
  EXPECT_EQ(config.train.max_steps, 1'000'000'001);
}

TEST(SettleSteps, MoreWarmUpAndDecayThanStepsAreShortened) {
  RunConfig config;
  config.train.max_steps = 5;
  config.optimizer.warmup_steps = 20;
  settle_steps(config, 40);
  EXPECT_EQ(config.optimizer.warmup_steps, 5);
  EXPECT_EQ(config.optimizer.decay_steps, 0);
  config.optimizer.warmup_steps = 20;
  config.optimizer.decay_steps = 30;
  config.train.max_steps = 10;
  testing::internal::CaptureStderr();
  settle_steps(config, 40, /*warn=*/true);
  EXPECT_NE(testing::internal::GetCapturedStderr().find("shortened to 4 and 6"), std::string::npos);
  EXPECT_EQ(config.optimizer.warmup_steps, 4);
  EXPECT_EQ(config.optimizer.decay_steps, 6);
  testing::internal::CaptureStderr();
  settle_steps(config, 40, /*warn=*/true);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "") << "they fit";
  config.optimizer.warmup_steps = std::numeric_limits<int64_t>::max();
  config.optimizer.decay_steps = std::numeric_limits<int64_t>::max();
  settle_steps(config, 40);
  EXPECT_EQ(config.optimizer.warmup_steps, 5);
  EXPECT_EQ(config.optimizer.decay_steps, 5);
}

}  // namespace
}  // namespace sb
