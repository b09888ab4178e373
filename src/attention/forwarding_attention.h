#pragma once

#include "attention/attention.h"

namespace sb {

// Attention that passes everything on to another one: what watches or changes a call derives from it.
class ForwardingAttention : public Attention {
 public:
  // `inner` must outlive this.
  explicit ForwardingAttention(Attention& inner) : inner_(inner) {}

  std::unique_ptr<AttentionState> make_state() const override { return inner_.make_state(); }
  void forward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
               const AttentionOperands& operands, AttentionState& state, bool replay) override {
    inner_.forward(exec, layer, shape, sequences, operands, state, replay);
  }
  void backward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
                const AttentionOperands& operands, const AttentionGradients& gradients,
                AttentionState& state) override {
    inner_.backward(exec, layer, shape, sequences, operands, gradients, state);
  }
  void reserve(const AttentionShape& shape, int64_t max_tokens, DType dtype,
               std::span<const std::unique_ptr<AttentionState>> states) override {
    inner_.reserve(shape, max_tokens, dtype, states);
  }
  int64_t scratch_bytes(const AttentionShape& shape, int64_t max_tokens, int threads) const override {
    return inner_.scratch_bytes(shape, max_tokens, threads);
  }
  int64_t state_bytes(const AttentionShape& shape, int64_t max_tokens) const override {
    return inner_.state_bytes(shape, max_tokens);
  }
  int64_t reserved_bytes(const AttentionShape& shape, int64_t max_tokens, DType dtype, int64_t states) const override {
    return inner_.reserved_bytes(shape, max_tokens, dtype, states);
  }
  int64_t call_bytes(const AttentionShape& shape, int64_t max_tokens, int threads) const override {
    return inner_.call_bytes(shape, max_tokens, threads);
  }
  std::string refuses_pieces() const override { return inner_.refuses_pieces(); }
  PieceBytes piece_bytes(const AttentionShape& shape, const PieceLimits& limits, int threads) const override {
    return inner_.piece_bytes(shape, limits, threads);
  }
  void reserve_pieces(const AttentionShape& shape, const PieceLimits& limits,
                      std::span<const std::unique_ptr<AttentionState>> states) override {
    inner_.reserve_pieces(shape, limits, states);
  }

 private:
  Attention& inner_;
};

}  // namespace sb
