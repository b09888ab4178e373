#pragma once

#include <array>
#include <vector>

#include "attention/forwarding_attention.h"
#include "device/event.h"

namespace sb {

// Attention with the device's time of every call, selection included, for its share of a step.
class WatchedAttention final : public ForwardingAttention {
 public:
  enum Kind { kForward, kRecomputed, kBackward, kKinds };
  explicit WatchedAttention(Attention& inner) : ForwardingAttention(inner) {}

  void forward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
               const AttentionOperands& operands, AttentionState& state, bool replay) override {
    const DeviceEvent begin = now(exec);
    ForwardingAttention::forward(exec, layer, shape, sequences, operands, state, replay);
    spans_[replay || sequences.again ? kRecomputed : kForward].push_back({begin, now(exec)});
  }
  void backward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
                const AttentionOperands& operands, const AttentionGradients& gradients,
                AttentionState& state) override {
    const DeviceEvent begin = now(exec);
    ForwardingAttention::backward(exec, layer, shape, sequences, operands, gradients, state);
    spans_[kBackward].push_back({begin, now(exec)});
  }

  // Forgets what was measured so far.
  void restart() {
    for (auto& spans : spans_) spans.clear();
  }
  // Of all calls since, when the device has passed them.
  std::array<double, kKinds> milliseconds() const {
    std::array<double, kKinds> sums{};
    for (int kind = 0; kind < kKinds; ++kind)
      for (const Span& span : spans_[kind]) sums[kind] += DeviceEvent::milliseconds_between(span.begin, span.end);
    return sums;
  }

 private:
  struct Span {
    DeviceEvent begin, end;
  };
  static DeviceEvent now(const Exec& exec) {
    DeviceEvent event(exec.device);
    event.record(exec);
    return event;
  }
  std::array<std::vector<Span>, kKinds> spans_;
};

}  // namespace sb
