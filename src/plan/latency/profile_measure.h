#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "plan/latency/profile.h"
#include "plan/latency/workload.h"

namespace sb {

// A micro-batch to be timed: whole sequences, or a piece of a single one.
struct MeasuredShape {
  std::vector<int64_t> tokens;   // of every sequence
  std::vector<int64_t> budgets;  // keys per query of every sequence
  Piece piece = {};              // end 0: whole sequences
  Work work(const AttentionSpec& spec) const;
  int64_t total_tokens() const;
};

// One run of it, microseconds; the first five are of one layer.
struct MeasuredTimes {
  double linear_forward = 0, linear_backward = 0;
  double attention_forward = 0, attention_backward = 0, selection = 0;
  double head_forward = 0, head_backward = 0;
  // Pairs that were computed over those that the budgets ask for: `mass` meets them nearly.
  double pairs_share = 1;
};

// How the machine is asked; this file knows neither devices nor clocks.
struct MeasureTarget {
  std::function<MeasuredTimes(const MeasuredShape&, bool head)> parts;  // without `head` its times are 0
  // Forward + backward of the whole model, `layers` layers and head.
  std::function<double(const MeasuredShape&)> whole;
  int layers = 1;
  std::function<double(int64_t bytes)> transfer, reduction;
};

struct MeasureOptions {
  AttentionSpec spec;
  int64_t min_tokens = 64, max_tokens = 1024;
  // Other work on the machine only ever makes a measurement longer. Every shape is measured in so many passes, with all
  // others between, and the shortest counts: a disturbance seldom lasts that long.
  int passes = 2;
  int min_repeats = 3, max_repeats = 6;
  int least_runs = 3;       // even of a shape that takes long
  double spread = 0.03;     // repeats stop when the quartiles are this close to the median
  double longest_us = 3e5;  // a shape that took so long altogether is not repeated further
  int held_out = 16;
  // The target can time pieces of sequences, keys and values of the tokens before them given: what a prefix costs is
  // measured too. Otherwise it is assumed (Profile::prefix_measured).
  bool pieces = false;
  bool head_everywhere =
      true;             // false: embedding and loss on shapes of short sequences only, they depend on tokens alone
  int refinements = 6;  // shapes added where the fit is worst
  // Parts alone take other times than inside the whole (caches, power, round sizes): with this, what depends on tokens
  // alone is scaled to the wholes of the refinements.
  bool calibrate = false;
  uint64_t seed = 1;
  std::function<void(int done, int total, const std::string& what)> progress;
  // Told every measurement, and of every held-out micro-batch what was predicted and measured.
  std::function<void(const MeasuredShape&, const MeasuredTimes&)> measured;
  std::function<void(const MeasuredShape&, double predicted_us, double measured_us)> checked;
};

// Measures a grid of shapes, fits, measures again between grid points where the fit is off by more than 4 %, and
// states the error on random micro-batches that were not fitted.
Profile measure_profile(const ModelShape& shape, const MeasureTarget& target, const MeasureOptions& options);

}  // namespace sb
