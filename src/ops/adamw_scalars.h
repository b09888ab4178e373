#pragma once

// Plain data only: the inner loops that are compiled once per instruction set include this.

namespace sb {

struct AdamWStep;

// What every element's update needs of a step, the same on every device.
struct AdamWScalars {
  float gradient_scale, beta1, one_minus_beta1, beta2, one_minus_beta2;
  float decay;      // 1 - lr·weight_decay
  float step_size;  // lr / (1 - beta1^step)
  float inverse_sqrt_correction2;
  float eps;
};
AdamWScalars adamw_scalars(const AdamWStep& step);

}  // namespace sb
