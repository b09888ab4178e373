#pragma once

// The thresholds of the `mass` pattern live on the device, one of every length class and layer, so that steering them
// never waits for the host.

#include <cstdint>
#include <vector>

#include "attention/gpu/select/select.h"

namespace sb::gpu {

// Of one micro-batch, summed over its sequences of each length class and over the key/value heads.
struct ThresholdPlan {
  int64_t given[kLengthClasses] = {};   // blocks that are chosen anyhow
  int64_t wanted[kLengthClasses] = {};  // that the quota asks for besides
  float start[kLengthClasses] = {};     // threshold where none is known yet (NaN)
};

ThresholdPlan make_threshold_plan(int kv_heads, const std::vector<bool>& dense,
                                  const std::vector<SequenceTiles>& tiles);

void begin_thresholds(float* thresholds, const ThresholdPlan* plan, void* stream);
// After a selection: `chosen` as SelectParams has it.
void steer_thresholds(float* thresholds, const ThresholdPlan* plan, const unsigned long long* chosen, void* stream);
// Adds the (query, key) pairs of a selection to a sum.
void add_pairs(unsigned long long* pairs, const unsigned long long* chosen, void* stream);

}  // namespace sb::gpu
