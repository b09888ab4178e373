#pragma once

#include "ops/cuda/vector.cuh"

namespace sb::cuda {

template <typename T>
__device__ float sigmoid(float x) {
  if constexpr (sizeof(T) == 4) {
    return 1.0f / (1.0f + expf(-x));
  } else {
    return __fdividef(1.0f, 1.0f + __expf(-x));
  }
}

// gate and up become their gradients, from the gradient g of silu(gate) · up, which is returned.
template <typename T>
__device__ float swiglu_gradient(float& gate, float& up, float g) {
  const float s = sigmoid<T>(gate), silu = gate * s, inner = silu * up;
  gate = g * up * (s * (1.0f + gate * (1.0f - s)));
  up = g * silu;
  return inner;
}

}  // namespace sb::cuda
