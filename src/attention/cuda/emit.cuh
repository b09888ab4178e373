#pragma once

// From the choices of a query block to its row list and its line in the map. CUDA files only.

#include "attention/cuda/choose.cuh"

namespace sb::gpu {

constexpr uint8_t kUnchosen = 255;
constexpr int kWarps = 4;  // query blocks of a thread block

// What the kernels that choose are told.
struct ChoiceArguments {
  const SelectItem* items;
  int32_t count;
  int32_t query_block, select_block, expand;  // expand: log2 of the key blocks of the lists in one of the selection
  int32_t warp_bytes;                         // of shared memory: a third for `first`, the rest for masses
  SelectionPattern pattern;
  bool lookahead;
  float coverage;
  const float* thresholds;
  const uint16_t* masses;
  int32_t planes;
  int64_t plane_masses;
  uint32_t* entries;
  uint8_t* map;
  unsigned long long* chosen;

  // Of two neighbouring blocks, the largest of the planes.
  __device__ __forceinline__ uint32_t two_masses(int64_t at) const {
    uint32_t two = *reinterpret_cast<const uint32_t*>(masses + at);
#pragma unroll 1
    for (int plane = 1; plane < planes; ++plane)
      two = __vmaxu2(two, *reinterpret_cast<const uint32_t*>(masses + plane * plane_masses + at));
    return two;
  }
  __device__ __forceinline__ uint16_t mass(int64_t at) const {
    uint16_t one = masses[at];
    for (int plane = 1; plane < planes; ++plane) one = max(one, masses[plane * plane_masses + at]);
    return one;
  }
};

inline ChoiceArguments choice_arguments(const SelectParams& p, int item_begin, int item_count, int warp_bytes) {
  return {p.items + item_begin,
          item_count,
          p.query_block,
          p.select_block,
          p.select_block == p.block ? 0 : 1,
          warp_bytes,
          p.pattern,
          p.lookahead,
          p.coverage,
          p.thresholds,
          p.masses,
          p.planes,
          p.plane_masses,
          p.row_entries,
          p.map,
          p.chosen};
}

// `first` is null where nothing was to choose.
__device__ inline void emit(const ChoiceArguments& args, const SelectItem& item, const uint8_t* first, int lane) {
  const auto chosen_by = [&](int j) -> uint8_t {
    if (j >= item.competing || item.everything) return 0;
    if (first != nullptr) return first[j];
    return j < item.sinks || j >= item.competing - item.local ? 0 : kUnchosen;
  };
  int at = item.list_begin, base = 0;
  // Where choices were made, four blocks a lane at a time. What the map gets beyond the visible ones nobody looks at.
  if (first != nullptr && args.expand == 0)
    for (; base < item.visible; base += 128) {
      const int j = base + 4 * lane;
      uint32_t by = 0xFFFFFFFFu;
      if (j < item.visible) {
        by = j < item.competing ? *reinterpret_cast<const uint32_t*>(first + j) : 0;
        if (j + 4 > item.competing && j < item.competing) by &= (1u << (8 * (item.competing - j))) - 1;
        *reinterpret_cast<uint32_t*>(args.map + item.map + j) = by;
        if (j + 4 > item.visible) by |= ~0u << (8 * (item.visible - j));
      }
      int before = at, own = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const uint32_t kept = __ballot_sync(~0u, (by >> (8 * e) & 0xFF) != kUnchosen);
        before += __popc(kept & ((1u << lane) - 1));
        at += __popc(kept);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const uint32_t chosen = by >> (8 * e) & 0xFF;
        if (chosen != kUnchosen) args.entries[before + own++] = list_entry(j + e, chosen);
      }
    }
  for (; base < item.visible; base += 32) {
    const int j = base + lane;
    uint8_t by = kUnchosen;
    if (j < item.visible) {
      by = chosen_by(j >> args.expand);
      args.map[item.map + j] = by;
    }
    const uint32_t kept = __ballot_sync(~0u, by != kUnchosen);
    if (by != kUnchosen) args.entries[at + __popc(kept & ((1u << lane) - 1))] = list_entry(j, by);
    at += __popc(kept);
  }
  for (int i = at + lane; i < item.list_begin + item.capacity; i += 32) args.entries[i] = kNoEntry;

  if (args.chosen == nullptr) return;
  unsigned blocks = 0, pairs = 0;
  for (int j = lane; j < item.competing; j += 32)
    if (const uint8_t by = chosen_by(j); by != kUnchosen) {
      ++blocks;
      pairs += (item.tokens - by) * args.select_block;
    }
  blocks = __reduce_add_sync(~0u, blocks);
  pairs = __reduce_add_sync(~0u, pairs);
  if (lane != 0) return;
  const int own = item.position - item.competing * args.select_block;  // keys of its own blocks before the query block
  blocks += (item.position + item.tokens - 1) / args.select_block + 1 - item.competing;
  atomicAdd(args.chosen + 2 * item.length_class, static_cast<unsigned long long>(blocks));
  atomicAdd(args.chosen + 2 * item.length_class + 1, static_cast<unsigned long long>(pairs) +
                                                         static_cast<unsigned long long>(item.tokens) * own +
                                                         item.tokens * (item.tokens + 1) / 2);
}

}  // namespace sb::gpu
