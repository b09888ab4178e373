#pragma once

// Selecting the blocks of a query block by topk, topp or mass, in registers. CUDA files only.

#include <cuda_fp16.h>

#include "attention/gpu/select/row_lists.cuh"

namespace sb::gpu {

enum class SelectRule { topk, topp, mass };

// The selections of one warp for the tokens of a query block, one after the other, among up to 64 · kPairs blocks. Lane
// l looks after blocks 64·i + 2·l and the next. Larger mass first, ties to the lower block.
template <int kPairs>
struct RegisterSelect {
  // Tokens whose masses are loaded together where nothing waits for a token's selections.
  static constexpr int kTokensAhead = kPairs < 16 ? 16 / kPairs : 1;
  const SelectArguments& args;
  const SelectItem& item;
  uint8_t* first;  // of each block, the token that selected it
  int lane;
  int left = 0;           // candidates that are not selected
  uint32_t free[kPairs];  // 16 bits of ones for each block that may still be selected
  uint32_t held[kPairs];  // masses of those, else zeros: below every mass

  __device__ void begin() {
    left = item.competing - item.sinks - item.local;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int j = 64 * i + 2 * lane - item.sinks;
      const auto in = [&](int k) { return static_cast<unsigned>(k) < static_cast<unsigned>(left); };
      free[i] = (in(j) ? 0xFFFFu : 0u) | (in(j + 1) ? 0xFFFF0000u : 0u);
      if (64 * i < item.competing) {
        static_assert(kUnselected == 0xFF);
        *reinterpret_cast<uint16_t*>(first + 64 * i + 2 * lane) =
            static_cast<uint16_t>(__byte_perm(free[i], 0, 0x4420));
      }
    }
    __syncwarp();
  }

  // Of the index-th token that selects.
  __device__ __forceinline__ void load(int index, uint32_t (&masses)[kPairs]) const {
    const uint16_t* from = args.masses + item.masses + (index * item.stride + 2 * lane);
#pragma unroll
    for (int i = 0; i < kPairs; ++i)
      masses[i] = 64 * i < item.stride ? *reinterpret_cast<const uint32_t*>(from + 64 * i) : 0;
#pragma unroll 1
    for (int slice = 1; slice < args.slices; ++slice) {
      from += args.slice_masses;
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
  __device__ void load_sum(uint32_t (&masses)[kPairs]) const {
    float sum[2 * kPairs] = {};
#pragma unroll 1
    for (int row = 0; row < item.tokens; ++row) {
      load(row, masses);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const float2 two = two_masses_of(masses[i]);
        sum[2 * i] += exp2_fast(two.x);
        sum[2 * i + 1] += exp2_fast(two.y);
      }
    }
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const __half2 mass = __floats2half2_rn(__log2f(sum[2 * i]), __log2f(sum[2 * i + 1]));
      masses[i] = ordered(*reinterpret_cast<const uint32_t*>(&mass));
    }
  }

