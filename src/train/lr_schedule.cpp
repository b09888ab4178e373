#include "train/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/errors.h"

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

}  // namespace

double learning_rate(const OptimizerOptions& options, int64_t max_steps, int64_t step) {
  SB_CHECK(step >= 1, "step {}", step);
  const double peak = options.learning_rate, minimum = peak * options.min_learning_rate_ratio;
  if (step <= options.warmup_steps) return peak * static_cast<double>(step) / static_cast<double>(options.warmup_steps);
  const auto done = static_cast<double>(step - 1);
  return minimum + (peak - minimum) * remaining(options, static_cast<double>(max_steps), done);
}

}  // namespace sb
