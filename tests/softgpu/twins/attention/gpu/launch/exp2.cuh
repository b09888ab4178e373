#pragma once

// src/attention/gpu/launch/exp2.cuh on the software device: exact, but for numbers too small to be normal.

#include <cmath>
#include <limits>

namespace sb::gpu {

inline float flushed(float x) {
  return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.f, x) : x;
}
inline float exp2_fast(float x) {
  return flushed(exp2f(flushed(x)));
}

}  // namespace sb::gpu