  // The best block that is left, for token `row`. Returns its mass, 0: none was left.
  __device__ __forceinline__ uint32_t select_best(int row) {
    // A key is a mass, then what is largest for the lowest block.
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const uint32_t order = (0xFFFEu - 64 * i) << 16 | (0xFFFFu - 64 * i);
      top = max(top, max(__byte_perm(held[i], order, 0x1054), __byte_perm(held[i], order, 0x3276)));
    }
    top = __reduce_max_sync(~0u, top - 2 * lane);
    if (top < 0x10000u) return 0;
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
    return top >> 16;
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
  // Masses of the free blocks; what is not free is no number, and never counts.
  __device__ __forceinline__ void unorder(__half2 (&masses)[kPairs]) const {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) masses[i] = unordered(held[i]);
  }
  // The largest limit that is right: from it on there are enough masses, and from the next one on too few. Bit by bit
  // below what the largest mass and the least share. `enough`: (limit, whether nothing is below it) → 0 too few,
  // 1 enough, 2 just right: then the search ends. Returns what reaches the limit where it is just right, else the next.
  template <typename Enough>
  __device__ __forceinline__ __half2 search(Enough enough) const {
    uint32_t most = 0, least = ~0u;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      most = __vmaxu2(most, held[i]);
      least = __vminu2(least, held[i] | ~free[i]);
    }
    most = __reduce_max_sync(~0u, max(most & 0xFFFF, most >> 16));
    least = __reduce_min_sync(~0u, min(least & 0xFFFF, least >> 16));
    constexpr uint32_t kInfinity = 0x03FF;  // the negative one: nothing is below
    int bit = 31 - __clz(static_cast<int>(most ^ least));
    uint32_t limit = bit < 0 ? most : most & ~((2u << bit) - 1);
    bool exact = false;
    for (; bit >= 0 && !exact; --bit) {
      const uint32_t trial = limit | 1u << bit;
      const int verdict = enough(unordered(trial * 0x10001u), trial <= kInfinity);
      if (verdict > 0) limit = trial;
      exact = verdict == 2;
    }
    return unordered((exact ? limit : limit + 1) * 0x10001u);
  }
  // Selects all that reach a limit. Returns how many.
  __device__ __forceinline__ int take_from(const __half2 (&masses)[kPairs], __half2 limit, int row) {
    int selected = 0;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      if (64 * i >= item.competing) continue;
      const uint32_t taken = __hge2_mask(masses[i], limit);
      if ((taken & 1) != 0) first[64 * i + 2 * lane] = static_cast<uint8_t>(row);
      if ((taken >> 16) != 0) first[64 * i + 2 * lane + 1] = static_cast<uint8_t>(row);
      free[i] &= ~taken;
      held[i] &= ~taken;
      selected += __popc(taken & 0x00010001u);
    }
    selected = static_cast<int>(__reduce_add_sync(~0u, static_cast<unsigned>(selected)));
    left -= selected;
    return selected;
  }
  // What the `room` best reach, or those above the least of them where that is not the only one of its mass.
  __device__ __forceinline__ __half2 best_limit(const __half2 (&masses)[kPairs], int room) const {
    return search([&](__half2 trial, bool lowest) {
      const int reached = lowest ? left : count(masses, trial);
      return reached == room ? 2 : reached > room ? 1 : 0;
    });
  }

  static constexpr int kOneByOne = kPairs > 4 ? 4 : 8;  // so many are selected before a search is quicker
  __device__ void select(int room, int row) {
    if (room > kOneByOne) {
      __half2 masses[kPairs];
      unorder(masses);
      room -= take_from(masses, best_limit(masses, room), row);
    }
#pragma unroll 1
    for (; room > 0; --room) select_best(row);
  }

  static __device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
  }

  // topp: the fewest blocks with which the token holds its coverage, at most `room`.
  __device__ void cover(const uint32_t (&loaded)[kPairs], int room, int row) {
    float mass[2 * kPairs], all = 0, lacks = 0;  // lacks: what is not selected
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float2 two = two_masses_of(loaded[i]);
      const int j = 64 * i + 2 * lane;
      mass[2 * i] = j < item.competing ? exp2_fast(two.x) : 0.f;
      mass[2 * i + 1] = j + 1 < item.competing ? exp2_fast(two.y) : 0.f;
      all += mass[2 * i] + mass[2 * i + 1];
      lacks += ((free[i] & 0xFFFF) != 0 ? mass[2 * i] : 0.f) + ((free[i] >> 16) != 0 ? mass[2 * i + 1] : 0.f);
    }
    all = warp_sum(all);
    lacks = warp_sum(lacks);
    float wanted = lacks - (1 - args.coverage) * all;
    if (wanted <= 0) return;
    hold(loaded);
    if (room > kOneByOne) {
      __half2 masses[kPairs];
      unorder(masses);
      const auto held_from = [&](__half2 limit) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          const uint32_t reached = __hge2_mask(masses[i], limit);
          sum += ((reached & 1) != 0 ? mass[2 * i] : 0.f) + ((reached >> 16) != 0 ? mass[2 * i + 1] : 0.f);
        }
        return warp_sum(sum);
      };
      __half2 limit = best_limit(masses, room);
      float holds = held_from(limit);
      if (holds >= wanted) {
        limit = search([&](__half2 trial, bool lowest) { return lowest || held_from(trial) >= wanted ? 1 : 0; });
        holds = held_from(limit);
      }
      room -= take_from(masses, limit, row);
      wanted -= holds;
    }
