#pragma once

#include <cstdint>
#include <filesystem>
#include <set>

#include "attention/forwarding_attention.h"

namespace sb {

// Saves the block lists that attention selected in training, once for every layer: of the first micro-batch with lists
// from a step on. `simulate --ring-index` shows how evenly they would spread over many ranks.
class IndexDump final : public ForwardingAttention {
 public:
  // `inner` is SparseAttention or its CUDA twin and must outlive this.
  IndexDump(Attention& inner, DeviceKind device, std::filesystem::path folder, int64_t from_step)
      : ForwardingAttention(inner), device_(device), folder_(std::move(folder)), from_step_(from_step) {}

  // Only what runs between these two counts: neither validation nor earlier steps.
  void begin_step(int64_t step) { listens_ = step >= from_step_; }
  void end_step() { listens_ = false; }

  void forward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
               const AttentionOperands& operands, AttentionState& state, bool replay) override;

  // Where the lists of a layer go: a reader finds a whole file or none.
  std::filesystem::path path(int layer) const;

 private:
  const DeviceKind device_;
  const std::filesystem::path folder_;
  const int64_t from_step_;
  bool listens_ = false;
  std::set<int> saved_;  // layers
};

}  // namespace sb
