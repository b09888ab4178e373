#pragma once

// What the kernels share: rings of barriers, the meaning of a subtile's rows, and the way of an accumulator to memory.

#include "attention/gpu/hopper/ptx.cuh"
#include "attention/gpu/launch/params.h"

namespace sb::gpu {

constexpr size_t kSharedMemory = 227 * 1024;  // a thread block's limit
constexpr float kLog2e = 1.4426950408889634f;

// A position in a ring of barriers.
struct Cursor {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance(int count) {
    if (++stage == count) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// One arrival a warp, after all its lanes have read. The sanitizer follows only lanes that arrive themselves, so for it
// every lane does.
#ifdef SB_RACECHECK
constexpr int kArrivals = 32;
#else
constexpr int kArrivals = 1;
#endif
__device__ __forceinline__ void release(uint64_t& barrier, int lane) {
  __syncwarp();
  if (lane < kArrivals) barrier_arrive(shared_address(&barrier));
}

// Row r of a subtile is head r % heads of token r / heads.
struct RowMap {
  int32_t heads, tokens, inverse;  // inverse: 2^16 / heads rounded up, exact for rows below 128
  __device__ __forceinline__ int token(int row) const { return (row * inverse) >> 16; }
};
inline RowMap row_map(const Tiling& tiling) {
  return {tiling.heads, tiling.tokens, (65536 + tiling.heads - 1) / tiling.heads};
}

// Address of the 16-byte piece `chunk` of a row in a swizzled area of 64 rows, in chunks of 64 columns.
__device__ __forceinline__ uint32_t staging_address(uint32_t staging, int row, int chunk) {
  return staging + (chunk / 8) * kSubtileRows * 128 + row * 128 + (((chunk % 8) ^ (row & 7)) * 16);
}

// An accumulator of 64 × D, row scales applied, as bf16 into a staging area. Each warp writes its own 16 rows.
template <int D>
__device__ __forceinline__ void stage_accumulator(uint32_t staging, const float (&a)[D / 2], float upper, float lower,
                                                  int warp, int lane) {
  const int row = warp * 16 + ((lane >> 3) & 1) * 8 + (lane & 7);
#pragma unroll
  for (int j = 0; j < D / 8; j += 2)
    matrix_store(staging_address(staging, row, j + (lane >> 4)), pack_bf16(a[4 * j] * upper, a[4 * j + 1] * upper),
                 pack_bf16(a[4 * j + 2] * lower, a[4 * j + 3] * lower),
                 pack_bf16(a[4 * j + 4] * upper, a[4 * j + 5] * upper),
                 pack_bf16(a[4 * j + 6] * lower, a[4 * j + 7] * lower));
}

// Adds an accumulator of 64 × D, scaled, to fp32 rows in global memory. `offset` as below; nobody else writes to them.
template <int D, typename Offset>
__device__ __forceinline__ void add_accumulator(float* out, const float (&a)[D / 2], float scale, int warp, int lane,
                                                Offset offset) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t at = offset(warp * 16 + lane / 4 + 8 * h);
    if (at < 0) continue;
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      float2* to = reinterpret_cast<float2*>(out + at + 8 * j + 2 * (lane % 4));
      const float2 sum = *to;
      *to = make_float2(sum.x + a[4 * j + 2 * h] * scale, sum.y + a[4 * j + 2 * h + 1] * scale);
    }
  }
}

// The warp's 16 staged rows to global memory, 16 bytes per lane. `offset(row)` gives the element where the row goes, or
// a negative number for padding. `zero` writes zeros instead.
template <int D, typename Offset>
__device__ __forceinline__ void store_staged(__nv_bfloat16* out, uint32_t staging, int warp, int lane, bool zero,
                                             Offset offset) {
  constexpr int kLanes = D / 8;  // lanes that hold one row
#pragma unroll
  for (int r = 0; r < 16; r += 32 / kLanes) {
    const int row = warp * 16 + r + lane / kLanes;
    const int chunk = lane % kLanes;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (!zero) value = shared_load16(staging_address(staging, row, chunk));
    const int64_t at = offset(row);
    if (at >= 0) *reinterpret_cast<uint4*>(out + at + chunk * 8) = value;
  }
}

}  // namespace sb::gpu
