#include "train/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "core/errors.h"
#include "core/log.h"

namespace sb {
namespace {

// How much of (peak - minimum) is left: 1 when the decay starts, 0 at its end.
double remaining(const OptimizerOptions& options, double max_steps, double done) {
  using Schedule = OptimizerOptions::Schedule;
  const double warmup = static_cast<double>(options.warmup_steps);
  const double progress = std::clamp((done - warmup) / std::max(max_steps - warmup, 1.0), 0.0, 1.0);
  switch (options.schedule) {
    case Schedule::constant:
      return 1.0;
    case Schedule::linear:
      return 1.0 - progress;
    case Schedule::cosine:
      return 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
    case Schedule::warmup_stable_decay:
      return std::clamp((max_steps - done) / std::max(static_cast<double>(options.decay_steps), 1.0), 0.0, 1.0);
  }
  throw InternalError("unknown learning rate schedule {}", static_cast<int>(options.schedule));
}

// What is a whole number but for the rounding of a decimal share and its products counts as one: 1.1 * 100 is 110.
double round_up(double value) {
  const double nearest = std::round(value);
  const double rounding = 4 * std::numeric_limits<double>::epsilon() * value;
  return std::abs(value - nearest) <= rounding ? nearest : std::ceil(value);
}

}  // namespace

void settle_steps(RunConfig& config, uint64_t sequences, bool warn) {
  TrainOptions& train = config.train;
  OptimizerOptions& optimizer = config.optimizer;
  if (train.num_train_epochs > 0) {
    SB_CHECK(sequences > 0, "training data without an end");
    const double drawn = train.num_train_epochs * static_cast<double>(sequences);
    const double steps = round_up(drawn / static_cast<double>(config.batch.global_batch_size));
    SB_USER_CHECK(steps < 1e15, "train.num_train_epochs: {} passes over {} sequences are too many; lower it",
                  train.num_train_epochs, sequences);
    train.max_steps = std::max<int64_t>(1, static_cast<int64_t>(steps));
  }
  if (optimizer.warmup_ratio > 0)
    optimizer.warmup_steps =
        static_cast<int64_t>(round_up(optimizer.warmup_ratio * static_cast<double>(train.max_steps)));
  // In doubles: the options may be as large as an integer gets.
  const double asked = static_cast<double>(optimizer.warmup_steps) + static_cast<double>(optimizer.decay_steps);
  if (asked <= static_cast<double>(train.max_steps)) return;
  const auto warmup =
      static_cast<int64_t>(static_cast<double>(optimizer.warmup_steps) / asked * static_cast<double>(train.max_steps));
  const int64_t decay = optimizer.decay_steps > 0 ? train.max_steps - warmup : 0;
  if (warn)
    log::warning("the run has {} steps, fewer than its warmup of {} plus decay of {}: shortened to {} and {}",
                 train.max_steps, optimizer.warmup_steps, optimizer.decay_steps, warmup, decay);
  optimizer.warmup_steps = warmup;
  optimizer.decay_steps = decay;
}

double learning_rate(const OptimizerOptions& options, int64_t max_steps, int64_t step) {
  SB_CHECK(step >= 1, "step {}", step);
  const double peak = options.learning_rate, minimum = peak * options.min_learning_rate_ratio;
  if (step <= options.warmup_steps) return peak * static_cast<double>(step) / static_cast<double>(options.warmup_steps);
  const auto done = static_cast<double>(step - 1);
  return minimum + (peak - minimum) * remaining(options, static_cast<double>(max_steps), done);
}

}  // namespace sb
