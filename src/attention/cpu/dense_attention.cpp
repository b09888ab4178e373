#include "attention/cpu/dense_attention.h"

#include "attention/cpu/walk.h"

namespace sb {

std::unique_ptr<AttentionState> DenseAttention::make_state() const {
  return std::make_unique<AttentionState>();
}

void DenseAttention::forward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
                             const AttentionOperands& operands, AttentionState& state, bool replay) {
  cpu_attention_forward(exec, shape, sequences, operands, nullptr);
}

void DenseAttention::backward(const Exec& exec, int layer, const AttentionShape& shape,
                              const PackedSequences& sequences, const AttentionOperands& operands,
                              const AttentionGradients& gradients, AttentionState& state) {
  cpu_attention_backward(exec, shape, sequences, operands, gradients, nullptr);
}

int64_t DenseAttention::scratch_bytes(const AttentionShape& shape, int64_t max_tokens, int threads) const {
  return cpu_attention_scratch_bytes(shape, max_tokens, threads);
}

int64_t DenseAttention::state_bytes(const AttentionShape& shape, int64_t max_tokens) const {
  return 0;
}

PieceBytes DenseAttention::piece_bytes(const AttentionShape& shape, const PieceLimits& limits, int threads) const {
  return {.scratch = cpu_piece_scratch_bytes(shape, limits.max_tokens, limits.longest, threads),
          .page = cpu_page_bytes(shape)};
}

}  // namespace sb
