#pragma once

#include "device/exec.h"

namespace sb {

struct AdamWStep {
  float learning_rate, beta1, beta2, eps, weight_decay;
  int64_t step;          // 1 for the first: bias correction
  float gradient_scale;  // clipping: gradients count times this
};

// Decoupled weight decay as in PyTorch's AdamW: p ← p·(1 - lr·wd) - lr · m̂ / (sqrt(v̂) + eps). All [n], fp32, in place.
void adamw_update(const Exec& exec, const AdamWStep& step, TensorView parameters, TensorView gradients, TensorView m,
                  TensorView v);

// Σ x², summed in fp64 in an order that does not depend on the number of threads. Infinite or NaN when x is.
double squared_norm(const Exec& exec, TensorView x);

}  // namespace sb
