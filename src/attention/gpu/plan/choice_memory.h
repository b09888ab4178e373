#pragma once

#include <cstdint>

#include "attention/cpu/sparse_attention.h"
#include "attention/gpu/plan/device_plan.h"
#include "attention/gpu/select/thresholds.h"
#include "device/exec.h"

namespace sb::gpu {

// What choosing keeps on the device from one micro-batch to the next: the pairs of every layer, where only the choices
// themselves say how many they are, and the thresholds of the `mass` pattern, of every layer and length class.
class ChoiceMemory {
 public:
  ChoiceMemory(const SelectionConfig& selection, int layers);

  // Whether how many blocks are chosen is not known beforehand.
  bool counts() const { return counts_; }

  // Before the selection of a layer: gives it counters at zero and its thresholds, where it needs them.
  void begin(const Exec& exec, int layer, const ThresholdPlan* plan, SelectParams& params) const;
  // After it: adds its pairs to those of the layer, and steers its thresholds towards their quota.
  void add_pairs(int layer, const SelectParams& params, void* stream) const;
  void steer(int layer, const ThresholdPlan* plan, const SelectParams& params, void* stream) const;

  // Values of SelectParams::chosen, for ranks that steer by the sum of their choices.
  static constexpr int64_t kCounters = 2 * kLengthClasses;
  // Whether thresholds are carried from step to step; with look-ahead they are found anew each time.
  bool steers() const { return steers_; }

  // Adds the pairs counted so far to a report and starts anew. Waits for the device, as those below do.
  void take_pairs(AttentionReport& report);
  Selector::Thresholds thresholds() const;
  void set_thresholds(const Selector::Thresholds& thresholds);

 private:
  unsigned long long* pairs(int layer) const { return static_cast<unsigned long long*>(memory_.data()) + layer; }
  float* thresholds_of(int layer) const {
    return reinterpret_cast<float*>(pairs(layers_)) + int64_t{layer} * kLengthClasses;
  }

  int layers_;
  bool counts_, steers_;
  DeviceBuffer memory_;
};

}  // namespace sb::gpu
