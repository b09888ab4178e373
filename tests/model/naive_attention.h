#pragma once

#include "attention/attention.h"

namespace sb::test {

// Causal attention as the textbook has it, in fp64: the reference. Remembers what it was asked, so that tests can see
// how the model calls it.
class NaiveAttention final : public Attention {
 public:
  struct Call {
    int layer;
    bool replay;
    std::vector<int32_t> budgets;
  };

  std::unique_ptr<AttentionState> make_state() const override;
  void forward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
               const AttentionOperands& operands, AttentionState& state, bool replay) override;
  void backward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
                const AttentionOperands& operands, const AttentionGradients& gradients, AttentionState& state) override;
  int64_t scratch_bytes(const AttentionShape& shape, int64_t max_tokens, int threads) const override;
  int64_t state_bytes(const AttentionShape& shape, int64_t max_tokens) const override;

  std::vector<Call> forward_calls, backward_calls;
};

}  // namespace sb::test
