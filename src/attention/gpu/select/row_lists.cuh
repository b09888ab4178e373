#pragma once

// From the selections of a query block to its row list and its line in the map. CUDA files only.

#include <algorithm>

#include "attention/gpu/launch/check.cuh"
#include "attention/gpu/select/select_steps.cuh"
#include "device/kernel.cuh"

namespace sb::gpu {

constexpr uint8_t kUnselected = 255;
constexpr int kWarps = 4;  // query blocks of a thread block

// What the kernels that select are told.
struct SelectArguments {
  const SelectItem* items;
  int32_t count;
  int32_t query_block, select_block, expand;  // expand: log2 of the key blocks of the lists in one of the selection
  int32_t warp_bytes;                         // of shared memory
  bool lookahead;
  float coverage;
  const float* thresholds;
  uint16_t* masses;
  int32_t slices;
  int64_t slice_masses;
  uint32_t* entries;
  uint8_t* map;
  unsigned long long* selected;

  // Of two neighbouring blocks, the largest of the slices.
  __device__ __forceinline__ uint32_t two_masses(int64_t at) const {
    uint32_t two = *reinterpret_cast<const uint32_t*>(masses + at);
#pragma unroll 1
    for (int slice = 1; slice < slices; ++slice)
      two = __vmaxu2(two, *reinterpret_cast<const uint32_t*>(masses + slice * slice_masses + at));
    return two;
  }
  // `mass`: the least that is worth selecting, in the upper half of a word; never zero.
  __device__ __forceinline__ uint32_t worth(int sequence) const {
    constexpr float kToLog2 = 1.4426950408889634f;
    const __half limit = __float2half_rn(thresholds[sequence] * kToLog2);
    return max(ordered(__half_as_ushort(limit)) & 0xFFFFu, 1u) << 16;
  }
};

// Of shared memory, what a thread block that selects has besides: the counts of its warps, see add_counted().
constexpr int kCountedBytes = 128;
inline int select_memory(const SelectParams& p) {
  return p.shared_memory > 0 ? p.shared_memory : most_shared_memory() - kCountedBytes;
}
// Query blocks of a thread block: of very long sequences shared memory holds fewer, of the longest at least one,
// whatever GPU it is (a byte per block).
inline int select_warps(const SelectParams& p, int warp_bytes) {
  const int warps = std::min(kWarps, select_memory(p) / std::max(warp_bytes, 1));
  if (warps == 0) throw_unsupported("key blocks to select among", p.max_competing);
  return warps;
}

inline SelectArguments select_arguments(const SelectParams& p, int item_begin, int item_count, int warp_bytes) {
  return {p.items + item_begin,
          item_count,
          p.query_block,
          p.select_block,
          p.select_block == p.block ? 0 : 1,
          warp_bytes,
          p.lookahead,
          p.coverage,
          p.thresholds,
          p.masses,
          p.slices,
          p.slice_masses,
          p.row_entries,
          p.map,
          p.selected};
}

// What was selected, forced blocks included.
struct Counted {
  unsigned blocks;
  unsigned long long pairs;  // (query, key)
};

// `first` is null where nothing was to select. What it returns, where selected blocks are counted, lane 0 has.
__device__ inline Counted write_row_list(const SelectArguments& args, const SelectItem& item, const uint8_t* first,
                                         int lane) {
  const auto selected_by = [&](int j) -> uint8_t {
    if (j >= item.competing || item.everything) return 0;
    if (first != nullptr) return first[j];
    return j < item.sinks || j >= item.competing - item.local ? 0 : kUnselected;
  };
  int at = item.list_begin, base = 0;
  unsigned blocks = 0, rows = 0;  // selected among the competing, and the tokens before the first that sees them
  // Where selections were made, four blocks per lane at a time. What the map gets beyond the visible ones nobody looks
  // at.
  if (first != nullptr && args.expand == 0)
    for (; base < item.visible; base += 128) {
      const int j = base + 4 * lane;
      uint32_t by = 0xFFFFFFFFu;
      if (j < item.visible) {
        by = j < item.competing ? *reinterpret_cast<const uint32_t*>(first + j) : 0;
        const int left = item.competing - j;  // of these four
        if (args.selected != nullptr && left > 0) {
          const uint32_t selected = __vcmpne4(by, ~0u) & (left < 4 ? (1u << (8 * left)) - 1 : ~0u);
          blocks += __popc(selected) / 8;
          rows = __dp4a(by & selected, 0x01010101u, rows);
        }
        if (left > 0 && left < 4) by &= (1u << (8 * left)) - 1;
        *reinterpret_cast<uint32_t*>(args.map + item.map + j) = by;
        if (j + 4 > item.visible) by |= ~0u << (8 * (item.visible - j));
      }
      int before = at, own = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const uint32_t kept = __ballot_sync(~0u, (by >> (8 * e) & 0xFF) != kUnselected);
        before += __popc(kept & ((1u << lane) - 1));
        at += __popc(kept);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const uint32_t selected = by >> (8 * e) & 0xFF;
        if (selected != kUnselected) args.entries[before + own++] = list_entry(j + e, selected);
      }
    }
  for (; base < item.visible; base += 32) {
    const int j = base + lane;
    uint8_t by = kUnselected;
    if (j < item.visible) {
      by = selected_by(j >> args.expand);
      args.map[item.map + j] = by;
    }
    const uint32_t kept = __ballot_sync(~0u, by != kUnselected);
    if (by != kUnselected) args.entries[at + __popc(kept & ((1u << lane) - 1))] = list_entry(j, by);
    at += __popc(kept);
  }
  for (int i = at + lane; i < item.list_begin + item.capacity; i += 32) args.entries[i] = kNoEntry;

