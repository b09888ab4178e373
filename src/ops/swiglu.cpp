#include "ops/swiglu.h"

#include "ops/backends.h"
#include "ops/check_shape.h"

namespace sb {

void swiglu_forward(const Exec& exec, TensorView gate_up, TensorView h, TensorView largest) {
  check_operand(exec, "swiglu_forward", "gate_up", gate_up, gate_up.dtype(), {gate_up.dim(0), 2 * h.dim(1)});
  check_operand(exec, "swiglu_forward", "h", h, gate_up.dtype(), {gate_up.dim(0), h.dim(1)});
  if (exec.device == DeviceKind::cuda) return cuda::swiglu_forward(exec, gate_up, h, largest);
  SB_CHECK(largest.empty(), "swiglu_forward: no largest magnitudes on the CPU");
  cpu::swiglu_forward(exec, gate_up, h);
}

void swiglu_backward(const Exec& exec, TensorView gate_up, TensorView dh, TensorView dgate_up, TensorView h) {
  const Shape wide = {dh.dim(0), 2 * dh.dim(1)};
  check_operand(exec, "swiglu_backward", "gate_up", gate_up, dh.dtype(), wide);
  check_operand(exec, "swiglu_backward", "dh", dh, dh.dtype(), {dh.dim(0), dh.dim(1)});
  check_operand(exec, "swiglu_backward", "dgate_up", dgate_up, dh.dtype(), wide);
  if (!h.empty()) check_operand(exec, "swiglu_backward", "h", h, dh.dtype(), dh.shape());
  if (exec.device == DeviceKind::cuda) return cuda::swiglu_backward(exec, gate_up, dh, dgate_up, h);
  cpu::swiglu_backward(exec, gate_up, dh, dgate_up, h);
}

}  // namespace sb
