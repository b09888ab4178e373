#include "tests/model/host_attention.h"

#include "device/float16.h"
#include "device/memory.h"
#include "tests/model/model_fixture.h"

namespace sb::test {
namespace {

// A tensor of the device as a view of fp32 host memory.
struct Staged {
  explicit Staged(const TensorView& tensor) : values(host_values(tensor)), view(values.data(), tensor.shape()) {}
  void store(const TensorView& to) const {
    const HostCopy copy(to);
    for (int64_t i = 0; i < to.elements(); ++i) {
      if (to.dtype() == DType::bf16)
        static_cast<uint16_t*>(copy.view().raw())[i] = bf16_from_f32(values[static_cast<size_t>(i)]);
      else
        copy.view().f32()[i] = values[static_cast<size_t>(i)];
    }
    copy.store();
  }
  std::vector<float> values;
  TensorView view;
};

}  // namespace

void HostAttention::forward(const Exec&, int layer, const AttentionShape& shape, const PackedSequences& sequences,
                            const AttentionOperands& operands, AttentionState& state, bool replay) {
  const Staged q(operands.q), k(operands.k), v(operands.v), out(operands.out), lse(operands.lse);
  Arena scratch("scratch", dense_.scratch_bytes(shape, sequences.tokens(), pool_.threads()));
  const Exec exec = {.pool = &pool_, .scratch = &scratch};
  dense_.forward(exec, layer, shape, sequences, {q.view, k.view, v.view, out.view, lse.view}, state, replay);
  out.store(operands.out);
  lse.store(operands.lse);
}

void HostAttention::backward(const Exec&, int layer, const AttentionShape& shape, const PackedSequences& sequences,
                             const AttentionOperands& operands, const AttentionGradients& gradients,
                             AttentionState& state) {
  const Staged q(operands.q), k(operands.k), v(operands.v), out(operands.out), lse(operands.lse);
  const Staged dout(gradients.dout), dq(gradients.dq), dk(gradients.dk), dv(gradients.dv);
  Arena scratch("scratch", dense_.scratch_bytes(shape, sequences.tokens(), pool_.threads()));
  const Exec exec = {.pool = &pool_, .scratch = &scratch};
  dense_.backward(exec, layer, shape, sequences, {q.view, k.view, v.view, out.view, lse.view},
                  {dout.view, dq.view, dk.view, dv.view}, state);
  dq.store(gradients.dq);
  dk.store(gradients.dk);
  dv.store(gradients.dv);
}

}  // namespace sb::test
