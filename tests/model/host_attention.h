#pragma once

#include "attention/cpu/dense_attention.h"
#include "core/thread_pool.h"

namespace sb::test {

// Dense attention of the CPU for a stage on CUDA: brings the operands to the host and the results back. What the rest
// of the stage is tested with, in any type and for any size of head.
class HostAttention final : public Attention {
 public:
  std::unique_ptr<AttentionState> make_state() const override { return std::make_unique<AttentionState>(); }
  void forward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
               const AttentionOperands& operands, AttentionState& state, bool replay) override;
  void backward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
                const AttentionOperands& operands, const AttentionGradients& gradients, AttentionState& state) override;
  int64_t scratch_bytes(const AttentionShape&, int64_t, int) const override { return 0; }
  int64_t state_bytes(const AttentionShape&, int64_t) const override { return 0; }

 private:
  DenseAttention dense_;
  ThreadPool pool_{2};
};

}  // namespace sb::test
