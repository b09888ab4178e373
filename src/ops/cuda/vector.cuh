#pragma once

// What the CUDA kernels share: 16-byte accesses, reductions, the choice of the element type.

#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>

#include "core/tensor.h"
#include "device/cuda_check.h"
#include "device/cuda_floats.cuh"
#include "device/exec.h"
#include "device/kernel.cuh"

namespace sb::cuda {

using bf16 = __nv_bfloat16;

// Elements in 16 bytes.
template <typename T>
constexpr int kVector = 16 / sizeof(T);

// N elements at once (N · sizeof(T) ≤ 16, aligned to that) as fp32.
template <int N, typename T>
__device__ inline void load(const T* from, float (&to)[N]) {
  struct alignas(sizeof(T) * N) Pack {
    T values[N];
  };
  const Pack pack = *reinterpret_cast<const Pack*>(from);
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = to_float(pack.values[i]);
}
template <int N, typename T>
__device__ inline void store(T* to, const float (&from)[N]) {
  struct alignas(sizeof(T) * N) Pack {
    T values[N];
  };
  Pack pack;
#pragma unroll
  for (int i = 0; i < N; ++i) pack.values[i] = from_float<T>(from[i]);
  *reinterpret_cast<Pack*>(to) = pack;
}
// N fp32 elements, in pieces of at most 16 bytes.
template <int N>
__device__ inline void load_f32(const float* from, float (&to)[N]) {
  constexpr int kPiece = N < 4 ? N : 4;
#pragma unroll
  for (int i = 0; i < N; i += kPiece) load<kPiece>(from + i, reinterpret_cast<float(&)[kPiece]>(to[i]));
}
template <int N>
__device__ inline void store_f32(float* to, const float (&from)[N]) {
  constexpr int kPiece = N < 4 ? N : 4;
#pragma unroll
  for (int i = 0; i < N; i += kPiece) store<kPiece>(to + i, reinterpret_cast<const float(&)[kPiece]>(from[i]));
}

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// The bits of a magnitude after rounding to T; they are in the order of the magnitudes, what is no number above all.
template <typename T>
__device__ inline uint32_t magnitude_bits(float x) {
  return __float_as_uint(to_float(from_float<T>(x))) & 0x7fffffffu;
}

// *largest = max(*largest, bits of all threads of the block), which all call; blockDim.x is a multiple of 32, at most
// 1024. The result does not depend on the order of blocks, and few of them have to write.
__device__ inline void note_largest(uint32_t bits, uint32_t* largest) {
  SB_SHARED(uint32_t, of_warps, [32]);
  bits = __reduce_max_sync(0xffffffffu, bits);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = bits;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  bits = threadIdx.x < blockDim.x / 32 ? of_warps[threadIdx.x] : 0;
  bits = __reduce_max_sync(0xffffffffu, bits);
  if (threadIdx.x == 0 && bits > *static_cast<volatile uint32_t*>(largest)) atomicMax(largest, bits);
}

// exp: to the last bits in fp32 mode, fast where the result is rounded to bf16.
template <typename T>
__device__ inline float exp_for(float x) {
  if constexpr (sizeof(T) == 4) {
    return expf(x);
  } else {
    return __expf(x);
  }
}

// Calls body with a value of the element type.
template <typename Body>
void with_type(DType dtype, const char* operation, const Body& body) {
  switch (dtype) {
    case DType::f32:
      return body(float{});
    case DType::bf16:
      return body(bf16{});
    default:
      throw InternalError("{}: no kernel for {}", operation, dtype_name(dtype));
  }
}

template <typename T>
T* data(const TensorView& tensor) {
  return static_cast<T*>(tensor.raw());
}

// Rows of `width` elements at these addresses can be read and written 16 bytes at a time.
template <typename T>
bool vectors_fit(int64_t width, std::initializer_list<const void*> pointers) {
  if (width % kVector<T> != 0) return false;
  for (const void* pointer : pointers) {
    if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) return false;
  }
  return true;
}

inline cudaStream_t stream_of(const Exec& exec) {
  return static_cast<cudaStream_t>(exec.stream);
}

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Blocks for `work` pieces in loops over the grid.
inline unsigned grid_for(int64_t work) {
  constexpr int64_t kMost = int64_t{1} << 20;
  return static_cast<unsigned>(work < kMost ? work : kMost);
}

}  // namespace sb::cuda
