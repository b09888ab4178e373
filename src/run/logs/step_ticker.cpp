#include "run/logs/step_ticker.h"

#include <fmt/format.h>

#include <algorithm>

namespace sb {

StepTicker::StepTicker(Console& console, Seconds first)
    : console_(console), first_(first), every_(console.terminal() ? first : 6 * first), thread_([this] { watch(); }) {}

StepTicker::~StepTicker() {
  {
    const std::lock_guard lock(mutex_);
    leaving_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void StepTicker::begin(int64_t step, int64_t micro_batches) {
  const std::lock_guard lock(mutex_);
  step_ = step;
  micro_batches_ = micro_batches;
  begun_ = 0;
  running_ = true;
  begin_ = std::chrono::steady_clock::now();
  next_ = begin_ + std::chrono::duration_cast<std::chrono::nanoseconds>(first_);
  changed_.notify_one();
}

void StepTicker::micro_batch() {
  const std::lock_guard lock(mutex_);
  ++begun_;
}

void StepTicker::end() {
  const std::lock_guard lock(mutex_);
  running_ = false;
}

void StepTicker::watch() {
  std::unique_lock lock(mutex_);
  while (!leaving_) {
    if (!running_) {
      changed_.wait(lock);
      continue;
    }
    if (changed_.wait_until(lock, next_) != std::cv_status::timeout || !running_ || leaving_) continue;
    const Seconds passed = std::chrono::steady_clock::now() - begin_;
    console_.within_step(fmt::format("step {}: {} so far, micro-batch {} of {}", step_, format_duration(passed.count()),
                                     std::min(std::max<int64_t>(begun_, 1), micro_batches_), micro_batches_));
    next_ += std::chrono::duration_cast<std::chrono::nanoseconds>(every_);
  }
}

}  // namespace sb
