#pragma once

// Gathered columns in the Hopper kernels. Their rows of K and V are copied one after the other, so that the copy engine
// reads 128 of them like a key block; a step says which of the 128 the query block sees. CUDA files only.

#include <cuda_runtime.h>

#include "attention/gpu/launch/params.h"

namespace sb::gpu {

// In place of a step's offset (or diagonal), which is between them: all rows see all 128 columns; they see some; they
// see some, and not all tokens of the query block are after them.
constexpr int32_t kAllSeen = -(1 << 29), kSomeSeen = 1 << 29, kLateSeen = 1 << 30;

// Copies the rows.
void gather_rows(const GatheredColumns& gathered, const Shape& shape, const void* k, const void* v,
                 const GatheredRows& to, cudaStream_t stream);
// Finds where every key's copy is.
void find_gathered_places(const GatheredColumns& gathered, GatheredPlace* places, cudaStream_t stream);

__device__ __forceinline__ int32_t step_kind(const uint4& seen, bool late) {
  if (late) return kLateSeen;
  return (seen.x & seen.y & seen.z & seen.w) == ~0u ? kAllSeen : kSomeSeen;
}

// The last of 128 columns that is seen; some are.
__device__ __forceinline__ int last_seen(const uint4& seen) {
  if (seen.w != 0) return 127 - __clz(seen.w);
  if (seen.z != 0) return 95 - __clz(seen.z);
  return seen.y != 0 ? 63 - __clz(seen.y) : 31 - __clz(seen.x);
}

// Sums of gathered columns in the order of the accumulators that wrote them, as slots of split columns are.
struct GatheredSums {
  const GatheredList* lists;
  const GatheredPlace* places;
  const float* sums;
  int32_t lists_per_kv, parts;

  // Calls body(h, place among all columns) where key + 8 · h of the block at `position` of a sequence is a column, in
  // every list of the key/value head; `first` is the sequence's first list. The four lanes of an accumulator's row look
  // in a list each.
  template <typename Body>
  __device__ __forceinline__ void each(int first, int kv_head, int position, int key, int lane, Body body) const {
    const GatheredList& list = lists[first];
    const int blocks = (list.tokens + kBlock - 1) / kBlock;
    const GatheredPlace* place = places + list.place + kv_head * lists_per_kv * blocks + position / kBlock;
    for (int base = 0; base < lists_per_kv; base += 4) {
      const int own = base + lane % 4;
      int row[2] = {-1, -1};
      if (own < lists_per_kv) {
        const GatheredPlace& found = place[own * blocks];
        const uint32_t word = found.bits[key / 32];  // key + 8 is in it, too
        int before = found.first;
        for (int w = 0; w < key / 32; ++w) before += __popc(found.bits[w]);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int at = key % 32 + 8 * h;
          if (word >> at & 1) row[h] = before + __popc(word & ((1u << at) - 1));
        }
      }
#pragma unroll 1
      for (int i = 0; i < 4; ++i) {
        const int upper = __shfl_sync(~0u, row[0], i, 4), lower = __shfl_sync(~0u, row[1], i, 4);
        if (upper >= 0) body(0, upper);
        if (lower >= 0) body(1, lower);
      }
    }
  }

  // Row h of an accumulator of D columns gets what column `row` has; which: dK (0) or dV (1).
  template <int D, int h>
  __device__ __forceinline__ void add(float (&a)[D / 2], int row, int which, int lane) const {
    const int in_piece = row % kBlock, group = in_piece / 64, warp = in_piece % 64 / 16, r = in_piece % 16;
    for (int part = 0; part < parts; ++part) {
      const int64_t slot = static_cast<int64_t>(row / kBlock) * parts + part;
      const float2* from = reinterpret_cast<const float2*>(sums) +
                           (((slot * 2 + which) * 2 + group) * (D / 8) * 128 + warp * 32 + r % 8 * 4 + lane % 4) * 2 +
                           r / 8;
#pragma unroll
      for (int j = 0; j < D / 8; ++j) {
        const float2 x = __ldcg(from + j * 256);
        a[4 * j + 2 * h] += x.x;
        a[4 * j + 2 * h + 1] += x.y;
      }
    }
  }
};

inline GatheredSums gathered_sums(const BackwardParams& p) {
  const int list_heads = p.gathered.list_heads > 0 ? p.gathered.list_heads : p.shape.kv_heads;
  return {p.gathered.lists, p.gathered_places, p.gathered_sums, list_heads / p.shape.kv_heads, p.gathered_parts};
}

}  // namespace sb::gpu
