#pragma once

// Choosing a number of blocks that is known beforehand (topk), in registers. CUDA files only.

#include <cuda_fp16.h>

#include "attention/cuda/emit.cuh"

namespace sb::gpu {

// The choices of one warp for the tokens of a query block, one after the other, among up to 64 · kPairs blocks. Lane l
// looks after blocks 64·i + 2·l and the next. Larger mass first, ties to the lower block.
template <int kPairs>
struct Picker {
  const ChoiceArguments& args;
  const SelectItem& item;
  uint8_t* first;  // of each block, the token that chose it
  int lane;
  int left = 0;           // candidates that are not chosen
  uint32_t free[kPairs];  // 16 bits of ones for each block that may still be chosen
  uint32_t held[kPairs];  // masses of those, else zeros: below every mass

  __device__ void begin() {
    left = item.competing - item.sinks - item.local;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int j = 64 * i + 2 * lane - item.sinks;
      const auto in = [&](int k) { return static_cast<unsigned>(k) < static_cast<unsigned>(left); };
      free[i] = (in(j) ? 0xFFFFu : 0u) | (in(j + 1) ? 0xFFFF0000u : 0u);
      if (64 * i < item.competing) {
        static_assert(kUnchosen == 0xFF);
        *reinterpret_cast<uint16_t*>(first + 64 * i + 2 * lane) =
            static_cast<uint16_t>(__byte_perm(free[i], 0, 0x4420));
      }
    }
    __syncwarp();
  }

  // Of the index-th token that chooses.
  __device__ __forceinline__ void load(int index, uint32_t (&masses)[kPairs]) const {
    const int64_t at = item.masses + static_cast<int64_t>(index) * item.stride + 2 * lane;
    const uint16_t* from = args.masses + at;
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
      masses[i] = 64 * i < item.stride ? *reinterpret_cast<const uint32_t*>(from + 64 * i) : 0;
#pragma unroll 1
    for (int plane = 1; plane < args.planes; ++plane) {
      from += args.plane_masses;
#pragma unroll
      for (int i = 0; i < kPairs; ++i)
        if (64 * i < item.stride) masses[i] = __vmaxu2(masses[i], *reinterpret_cast<const uint32_t*>(from + 64 * i));
    }
  }
  __device__ __forceinline__ void hold(const uint32_t (&masses)[kPairs]) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) held[i] = masses[i] & free[i];
  }

  // Masses of the whole query block: the sum over its tokens.
  __device__ void hold_sum() {
    float sum[2 * kPairs] = {};
#pragma unroll 1
    for (int row = 0; row < item.tokens; ++row) {
      uint32_t two[kPairs];
      load(row, two);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        sum[2 * i] += exp2f(mass_of(two[i] & 0xFFFF));
        sum[2 * i + 1] += exp2f(mass_of(two[i] >> 16));
      }
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const __half2 mass = __floats2half2_rn(__log2f(sum[2 * i]), __log2f(sum[2 * i + 1]));
      held[i] = ordered(*reinterpret_cast<const uint32_t*>(&mass)) & free[i];
    }
  }

  // The best block that is left, for token `row`.
  __device__ __forceinline__ void pick(int row) {
    // A key is a mass, then what is largest for the lowest block.
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const uint32_t order = (0xFFFEu - 64 * i) << 16 | (0xFFFFu - 64 * i);
      top = max(top, max(__byte_perm(held[i], order, 0x1054), __byte_perm(held[i], order, 0x3276)));
    }
    top = __reduce_max_sync(~0u, top - 2 * lane);
    if (top < 0x10000u) return;
    const int j = 0xFFFF - static_cast<int>(top & 0xFFFF);
    if (lane == 0) first[j] = static_cast<uint8_t>(row);
    // No branch for every pair: the compiler would put the arrays into memory to index them.
    const uint32_t keep = lane != j % 64 / 2 ? ~0u : j % 2 == 0 ? 0xFFFF0000u : 0xFFFFu;
