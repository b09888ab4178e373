#include "ops/adamw.h"

#include "ops/backends.h"
#include "ops/check_shape.h"

namespace sb {

void adamw_update(const Exec& exec, const AdamWStep& step, TensorView parameters, TensorView gradients, TensorView m,
                  TensorView v) {
  SB_CHECK(step.step >= 1, "adamw_update: step {}; the first is 1", step.step);
  const Shape flat = {parameters.elements()};
  check_operand(exec, "adamw_update", "parameters", parameters, DType::f32, flat);
  check_operand(exec, "adamw_update", "gradients", gradients, DType::f32, flat);
  check_operand(exec, "adamw_update", "m", m, DType::f32, flat);
  check_operand(exec, "adamw_update", "v", v, DType::f32, flat);
  if (exec.device == DeviceKind::cuda) return cuda::adamw_update(exec, step, parameters, gradients, m, v);
  cpu::adamw_update(exec, step, parameters, gradients, m, v);
}

double squared_norm(const Exec& exec, TensorView x) {
  check_operand(exec, "squared_norm", "x", x, DType::f32, x.shape());
  if (exec.device == DeviceKind::cuda) return cuda::squared_norm(exec, x);
  return cpu::squared_norm(exec, x);
}

}  // namespace sb
