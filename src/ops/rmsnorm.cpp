#include "ops/rmsnorm.h"

#include "ops/backends.h"
#include "ops/check_shape.h"
#include "ops/cuda_partial_sums.h"

namespace sb {

void rmsnorm_forward(const Exec& exec, TensorView x, TensorView weight, float eps, TensorView y, TensorView rstd) {
  const int64_t width = last_dim(x);
  SB_CHECK(width > 0, "rmsnorm_forward: rows of {} elements", width);
  check_operand(exec, "rmsnorm_forward", "x", x, x.dtype(), x.shape());
  check_operand(exec, "rmsnorm_forward", "weight", weight, x.dtype(), {width});
  check_operand(exec, "rmsnorm_forward", "y", y, x.dtype(), x.shape());
  check_operand(exec, "rmsnorm_forward", "rstd", rstd, DType::f32, {x.elements() / width});
  if (exec.device == DeviceKind::cuda) return cuda::rmsnorm_forward(exec, x, weight, eps, y, rstd);
  cpu::rmsnorm_forward(exec, x, weight, eps, y, rstd);
}

void rmsnorm_backward(const Exec& exec, TensorView x, TensorView weight, TensorView rstd, TensorView dy, TensorView dx,
                      bool accumulate, TensorView dweight) {
  const int64_t width = last_dim(x);
  SB_CHECK(width > 0, "rmsnorm_backward: rows of {} elements", width);
  check_operand(exec, "rmsnorm_backward", "x", x, x.dtype(), x.shape());
  check_operand(exec, "rmsnorm_backward", "weight", weight, x.dtype(), {width});
  check_operand(exec, "rmsnorm_backward", "rstd", rstd, DType::f32, {x.elements() / width});
  check_operand(exec, "rmsnorm_backward", "dy", dy, x.dtype(), x.shape());
  check_operand(exec, "rmsnorm_backward", "dx", dx, x.dtype(), x.shape());
  if (!dweight.empty()) check_operand(exec, "rmsnorm_backward", "dweight", dweight, DType::f32, {width});
  SB_CHECK(!accumulate || dx.raw() != dy.raw(), "rmsnorm_backward: dx cannot both alias dy and accumulate");
  if (exec.device == DeviceKind::cuda) {
    return cuda::rmsnorm_backward(exec, x, weight, rstd, dy, dx, accumulate, dweight);
  }
  cpu::rmsnorm_backward(exec, x, weight, rstd, dy, dx, accumulate, dweight);
}

int64_t rmsnorm_scratch_bytes(DeviceKind device, int64_t width) {
  return device == DeviceKind::cuda ? cuda::partial_sums_bytes(width) : 0;
}

}  // namespace sb