#pragma unroll
    for (int q = 0; q < kPairs; q += 4) {
      if (kPairs > 4 && j / 256 != q / 4) continue;
#pragma unroll
      for (int i = q; i < q + 4; ++i) {
        const uint32_t mask = j / 64 == i ? keep : ~0u;
        free[i] &= mask;
        held[i] &= mask;
      }
    }
    --left;
  }

  // A mass as it was before it was mapped to be ordered.
  static __device__ __forceinline__ __half2 unordered(uint32_t two) {
    const uint32_t negative = ((~two >> 15) & 0x00010001u) * 0xFFFFu;
    const uint32_t bits = two ^ (negative | 0x80008000u);
    return *reinterpret_cast<const __half2*>(&bits);
  }
  // How many masses reach a limit.
  static __device__ __forceinline__ int count(const __half2 (&masses)[kPairs], __half2 limit) {
    __half2 reached[2] = {};
#pragma unroll
    for (int i = 0; i < kPairs; ++i) reached[i % 2] = __hadd2(reached[i % 2], __hge2(masses[i], limit));
    reached[0] = __hadd2(reached[0], reached[1]);
    const __half both = __hadd(__low2half(reached[0]), __high2half(reached[0]));
    return static_cast<int>(__reduce_add_sync(~0u, static_cast<unsigned>(__half2int_rn(both))));
  }
  // Chooses blocks that are among the `room` best: all of them, or those above the least of them where that is not the
  // only one of its mass. Returns how many.
  __device__ int pick_above(int room, int row) {
    uint32_t most = 0, least = ~0u;
    __half2 masses[kPairs];  // what is not free is no number, and never counts
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      most = __vmaxu2(most, held[i]);
      least = __vminu2(least, held[i] | ~free[i]);
      masses[i] = unordered(held[i]);
    }
    most = __reduce_max_sync(~0u, max(most & 0xFFFF, most >> 16));
    least = __reduce_min_sync(~0u, min(least & 0xFFFF, least >> 16));
    // The largest limit that `room` masses reach, bit by bit below what the largest and the least share.
    constexpr uint32_t kInfinity = 0x03FF;  // the negative one: nothing is below
    int bit = 31 - __clz(static_cast<int>(most ^ least));
    uint32_t limit = bit < 0 ? most : most & ~((2u << bit) - 1);
    bool exact = false;
    for (; bit >= 0 && !exact; --bit) {
      const uint32_t trial = limit | 1u << bit;
      const int reached = trial <= kInfinity ? left : count(masses, unordered(trial * 0x10001u));
      if (reached >= room) limit = trial;
      exact = reached == room;
    }
    const __half2 reach = unordered((exact ? limit : limit + 1) * 0x10001u);
    int chosen = 0;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (64 * i >= item.competing) continue;
      const uint32_t taken = __hge2_mask(masses[i], reach);
      if ((taken & 1) != 0) first[64 * i + 2 * lane] = static_cast<uint8_t>(row);
      if ((taken >> 16) != 0) first[64 * i + 2 * lane + 1] = static_cast<uint8_t>(row);
      free[i] &= ~taken;
      held[i] &= ~taken;
      chosen += __popc(taken & 0x00010001u);
    }
    chosen = static_cast<int>(__reduce_add_sync(~0u, static_cast<unsigned>(chosen)));
    left -= chosen;
    return chosen;
  }

  __device__ void choose(int room, int row) {
    if (room > (kPairs > 4 ? 4 : 8)) room -= pick_above(room, row);
#pragma unroll 1
    for (; room > 0; --room) pick(row);
  }

  __device__ void run() {
    begin();
    const int candidates = left;
    if (args.lookahead) {
      hold_sum();
      choose(min(item.total, candidates), 0);
      __syncwarp();
      return;
    }
    // Tokens that have nothing to add have no masses either. Of 32 tokens at a time, lane l: what token l may have
    // chosen together with those before it.
    int base = 0, allowed = 0;
    const auto growing = [&] {
      const auto of = [&](int row) {
        return row < 0 ? 0 : allowed_until(item.first, item.total, args.query_block, row);
      };
      allowed = of(base + lane);
      return __ballot_sync(~0u, base + lane < item.tokens && allowed > of(base + lane - 1));
    };
    unsigned rows = growing();
    const auto find = [&] {
      while (rows == 0 && base + 32 < item.tokens) {
        base += 32;
        rows = growing();
      }
    };
    find();
    uint32_t next[kPairs];
    load(0, next);
    for (int index = 1; rows != 0; ++index) {
      const int row = __ffs(static_cast<int>(rows)) - 1, token = base + row;
      const int room = min(__shfl_sync(~0u, allowed, row), candidates) - (candidates - left);
      rows &= rows - 1;
      find();
      hold(next);
      // The next token's masses are on their way while this one chooses.
      if (rows != 0) load(index, next);
      choose(room, token);
    }
    __syncwarp();
  }
};

}  // namespace sb::gpu
