#pragma once

// src/attention/gpu/hopper/ptx.cuh on the software device: the same functions. What only orders memory does nothing,
// since memory has one order here.

#include <cuda_bf16.h>

#include <bit>
#include <cstdint>
#include <cstring>

#include "attention/gpu/launch/exp2.cuh"
#include "softgpu/cuda/engine.h"

namespace sb::gpu {

inline uint32_t shared_address(const void* p) {
  return softgpu::window(p);
}

// --- barriers --------------------------------------------------------------------------------------------------------
inline void barrier_init(uint32_t barrier, uint32_t arrivals) {
  softgpu::mbarrier_init(barrier, arrivals);
}
inline void barrier_init_fence() {}
inline void barrier_arrive(uint32_t barrier) {
  softgpu::mbarrier_arrive(barrier, 0);
}
inline void barrier_expect(uint32_t barrier, uint32_t bytes) {
  softgpu::mbarrier_arrive(barrier, bytes);
}
inline void barrier_wait(uint32_t barrier, uint32_t parity) {
  softgpu::mbarrier_wait(barrier, parity);
}
inline void named_sync(int id, int threads) {
  softgpu::named_sync(id, threads);
}
inline void named_arrive(int id, int threads) {
  softgpu::named_arrive(id, threads);
}
inline void async_fence() {}
inline int32_t load_acquire(const int32_t* p) {
  softgpu::spin();
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}

// --- copy engine -----------------------------------------------------------------------------------------------------
inline void tensor_load(uint32_t destination, const CUtensorMap* map, int x, int y, int z, uint32_t barrier) {
  softgpu::tensor_load(destination, map, x, y, z, barrier);
}
inline void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
  softgpu::bulk_load(destination, source, bytes, barrier);
}
inline void bulk_add(float* destination, uint32_t source, uint32_t bytes) {
  softgpu::bulk_add(destination, source, bytes);
}
inline void tensor_add(const CUtensorMap* map, int x, int y, int z, uint32_t source) {
  softgpu::tensor_add(map, x, y, z, source);
}
inline void fetch_map(const CUtensorMap*) {}
inline void bulk_commit() {
  softgpu::bulk_commit();
}
template <int kLeft = 0>
inline void bulk_wait_read() {
  softgpu::bulk_wait_read(kLeft);
}
inline void bulk_wait() {
  softgpu::bulk_wait();
}

// --- registers -------------------------------------------------------------------------------------------------------
template <int kRegisters>
inline void registers_grow() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
}
template <int kRegisters>
inline void registers_shrink() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
}

inline void matrix_store(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  softgpu::store_matrices(address, {a, b, c, d});
}
inline uint4 shared_load16(uint32_t address) {
  return *static_cast<const uint4*>(softgpu::from_window(address, 16));
}
inline void shared_store8(uint32_t address, float a, float b) {
  *static_cast<float2*>(softgpu::from_window(address, 8)) = make_float2(a, b);
}
inline void shared_store16(uint32_t address, float a, float b, float c, float d) {
  *static_cast<float4*>(softgpu::from_window(address, 16)) = make_float4(a, b, c, d);
}
inline void hide(float&) {}
inline void hide(int&) {}

// --- arithmetic ------------------------------------------------------------------------------------------------------
inline float log2_fast(float x) {
  return log2f(flushed(x));
}
inline uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
  uint32_t bits;
  std::memcpy(&bits, &two, sizeof(bits));
  return bits;
}
inline float low_bf16(uint32_t pair) {
  return std::bit_cast<float>(pair << 16);
}
inline float high_bf16(uint32_t pair) {
  return std::bit_cast<float>(pair & 0xFFFF0000u);
}

}  // namespace sb::gpu
