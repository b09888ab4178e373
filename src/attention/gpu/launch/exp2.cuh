#pragma once

// CUDA files only.

namespace sb::gpu {

// 2^x within two units in the last place; numbers too small to be normal count as zero.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace sb::gpu