#pragma unroll 1
    for (; room > 0 && wanted > 0; --room) {
      const uint32_t best = select_best(row);
      if (best == 0) return;
      wanted -= exp2_fast(mass_of(best));
    }
  }

  __device__ void run_topp() {
    begin();
    const int candidates = left;
    uint32_t masses[kPairs];
    if (args.lookahead) {
      load_sum(masses);
      cover(masses, min(item.total, candidates), 0);
    } else {
      Allowance allowance(item.first, item.total, args.query_block);
#pragma unroll 1
      for (int row = 0; row < item.tokens; ++row, allowance.next()) {
        const int room = min(allowance.allowed, candidates) - (candidates - left);
        if (room <= 0) continue;
        load(row, masses);
        cover(masses, room, row);
      }
    }
    __syncwarp();
  }

  // `mass`: all blocks that are worth it; of those at most `room`, and at least so many.
  __device__ void select_worthy(uint32_t worth, int room, int least, int row) {
    int worthy = 0;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) worthy += (held[i] << 16 >= worth) + (held[i] >= worth);
    worthy = static_cast<int>(__reduce_add_sync(~0u, static_cast<unsigned>(worthy)));
    if (worthy > room || worthy < least) return select(worthy > room ? room : least, row);
    if (worthy == 0) return;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) take_worthy(i, held[i], worth, row);
    left -= worthy;
  }
  __device__ __forceinline__ void take_worthy(int i, uint32_t masses, uint32_t worth, int row) {
    const bool low = masses << 16 >= worth, high = masses >= worth;
    if (low) first[64 * i + 2 * lane] = static_cast<uint8_t>(row);
    if (high) first[64 * i + 2 * lane + 1] = static_cast<uint8_t>(row);
    free[i] &= low ? high ? 0u : 0xFFFF0000u : high ? 0xFFFFu : ~0u;
  }

  __device__ void run_mass() {
    begin();
    const int candidates = left, most = min(item.total, candidates);
    const uint32_t worth = args.worth(item.sequence);
    uint32_t masses[kTokensAhead][kPairs], token[kPairs];
    load(0, token);
    int last = item.tokens - 1;
    const auto load_tokens = [&] {
#pragma unroll
      for (int t = 0; t < kTokensAhead; ++t) load(max(last - t, 0), masses[t]);
    };
    load_tokens();
    hold(token);
    select_worthy(worth, most, min((item.total / 2 + 3) / 4, most), 0);
    // Whatever is worth it, all tokens together are mostly allowed: then none had to wait for the ones before it, and
    // of each block the first that finds it worth it is all that matters. From the last token on.
    uint32_t by[kPairs];  // that token, a byte for each of the two blocks; kUnselected: none
#pragma unroll
    for (int i = 0; i < kPairs; ++i) by[i] = 0xFFFFu;
#pragma unroll 1
    while (last > 0) {
#pragma unroll
      for (int t = 0; t < kTokensAhead; ++t) {
        const uint32_t row = max(last - t, 0);
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          if (masses[t][i] << 16 >= worth) by[i] = __byte_perm(by[i], row, 0x3214);
          if (masses[t][i] >= worth) by[i] = __byte_perm(by[i], row, 0x3240);
        }
      }
      last -= kTokensAhead;
      if (last > 0) load_tokens();
    }
    int selected = 0;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const bool low = (free[i] & 0xFFFF) != 0 && (by[i] & 0xFF) != kUnselected,
                 high = (free[i] >> 16) != 0 && (by[i] >> 8) != kUnselected;
      if (low) first[64 * i + 2 * lane] = static_cast<uint8_t>(by[i]);
      if (high) first[64 * i + 2 * lane + 1] = static_cast<uint8_t>(by[i] >> 8);
      selected += low + high;
    }
    selected = static_cast<int>(__reduce_add_sync(~0u, static_cast<unsigned>(selected)));
    __syncwarp();
    if (candidates - left + selected <= most) return;
    // Else one after the other.
    begin();
#pragma unroll 1
    for (int row = 0; row < item.tokens && candidates - left < most; ++row) {
      load(row, token);
      hold(token);
      const int room = most - (candidates - left);
      select_worthy(worth, room, row == 0 ? min((item.total / 2 + 3) / 4, room) : 0, row);
    }
    __syncwarp();
  }

  __device__ void run_topk() {
    begin();
    const int candidates = left;
    if (args.lookahead) {
      uint32_t sums[kPairs];
      load_sum(sums);
      hold(sums);
      select(min(item.total, candidates), 0);
      __syncwarp();
      return;
    }
    // Tokens that have nothing to add have no masses either. Of 32 tokens at a time, lane l: what token l may have
    // selected together with those before it.
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
      // The next token's masses are on their way while this one selects.
      if (rows != 0) load(index, next);
      select(room, token);
    }
    __syncwarp();
  }
};

}  // namespace sb::gpu
