#include "attention/gpu/plan/choice_memory.h"

#include <cmath>
#include <limits>
#include <vector>

#include "device/cuda.h"

namespace sb::gpu {

ChoiceMemory::ChoiceMemory(const SelectionConfig& selection, int layers)
    : layers_(layers),
      counts_(selection.pattern == SelectionPattern::topp || selection.pattern == SelectionPattern::mass ||
              selection.pattern == SelectionPattern::vertical_slash),
      steers_(selection.pattern == SelectionPattern::mass && selection.order == SelectionOrder::causal) {
  if (!counts_) return;
  const int64_t bytes = layers * static_cast<int64_t>(sizeof(unsigned long long) + kLengthClasses * sizeof(float));
  memory_.ensure("attention counts", bytes);
  cuda::zero_and_wait(memory_.data(), bytes);
  set_thresholds({});
}

void ChoiceMemory::begin(const Exec& exec, int layer, const ThresholdPlan* plan, SelectParams& params) const {
  if (counts_) {
    params.chosen = exec.scratch->allocate_array<unsigned long long>(kCounters);
    cuda::zero(exec.stream, params.chosen, kCounters * static_cast<int64_t>(sizeof(unsigned long long)));
  }
  if (steers_) {
    params.thresholds = thresholds_of(layer);
    begin_thresholds(thresholds_of(layer), plan, exec.stream);
  }
}

void ChoiceMemory::add_pairs(int layer, const SelectParams& params, void* stream) const {
  if (counts_) gpu::add_pairs(pairs(layer), params.chosen, stream);
}

void ChoiceMemory::steer(int layer, const ThresholdPlan* plan, const SelectParams& params, void* stream) const {
  if (steers_) steer_thresholds(thresholds_of(layer), plan, params.chosen, stream);
}

void ChoiceMemory::take_pairs(AttentionReport& report) {
  if (!counts_) return;
  std::vector<unsigned long long> counted(static_cast<size_t>(layers_));
  const auto bytes = static_cast<int64_t>(counted.size() * sizeof(counted[0]));
  cuda::copy_and_wait(memory_.data(), counted.data(), bytes);
  cuda::zero_and_wait(memory_.data(), bytes);
  for (size_t layer = 0; layer < counted.size(); ++layer)
    report.layers[layer].pairs += static_cast<int64_t>(counted[layer]);
}

Selector::Thresholds ChoiceMemory::thresholds() const {
  Selector::Thresholds found;
  if (!steers_) return found;
  std::vector<float> values(static_cast<size_t>(layers_) * kLengthClasses);
  cuda::copy_and_wait(thresholds_of(0), values.data(), static_cast<int64_t>(values.size() * sizeof(float)));
  for (size_t i = 0; i < values.size(); ++i)
    if (!std::isnan(values[i]))
      found[{static_cast<int>(i / kLengthClasses), static_cast<int>(i % kLengthClasses)}] = values[i];
  return found;
}

void ChoiceMemory::set_thresholds(const Selector::Thresholds& thresholds) {
  if (!steers_) return;
  std::vector<float> values(static_cast<size_t>(layers_) * kLengthClasses, std::numeric_limits<float>::quiet_NaN());
  for (const auto& [place, value] : thresholds)
    if (place.first < layers_ && place.second < kLengthClasses)
      values[static_cast<size_t>(place.first) * kLengthClasses + static_cast<size_t>(place.second)] = value;
  cuda::copy_and_wait(values.data(), thresholds_of(0), static_cast<int64_t>(values.size() * sizeof(float)));
}

}  // namespace sb::gpu
