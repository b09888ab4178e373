#pragma once

// The steps of selection that do not depend on how masses were computed. CUDA files only.

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "attention/gpu/launch/exp2.cuh"
#include "attention/gpu/select/select.h"

namespace sb::gpu {

// 16-bit floats as unsigned integers of the same order, two at a time and back.
__device__ __forceinline__ uint32_t ordered(uint32_t halves) {
  const uint32_t negative = ((halves >> 15) & 0x00010001u) * 0xFFFFu;
  return halves ^ (negative | 0x80008000u);
}
// The logarithm (base 2) of a mass.
__device__ __forceinline__ float mass_of(uint32_t ordered_half) {
  const uint32_t bits = (ordered_half & 0x8000u) != 0 ? ordered_half ^ 0x8000u : ~ordered_half;
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

// Of two at a time.
__device__ __forceinline__ __half2 unordered(uint32_t two) {
  const uint32_t negative = ((~two >> 15) & 0x00010001u) * 0xFFFFu;
  const uint32_t bits = two ^ (negative | 0x80008000u);
  return *reinterpret_cast<const __half2*>(&bits);
}
__device__ __forceinline__ float2 two_masses_of(uint32_t two) {
  return __half22float2(unordered(two));
}

// Before the first batch.
void begin_selection(const SelectParams& params, cudaStream_t stream);
// Row lists and map of one batch, from its masses. `early`: the kernel before it lets it start early.
void select_blocks(const SelectParams& params, const SelectBatch& batch, cudaStream_t stream, bool early);
// When all batches are done.
void finish_selection(const SelectParams& params, cudaStream_t stream);

// `mass` with look-ahead: the masses of query blocks, batch by batch; then the best pairs of each sequence and head.
void sum_tile_masses(const SelectParams& params, const SelectBatch& batch, cudaStream_t stream, bool early);
void select_most_mass(const SelectParams& params, cudaStream_t stream);

}  // namespace sb::gpu
