#pragma once

#include <span>

#include "device/exec.h"
#include "ops/random/moment_rounding.h"

namespace sb {

struct AdamWStep {
  float learning_rate, beta1, beta2, eps, weight_decay;
  int64_t step;          // 1 for the first: bias correction
  float gradient_scale;  // clipping: gradients count times this
};

// Decoupled weight decay as in PyTorch's AdamW: p ← p·(1 - lr·wd) - lr · m̂ / (sqrt(v̂) + eps). All [n], fp32, in place;
// the moments may both be bf16: computed in fp32, and what is kept is rounded at random.
void adamw_update(const Exec& exec, const AdamWStep& step, TensorView parameters, TensorView gradients, TensorView m,
                  TensorView v);

// Elements [begin, end) of the flat buffers, with weight decay or without.
struct DecayRange {
  int64_t begin, end;
  bool decay;
  MomentPlace place = {};  // moments in bf16: which elements of the model these are
};

// The flat buffers of an update over many parameters.
struct AdamWBuffers {
  TensorView parameters, gradients;  // [n], fp32
  TensorView m, v;                   // [n], both fp32 or both bf16
  TensorView weights;  // [n] of another type: gets the new parameters, which is what the operations read; empty: none
  TensorView clip;     // from clip_by_norm(); empty: none
};

// The same for all ranges (ascending) at once; step.weight_decay counts in those with decay. With `clip`, gradients
// count times its scale besides, and nothing happens at all when the norm is not finite.
void adamw_update(const Exec& exec, const AdamWStep& step, std::span<const DecayRange> ranges,
                  const AdamWBuffers& buffers);

// Clipping that never waits for the device: clip [2] fp32 gets the factor that brings the gradients' norm down to
// max_norm (1 where it is below, or max_norm is 0), and the norm.
void clip_by_norm(const Exec& exec, TensorView gradients, double max_norm, TensorView clip);

// weights = parameters, in the weights' type: what the operations read after the parameters changed in another way.
void round_parameters(const Exec& exec, TensorView parameters, TensorView weights);

// Σ x², summed in fp64 in an order that does not depend on the number of threads. Infinite or NaN when x is.
// Waits for the device.
double squared_norm(const Exec& exec, TensorView x);
// The sum of that over the pieces, in order; waits once.
double squared_norm(const Exec& exec, std::span<const TensorView> pieces);

// Bytes of exec.scratch that the norms need.
int64_t norm_scratch_bytes(DeviceKind device);

}  // namespace sb
