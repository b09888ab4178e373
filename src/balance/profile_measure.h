#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "balance/profile.h"
#include "balance/workload.h"

namespace sb {

// A micro-batch to be timed.
struct MeasuredShape {
  std::vector<int64_t> tokens;   // of every sequence
  std::vector<int64_t> budgets;  // keys per query of every sequence
  Work work(const AttentionSpec& spec) const;
  int64_t total_tokens() const;
};

// One run of it, microseconds; the first five are of one layer.
struct MeasuredTimes {
  double linear_forward = 0, linear_backward = 0;
  double attention_forward = 0, attention_backward = 0, selection = 0;
  double head_forward = 0, head_backward = 0;
};

// How the machine is asked; this file knows neither devices nor clocks.
struct MeasureTarget {
  std::function<MeasuredTimes(const MeasuredShape&)> parts;
  // Forward + backward of the whole model, `layers` layers and head.
  std::function<double(const MeasuredShape&)> whole;
  int layers = 1;
  std::function<double(int64_t bytes)> transfer, reduction;
};

struct MeasureOptions {
  AttentionSpec spec;
  int64_t max_tokens = 1024;
  int min_repeats = 3, max_repeats = 6;
  double spread = 0.03;     // repeats stop when the quartiles are this close to the median
  double longest_us = 3e5;  // a shape that took so long altogether is not repeated further
  int held_out = 16;
  int refinements = 6;  // shapes added where the fit is worst
  uint64_t seed = 1;
  std::function<void(int done, int total, const std::string& what)> progress;
};

// Measures a grid of shapes twice, fits, measures again between grid points where the fit is off by more than 4 %, and
// states the error on random micro-batches that were not fitted.
Profile measure_profile(const ModelShape& shape, const MeasureTarget& target, const MeasureOptions& options);

}  // namespace sb
