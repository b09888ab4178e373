#pragma once

#include "attention/attention.h"

namespace sb {

// Exact causal attention over packed sequences: tiled, online softmax, never a T×T matrix.
class DenseAttention final : public Attention {
 public:
  std::unique_ptr<AttentionState> make_state() const override;
  void forward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
               const AttentionOperands& operands, AttentionState& state, bool replay) override;
  void backward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
                const AttentionOperands& operands, const AttentionGradients& gradients, AttentionState& state) override;
  int64_t scratch_bytes(const AttentionShape& shape, int64_t max_tokens, int threads) const override;
  int64_t state_bytes(const AttentionShape& shape, int64_t max_tokens) const override;
  std::string refuses_pieces() const override { return {}; }
  PieceBytes piece_bytes(const AttentionShape& shape, const PieceLimits& limits, int threads) const override;
};

}  // namespace sb
