#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "attention/cpu/sparse_attention.h"
#include "attention/gpu/plan/device_plan.h"
#include "attention/gpu/plan/given_selection.h"
#include "attention/select/step_selection.h"
#include "device/exec.h"
#include "device/memory.h"

namespace sb::gpu {

// What selecting keeps on the device from one micro-batch to the next: the pairs of every layer, where only the
// selections themselves say how many they are, the blocks selected in every class of the `mass` pattern, the planes
// that blocks are judged by, and the energies of channels that later ones are selected by. Queued work changes them;
// only what takes them waits.
class SelectMemory {
 public:
  SelectMemory(const SelectionConfig& selection, int layers);

  // Memory that depends on the shape; otherwise it is taken when it is first needed.
  void reserve(const AttentionShape& shape);
  int64_t reserved_bytes(const AttentionShape& shape) const;

  // Whether how many blocks are selected is not known beforehand.
  bool counts() const { return counts_; }
  // Whether blocks of the layer can be judged.
  bool ready(int layer) const { return step_.ready(layer); }
  void use(const LearnedSelection& learned);
  // For the forward at hand: what is given goes before what was learned, and what is seen is left there instead of
  // here. Null: nothing is given.
  void give(const GivenSelection* given) { given_ = given; }

  // Before the selection of a layer: gives it counters at zero, its thresholds and planes, where it needs them.
  void begin(const Exec& exec, int layer, const AttentionShape& shape, const SelectPlan& plan, SelectParams& params);
  // After it: adds what was selected. `classes`: of the plan, in device memory.
  void add_counts(int layer, const SelectPlan& plan, const int32_t* classes, const SelectParams& params, void* stream);

  // The planes of a layer, where blocks are judged by them. Params: of the selection or of coverage.
  template <typename Params>
  void set_planes(const Exec& exec, int layer, const AttentionShape& shape, Params& params) {
    if (channels_ == 0) return;
    const uint32_t* words = planes(exec, layer, shape);
    params.planes = reinterpret_cast<const int32_t*>(words);
    params.plane_scales = reinterpret_cast<const float*>(words + int64_t{shape.kv_heads} * channels_);
    if constexpr (requires { params.plane_key_means; }) params.plane_key_means = params.plane_scales + shape.kv_heads;
    params.plane_channels = channels_;
  }
  // Adds the energies of the sampled tokens, for planes to come.
  void observe(const Exec& exec, int layer, const AttentionShape& shape, const AttentionOperands& operands,
               const int32_t* samples, int32_t sample_count);

  // Adds the pairs counted so far to a report and starts anew. Waits for the stream that counted, as the next does.
  void take_pairs(AttentionReport& report);
  // What was seen so far; starts anew.
  SelectionObservations take_observations();

 private:
  struct Known {
    int64_t given = 0, wanted = 0;  // blocks of a class, from the plans
  };
  unsigned long long* pairs(int layer) const { return static_cast<unsigned long long*>(counters_.data()) + layer; }
  unsigned long long* blocks(int layer) const { return pairs(layers_) + int64_t{layer} * classes(); }
  int classes() const { return learns_ ? kMassClasses : 1; }
  int64_t counter_bytes() const;
  int64_t sum_bytes(const AttentionShape& shape) const { return layers_ * sum_values(shape) * int64_t{sizeof(double)}; }
  void reserve_taken(int64_t bytes);
  int64_t plane_words(const AttentionShape& shape) const;  // of one layer
  // In device memory: channels [kv_heads, channels], then scales [kv_heads], then means of keys [kv_heads, channels].
  const uint32_t* planes(const Exec& exec, int layer, const AttentionShape& shape);
  static int64_t sum_values(const AttentionShape& shape) { return int64_t{3} * shape.kv_heads * shape.head_dim; }
  double* sums(int layer) const { return static_cast<double*>(sums_.data()) + layer * sum_values(shape_); }
  void write_given_counts(const SelectPlan& plan, const SelectParams& params, void* stream) const;
  void take_masses(SelectionObservations& seen);
  void take_sums(SelectionObservations& seen);
  // What the stream left there, which is zero from then on; in host memory until the next call.
  template <typename T>
  std::span<const T> take_values(void* stream, T* from, int64_t count);

  const int layers_, channels_;  // channels of a head that are judged by; 0: not by planes
  const bool counts_, learns_;   // learns: thresholds of `mass`
  StepSelection step_;
  DeviceBuffer counters_, planes_, sums_;
  std::optional<void*> counted_on_, observed_on_;  // the streams that changed them last; none: nobody did
  HostMemory taken_;
  int64_t taken_bytes_ = 0;
  AttentionShape shape_{};          // of the memory of planes
  std::vector<bool> put_;           // layers whose planes are on the device
  std::map<MassKey, Known> known_;  // since the observations were taken
  std::vector<int64_t> sampled_;    // tokens of every layer, likewise
  const GivenSelection* given_ = nullptr;
};

}  // namespace sb::gpu
