#pragma once

// The steps of selection that do not depend on how masses were computed. CUDA files only.

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "attention/cuda/select.h"

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

// Before the first batch.
void begin_choices(const SelectParams& params, cudaStream_t stream);
// Row lists and map of one batch, from its masses. `early`: the kernel before it lets it start early.
void choose_blocks(const SelectParams& params, const SelectBatch& batch, cudaStream_t stream, bool early);
// When all batches are done.
void finish_choices(const SelectParams& params, cudaStream_t stream);

// `mass` with look-ahead: the masses of query blocks, batch by batch; then the best pairs of each sequence and head.
void sum_tile_masses(const SelectParams& params, const SelectBatch& batch, cudaStream_t stream);
void choose_most_mass(const SelectParams& params, cudaStream_t stream);

}  // namespace sb::gpu