  if (args.selected == nullptr) return {};
  for (int j = lane; (first == nullptr || args.expand != 0) && j < item.competing; j += 32)
    if (const uint8_t by = selected_by(j); by != kUnselected) {
      ++blocks;
      rows += by;
    }
  blocks = __reduce_add_sync(~0u, blocks);
  const unsigned pairs = (blocks * item.tokens - __reduce_add_sync(~0u, rows)) * args.select_block;
  const int own = item.position - item.competing * args.select_block;  // keys of its own blocks before the query block
  blocks += (item.position + item.tokens - 1) / args.select_block + 1 - item.competing;
  return {blocks, static_cast<unsigned long long>(pairs) + static_cast<unsigned long long>(item.tokens) * own +
                      item.tokens * (item.tokens + 1) / 2};
}

// Adds what the warps of a thread block counted, once for each sequence among them: all warps of a kernel at the
// same place would wait for each other. All threads; sequence < 0: nothing.
__device__ inline void add_counted(const SelectArguments& args, int sequence, const Counted& counted) {
  SB_SHARED(Counted, all, [kWarps]);
  SB_SHARED(int, sequences, [kWarps]);
  static_assert(sizeof(all) + sizeof(sequences) <= kCountedBytes);
  if (args.selected == nullptr) return;
  const int warps = blockDim.x / 32, w = threadIdx.x;
  if (threadIdx.x % 32 == 0) {
    all[threadIdx.x / 32] = counted;
    sequences[threadIdx.x / 32] = sequence;
  }
  __syncthreads();
  if (w >= warps || sequences[w] < 0) return;
  Counted sum{};
  for (int other = 0; other < warps; ++other) {
    if (sequences[other] != sequences[w]) continue;
    if (other < w) return;
    sum.blocks += all[other].blocks;
    sum.pairs += all[other].pairs;
  }
  atomicAdd(args.selected + 2 * sequences[w], static_cast<unsigned long long>(sum.blocks));
  atomicAdd(args.selected + 2 * sequences[w] + 1, sum.pairs);
}

}  // namespace sb::gpu
