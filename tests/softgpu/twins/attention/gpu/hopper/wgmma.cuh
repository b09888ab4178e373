#pragma once

// src/attention/gpu/hopper/wgmma.cuh on the software device: the same functions.

#include <cstdint>

#include "softgpu/cuda/engine.h"

namespace sb::gpu {

inline uint64_t tile_descriptor(uint32_t address, uint32_t chunk_bytes = 16) {
  uint64_t d = (address & 0x3FFFF) >> 4;
  d |= static_cast<uint64_t>((chunk_bytes & 0x3FFFF) >> 4) << 16;
  d |= static_cast<uint64_t>(1024 >> 4) << 32;
  d |= static_cast<uint64_t>(1) << 62;
  return d;
}
inline uint64_t further(uint64_t descriptor, uint32_t bytes) {
  return descriptor + (bytes >> 4);
}

inline void results_unused(bool from_here) {
  softgpu::results_unused(from_here);
}
inline void wgmma_fence() {}
inline void wgmma_commit() {
  softgpu::product_commit();
}
template <int kPending>
inline void wgmma_wait() {
  softgpu::product_wait(kPending);
}
template <typename T, int kCount>
inline void pin(T (&)[kCount]) {}

template <int kTransA, int kTransB, int kCount>
inline void wgmma_ss(float (&d)[kCount], uint64_t a, uint64_t b, int accumulate) {
  softgpu::product({d, nullptr, a, b, 2 * kCount, kTransA != 0, kTransB != 0, accumulate != 0, false});
}
template <int kTransB, int kCount>
inline void wgmma_rs(float (&d)[kCount], const uint32_t* a, uint64_t b, int accumulate) {
  softgpu::product({d, a, 0, b, 2 * kCount, false, kTransB != 0, accumulate != 0, false});
}
inline void wgmma_rs_half(uint32_t (&d)[16], const uint32_t* a, uint64_t b, int accumulate) {
  softgpu::product({d, a, 0, b, 64, false, false, accumulate != 0, true});
}

}  // namespace sb::gpu
