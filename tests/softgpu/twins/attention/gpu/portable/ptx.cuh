#pragma once

// src/attention/gpu/portable/ptx.cuh on the software device.

#include "softgpu/cuda/engine.h"

namespace sb::gpu {

inline uint32_t window(const void* p) {
  return softgpu::window(p);
}
inline void copy_async(void* to, const void* from, bool exists) {
  softgpu::copy_async(to, from, exists);
}
inline void copies_done() {
  softgpu::copies_wait();
}
inline void matrix_load(uint32_t (&r)[4], uint32_t address) {
  softgpu::load_matrices(r, address, false);
}
inline void matrix_load_transposed(uint32_t (&r)[4], uint32_t address) {
  softgpu::load_matrices(r, address, true);
}
inline void multiply(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
  softgpu::multiply_bf16(c, a, b0, b1);
}

}  // namespace sb::gpu
