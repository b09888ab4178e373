#include "ops/linear.h"

#include "ops/backends.h"
#include "ops/check_shape.h"
#include "ops/cuda_partial_sums.h"

namespace sb {

void linear_forward(const Exec& exec, TensorView x, TensorView weight, TensorView bias, TensorView y,
                    TensorView residual) {
  const int64_t tokens = x.dim(0), in = x.dim(1), out = weight.dim(0);
  check_operand(exec, "linear_forward", "x", x, x.dtype(), {tokens, in});
  check_operand(exec, "linear_forward", "weight", weight, x.dtype(), {out, in});
  if (!bias.empty()) check_operand(exec, "linear_forward", "bias", bias, x.dtype(), {out});
  check_operand(exec, "linear_forward", "y", y, x.dtype(), {tokens, out});
  if (!residual.empty()) check_operand(exec, "linear_forward", "residual", residual, x.dtype(), {tokens, out});
  if (exec.device == DeviceKind::cuda) return cuda::linear_forward(exec, x, weight, bias, y, residual);
  cpu::linear_forward(exec, x, weight, bias, y, residual);
}

void add(const Exec& exec, TensorView a, TensorView b, TensorView y) {
  check_operand(exec, "add", "a", a, y.dtype(), y.shape());
  check_operand(exec, "add", "b", b, y.dtype(), y.shape());
  if (exec.device == DeviceKind::cuda) return cuda::add(exec, a, b, y);
  cpu::add(exec, a, b, y);
}

void linear_backward_input(const Exec& exec, TensorView dy, TensorView weight, TensorView dx, bool accumulate) {
  const int64_t tokens = dy.dim(0), in = weight.dim(1), out = weight.dim(0);
  check_operand(exec, "linear_backward_input", "dy", dy, dy.dtype(), {tokens, out});
  check_operand(exec, "linear_backward_input", "weight", weight, dy.dtype(), {out, in});
  check_operand(exec, "linear_backward_input", "dx", dx, dy.dtype(), {tokens, in});
  if (exec.device == DeviceKind::cuda) return cuda::linear_backward_input(exec, dy, weight, dx, accumulate);
  cpu::linear_backward_input(exec, dy, weight, dx, accumulate);
}

void linear_backward_weight(const Exec& exec, TensorView x, TensorView dy, TensorView dweight, TensorView dbias,
                            bool accumulate) {
  const int64_t tokens = x.dim(0), in = x.dim(1), out = dy.dim(1);
  check_operand(exec, "linear_backward_weight", "x", x, x.dtype(), {tokens, in});
  check_operand(exec, "linear_backward_weight", "dy", dy, x.dtype(), {tokens, out});
  // Gradients are fp32 whatever the activations are.
  check_operand(exec, "linear_backward_weight", "dweight", dweight, DType::f32, {out, in});
  if (exec.device == DeviceKind::cuda)
    cuda::linear_backward_weight(exec, x, dy, dweight, accumulate);
  else
    cpu::linear_backward_weight(exec, x, dy, dweight, accumulate);
  if (!dbias.empty()) linear_backward_bias(exec, dy, dbias);
}

void linear_backward_bias(const Exec& exec, TensorView dy, TensorView dbias) {
  const int64_t tokens = dy.dim(0), out = dy.dim(1);
  check_operand(exec, "linear_backward_bias", "dy", dy, dy.dtype(), {tokens, out});
  check_operand(exec, "linear_backward_bias", "dbias", dbias, DType::f32, {out});
  if (tokens == 0) return;
  if (exec.device == DeviceKind::cuda) return cuda::linear_backward_bias(exec, dy, dbias);
  cpu::linear_backward_bias(exec, dy, dbias);
}

int64_t linear_scratch_bytes(DeviceKind device, int64_t out) {
  return device == DeviceKind::cuda ? cuda::partial_sums_bytes(out) : 0;
}

}  // namespace sb
