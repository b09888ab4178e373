#pragma once

#include <fmt/core.h>

#include <cstdint>

#include "cli/progress.h"

namespace sb {

// Counts the steps of all policies and layouts that a simulation tries.
class StepProgress {
 public:
  explicit StepProgress(int64_t steps) : steps_(steps) {}
  void step() {
    ++done_;
    progress_.show(static_cast<double>(done_) / static_cast<double>(steps_),
                   fmt::format("{} of {} steps", done_, steps_));
  }
  // For the rows that are printed in between.
  void clear() { progress_.clear(); }

 private:
  int64_t steps_, done_ = 0;
  Progress progress_;
};

}  // namespace sb
