#pragma once

// Estimated masses of key blocks, what judging by whole blocks and by parts share. A thread block scores 128 or 192
// rows at a time, rows being (token, head of the group) with the heads padded to a power of two, against 64 key blocks
// at a time. The queries (and their squares) stay in registers as one operand, the statistics of the key blocks stream
// through shared memory as the other. Scores wait as 16-bit floats, each thread's own, until the sum of their row is
// known: in shared memory, and of long sequences the rest beyond it. Then the largest of the heads of a token goes to
// memory. Everything is in units of log2.

#include <algorithm>
#include <bit>

#include "attention/gpu/hopper/launch.cuh"
#include "attention/gpu/hopper/tile.cuh"
#include "attention/gpu/hopper/wgmma.cuh"
#include "attention/gpu/launch/early.cuh"
#include "attention/gpu/select/select_steps.cuh"

namespace sb::gpu {

constexpr int kChunk = kStatisticsGroup;  // key blocks scored at a time
constexpr int kMaxStages = 4;

// Where the statistics have the channels 2·pair and the next: as a thread loads them of the queries, eight channels at
// a time, which are two in each half of two products.
constexpr int statistics_pair(int pair) {
  return pair / 16 * 16 + pair % 4 * 4 + pair % 16 / 4;
}

struct MassArguments {
  const __nv_bfloat16* q;
  int32_t query_heads, group;  // group: query heads of a slice
  const ScoreItem* items;
  const ScoreToken* rows;
  int32_t item_count;
  int32_t stages, kept;  // kept: chunks whose scores wait in shared memory
  int32_t beyond;        // and those that wait beyond it, at most
  uint4* room_beyond;    // [thread block][beyond][4][computing thread]
  int32_t parts;
  float unit;  // of the products, in log2
  uint16_t* masses;
};

struct MassBarriers {
  uint64_t full[kMaxStages], empty[kMaxStages];
};

__device__ __forceinline__ __half2 as_half2(uint32_t x) {
  return *reinterpret_cast<__half2*>(&x);
}
__device__ __forceinline__ uint32_t as_bits(__half2 x) {
  return *reinterpret_cast<uint32_t*>(&x);
}
__device__ __forceinline__ uint32_t half_max(uint32_t a, uint32_t b) {
  return as_bits(__hmax2(as_half2(a), as_half2(b)));
}

// What a thread needs of an item, besides its queries.
struct MassItem {
  int tokens, competing;
  int64_t masses;
  int left[2];  // of this thread's rows, key blocks in the last chunk
  // 32s of key blocks. The shuffle tells the compiler that it is the same for all threads.
  __device__ __forceinline__ int halves() const {
    return __shfl_sync(~0u, (competing + kChunk / 2 - 1) / (kChunk / 2), 0);
  }
};

// The items of a thread block, long ones first in the list of all: forth and back, so that each has as much to do.
__device__ __forceinline__ int item_index(int round) {
  const int blocks = gridDim.x, block = blockIdx.x;
  return round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
}

// An index that exists. What is read there must not look alike for all threads of a warp (threadIdx.y is 0): the
// compiler would bring it to uniform registers, and wait for it, where it is read.
__device__ __forceinline__ int existing(const MassArguments& args, int index) {
  return min(index, args.item_count - 1) + static_cast<int>(threadIdx.y);
}
__device__ __forceinline__ const ScoreItem& item_at(const MassArguments& args, int index) {
  return args.items[existing(args, index)];
}

// A thread's part of two rows. kLog: log2 of the row slots a token has. kConsumers: threads that compute.
template <int D, int kLog, int kConsumers>
struct MassRows {
  static constexpr int kSlots = 1 << kLog;
  static constexpr int kTokens = kSubtileRows / kSlots;  // of a warpgroup
  const MassArguments& args;
  uint4 *kept, *beyond;  // this thread's: [chunk][4], a thread block's threads apart
  int group, warp, lane;
  // Scores are relative to one of the row, so that 16 bits are precise near the top.
  float reference[2], sum[2];
  __half* lse_of_rows;  // log-sum-exp of the warp's rows, relative to their references, in shared memory

  // Where this thread's rows of an item, its head's queries and the scores it moves are.
  const ScoreToken* rows;
  const __nv_bfloat16* queries[kLog == 4 ? 2 : 1];
  int token, moved;  // token: of the first row it moves; moved: key block of the first score

  __device__ MassRows(const MassArguments& a, uint4* in_shared_memory, uint4* beyond_it,
                      __half (&all_lse)[kConsumers / 2], int thread)
      : args(a),
        kept(in_shared_memory),
        beyond(beyond_it),
        group(thread / 128),
        warp(thread / 32 % 4),
        lane(thread % 32) {
    lse_of_rows = all_lse + thread / 32 * 16;
    rows = args.rows + group * kTokens + (warp * 16 + lane / 4) / kSlots;
#pragma unroll
    for (int h = 0; h < (kLog == 4 ? 2 : 1); ++h)
      queries[h] = args.q + min((lane / 4 + 8 * h) % kSlots, args.group - 1) * D + 8 * (lane % 4);
    token = group * kTokens + (warp * 16 + (lane >> 4) * 8) / kSlots;
    moved = 32 * ((lane >> 3) & 1) + (lane & 4) * 4 + lane % 4 * 2;
  }

  // An item as it was read, since whatever is computed of it waits for the memory.
  struct Read {
    int4 first, last;  // of the ScoreItem
    uint32_t rows[2];  // ScoreToken
  };
  __device__ Read read(int index) const {
    static_assert(sizeof(ScoreItem) == 32 && sizeof(ScoreToken) == 4);
    const int at = existing(args, index);
    const auto* item = reinterpret_cast<const int4*>(args.items + at);
    const auto* row = reinterpret_cast<const uint32_t*>(rows + static_cast<int64_t>(at) * (kConsumers / 2 / kSlots));
    return {item[0], item[1], {row[0], row[kLog == 4 ? 0 : 8 / kSlots]}};
  }
  static __device__ MassItem item_of(const Read& read) {
    return {read.first.y,
            read.first.w,
            static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(read.last.w)) << 32 |
                                 static_cast<uint32_t>(read.last.z)),
            {static_cast<int>(read.rows[0] >> 16), static_cast<int>(read.rows[1] >> 16)}};
  }

  // Its queries as an operand, whose channels are in the order of statistics_pair(). What pads the rows are other rows
  // again: nobody looks at their masses.
  __device__ void load_queries(const Read& read, uint32_t* q) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const __nv_bfloat16* row =
          queries[kLog == 4 ? h : 0] + static_cast<int64_t>(read.first.z) * (args.group * D) +
          static_cast<int64_t>(read.first.x + static_cast<int>(read.rows[h] & 0xFFFF)) * (args.query_heads * D);
#pragma unroll
      for (int v = 0; v < D / 32; ++v) {
        const uint4 eight = *reinterpret_cast<const uint4*>(row + v * 32);
        const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) q[8 * v + 2 * w + h] = words[w];
      }
    }
  }
  __device__ static uint32_t squared(uint32_t two) {
    const auto x = *reinterpret_cast<const __nv_bfloat162*>(&two);
    const __nv_bfloat162 square = __hmul2(x, x);
    return *reinterpret_cast<const uint32_t*>(&square);
  }

  // Key blocks past the end of a row in the last chunk, whatever was multiplied there.
  template <int kScores>
  __device__ void hide_tail(float (&s)[kScores], const MassItem& item) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int left = item.left[h] - 2 * (lane % 4);
#pragma unroll
      for (int j = 0; j < kScores / 4; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (8 * j + e >= left) s[4 * j + 2 * h + e] = -INFINITY;
    }
  }

  // A row's reference, the largest of its first sixteen. Not even the rounding may show what comes later: those past
  // the end are hidden before.
  template <int kScores>
  __device__ void begin_rows(const float (&s)[kScores]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float m = fmaxf(fmaxf(s[2 * h], s[2 * h + 1]), fmaxf(s[4 + 2 * h], s[4 + 2 * h + 1]));
      m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
      reference[h] = fmaxf(m, __shfl_xor_sync(~0u, m, 2)) * args.unit;
      sum[h] = 0;
    }
  }

  __device__ void keep(const uint32_t (&x)[2][8], int chunk) const {
    const auto write = [&](uint4* to) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        to[i * kConsumers] = make_uint4(x[i / 2][4 * (i % 2)], x[i / 2][4 * (i % 2) + 1], x[i / 2][4 * (i % 2) + 2],
                                        x[i / 2][4 * (i % 2) + 3]);
    };
    if (chunk < args.kept)
      write(kept + chunk * 4 * kConsumers);
    else
      write(beyond + (chunk - args.kept) * 4 * kConsumers);
  }

  __device__ const uint4* kept_at(int chunk, int i) const {
    return (chunk < args.kept ? kept + chunk * 4 * kConsumers : beyond + (chunk - args.kept) * 4 * kConsumers) +
           i * kConsumers;
  }
  __device__ void set_lse(const float (&lse)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Padded heads must never win.
      const bool padding = (lane / 4 + 8 * h) % kSlots >= args.group;
      if (lane % 4 == 0) lse_of_rows[lane / 4 + 8 * h] = __float2half_rn(padding ? INFINITY : lse[h]);
    }
  }

  // A row's sum that overflowed, from what was kept of it: rarely.
  __device__ float sum_again(int h, int chunks) const {
    float top = 0, all = 0;
    const auto each = [&](auto body) {
      for (int chunk = 0; chunk < chunks; ++chunk)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint4 eight = *kept_at(chunk, 2 * h + i);
          const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            const float2 two = __half22float2(as_half2(words[w]));
            body(two.x);
            body(two.y);
          }
        }
    };
    each([&](float x) { top = fmaxf(top, x); });
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    each([&](float x) { all += exp2_fast(x - top); });
    all += __shfl_xor_sync(~0u, all, 1);
    all += __shfl_xor_sync(~0u, all, 2);
    return top + __log2f(all);
  }
  // The log-sum-exp of the rows, once all their chunks are kept.
  __device__ void finish_sums(int chunks) {
    constexpr float kLimit = 1.2e38f;
    float all[2], lse[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) all[h] = sum[h] + __shfl_xor_sync(~0u, sum[h], 1);
#pragma unroll
    for (int h = 0; h < 2; ++h) all[h] += __shfl_xor_sync(~0u, all[h], 2);
#pragma unroll
    for (int h = 0; h < 2; ++h) lse[h] = log2_fast(all[h]);  // no sum is below 1: the reference is a part of it
    if (__any_sync(~0u, fmaxf(all[0], all[1]) > kLimit)) {
#pragma unroll 1
      for (int h = 0; h < 2; ++h) {
        const float again = sum_again(h, chunks);
        if ((h == 0 ? all[0] : all[1]) > kLimit) (h == 0 ? lse[0] : lse[1]) = again;
      }
    }
    set_lse(lse);
  }

  // Masses of an item to memory, the largest of each token's heads. A lane reads what the warp's lanes wrote of four
  // key blocks and eight rows: two pairs of blocks, eight apart. Which ones its bits say: blocks 2·(bits 0, 1) +
  // 16·(bit 2) + 32·(bit 3), rows from 8·(bit 4). Lanes that would meet in a bank (bit 3) read neighbouring rows in
  // turn.
  __device__ void store_kept(const MassItem& item, int chunks) const {
    constexpr int kRows = kLog < 3 ? kSlots : 8;  // of a token, of those a lane reads
    const int turn = (lane >> 3) & 1, half = lane >> 4, stride = chunks * kChunk;
    __syncwarp();
    uint32_t lse[8];
    {
      const uint4 eight = *reinterpret_cast<const uint4*>(lse_of_rows + 8 * half);
      const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
      const uint32_t even = turn == 0 ? 0x1010 : 0x3232, odd = turn == 0 ? 0x3232 : 0x1010;
#pragma unroll
      for (int g = 0; g < 8; ++g) lse[g] = __byte_perm(words[g / 2], 0, g % 2 == 0 ? even : odd);
    }
    uint16_t* to = args.masses + item.masses + static_cast<int64_t>(token) * stride + moved;
    const auto move = [&](const uint4* chunk_rows, int chunk) {
      const uint2* from =
          reinterpret_cast<const uint2*>(chunk_rows + (2 * half + turn) * kConsumers - lane + lane % 4) +
          (lane >> 2) % 2;
      uint2 x[8];
#pragma unroll
      for (int g = 0; g < 8; ++g) x[g] = from[8 * g + (g % 2 == 0 ? 8 * turn : -8 * turn)];
#pragma unroll
      for (int g = 0; g < 8; ++g) {
        x[g].x = as_bits(__hsub2(as_half2(x[g].x), as_half2(lse[g])));
        x[g].y = as_bits(__hsub2(as_half2(x[g].y), as_half2(lse[g])));
      }
#pragma unroll
      for (int t = 0; t < 8; t += kRows) {
#pragma unroll
        for (int step = 1; step < kRows; step *= 2)
#pragma unroll
          for (int g = 0; g < kRows; g += 2 * step) {
            x[t + g].x = half_max(x[t + g].x, x[t + g + step].x);
            x[t + g].y = half_max(x[t + g].y, x[t + g + step].y);
          }
        if constexpr (kLog == 4) {
          // The other eight heads are sixteen lanes away; each of two lanes stores one pair.
          const uint32_t theirs = __shfl_xor_sync(~0u, half == 0 ? x[0].y : x[0].x, 16);
          if (token < item.tokens)
            *reinterpret_cast<uint32_t*>(to + chunk * kChunk + 8 * half) =
                ordered(half_max(half == 0 ? x[0].x : x[0].y, theirs));
        } else {
          const int later = kLog == 0 ? t ^ turn : t / kRows;
          if (token + later < item.tokens) {
            auto* at = reinterpret_cast<uint32_t*>(to + later * stride + chunk * kChunk);
            at[0] = ordered(x[t].x);
            at[4] = ordered(x[t].y);
          }
        }
      }
    };
#pragma unroll 2
    for (int chunk = 0; chunk < min(chunks, args.kept); ++chunk) move(kept + chunk * 4 * kConsumers, chunk);
    for (int chunk = args.kept; chunk < chunks; ++chunk) move(beyond + (chunk - args.kept) * 4 * kConsumers, chunk);
    __syncwarp();
  }
};

// Before anything else, by all threads of a thread block; the computing warps give a stage back.
template <int kConsumers>
__device__ __forceinline__ void init_mass_barriers(const MassArguments& args, MassBarriers& barriers) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < args.stages; ++i) {
      barrier_init(shared_address(&barriers.full[i]), 1);
      barrier_init(shared_address(&barriers.empty[i]), kConsumers / 32 * kArrivals);
    }
    barrier_init_fence();
  }
  __syncthreads();
}

// One warp brings the statistics, `kBytes` (a multiple of 64 rows of 128 bytes) a product.
template <int kBytes>
__device__ void load_statistics(const CUtensorMap& map, const MassArguments& args, MassBarriers& barriers,
                                uint32_t statistics, int lane) {
  Cursor ring;
  int next_row = item_at(args, item_index(0)).statistics, next_stride = item_at(args, item_index(0)).stride;
  wait_for_dependencies();
  for (int round = 0; item_index(round) < args.item_count; ++round) {
    const int first_row = next_row, products = __shfl_sync(~0u, next_stride / kChunk * args.parts, 0);
    next_row = item_at(args, item_index(round + 1)).statistics;
    next_stride = item_at(args, item_index(round + 1)).stride;
#pragma unroll 1
    for (int i = 0; i < products; ++i) {
      barrier_wait(shared_address(&barriers.empty[ring.stage]), ring.phase ^ 1);
      const uint32_t barrier = shared_address(&barriers.full[ring.stage]);
      if (lane == 0) barrier_expect(barrier, kBytes);
      __syncwarp();
      if (lane < kBytes / (kChunk * 128))
        tensor_load(statistics + ring.stage * kBytes + lane * kChunk * 128, &map, lane * 64, 0, first_row + i * kChunk,
                    barrier);
      ring.advance(args.stages);
    }
  }
}

// The product of all channels with one stage; `first`: the descriptor of stage 0.
template <int kDepth, int kScores>
__device__ __forceinline__ void multiply_statistics(float (&s)[kScores], const uint32_t (&a)[kDepth / 4],
                                                    uint64_t first, int stage) {
  const uint64_t b = first + stage * (kChunk * kDepth * 2 / 16);
#pragma unroll
  for (int kk = 0; kk < kDepth / 16; ++kk)
    wgmma_rs<0>(s, a + 4 * kk, further(b, (kk / 4) * kChunk * 128 + (kk % 4) * 32), kk != 0);
  wgmma_commit();
}

// How many stages and kept chunks fit the shared memory.
struct MassMemory {
  int stages, kept, beyond, bytes;
  MassMemory(int max_competing, int most_stages, int stage_bytes, int kept_bytes) {
    const int limit = static_cast<int>(kSharedMemory) - 1024, chunks = (max_competing + kChunk - 1) / kChunk;
    stages = most_stages;
    kept = std::min(chunks, (limit - stages * stage_bytes) / kept_bytes);
    beyond = chunks - kept;
    bytes = stages * stage_bytes + kept * kept_bytes;
  }
};

// Statistics, then the room for scores beyond the shared memory.
inline int64_t statistics_only_bytes(int64_t rows, int width) {
  return (rows * width * 2 + 255) / 256 * 256;
}

inline void* room_of(const SelectParams& p) {
  if (p.room != nullptr) return p.room;
  return static_cast<char*>(p.statistics) + statistics_only_bytes(p.statistics_rows, p.row_width);
}

inline MassArguments mass_arguments(const SelectParams& p, const SelectBatch& batch, const MassMemory& memory,
                                    int tokens) {
  return {static_cast<const __nv_bfloat16*>(p.q),
          p.shape.query_heads,
          p.shape.query_heads / p.shape.kv_heads / p.slices,
          p.scores + batch.score_begin,
          p.score_rows + static_cast<int64_t>(batch.score_begin) * tokens,
          batch.score_count,
          memory.stages,
          memory.kept,
          memory.beyond,
          static_cast<uint4*>(room_of(p)),
          p.parts,
          p.shape.scale * kLog2e,
          p.masses};
}

// Sizes of the kernels, by the depth of their products (channels of a row of statistics). Computing warpgroups as many
// as there are registers for, and one more, of which one warp loads.
constexpr int whole_rows(int d) {
  return d == 128 ? 128 : 192;
}
constexpr int part_rows(int depth) {
  return depth > 128 ? 128 : 192;
}
constexpr int mass_stage_bytes(int depth) {
  return kChunk * depth * 2;
}
constexpr int mass_stages(int depth) {
  return depth > 128 ? 3 : 4;
}
inline MassMemory mass_memory(int max_competing, int depth, int rows) {
  return MassMemory(max_competing, mass_stages(depth), mass_stage_bytes(depth), rows * kChunk * 2);
}
// Judged by planes: a row of statistics is so many channels of one or more keys.
constexpr int kPlaneRowWidth = 128, kPlaneRows = 192;
// Scores by planes are products and sums of 16-bit floats, half the work to compare. They are computed in this unit:
// up to 2^22 fits then, and what is lost below, 2^-18, decides nothing.
constexpr float kPlaneScoreUnit = 64;
constexpr float kLargestHalf = 65504;
constexpr int kSliceHeads = 16;
inline int log_slots(const SelectParams& p) {
  return std::bit_width(static_cast<unsigned>(p.shape.query_heads / p.shape.kv_heads / p.slices - 1));
}

// Behind the statistics and that room: the queries that blocks judged by planes are multiplied with.
inline int64_t room_beyond_bytes(int max_competing, int depth, int rows) {
  return int64_t{multiprocessors()} * mass_memory(max_competing, depth, rows).beyond * rows * kChunk * 2;
}
inline __half* plane_queries(const SelectParams& p) {
  return reinterpret_cast<__half*>(static_cast<char*>(room_of(p)) +
                                   room_beyond_bytes(p.max_competing, kPlaneRowWidth, kPlaneRows));
}
void gather_planes(const SelectParams& params, bool keys, bool queries, cudaStream_t stream);

// This thread's room in shared memory and beyond.
template <int kConsumers>
__device__ __forceinline__ uint4* room_beyond(const MassArguments& args) {
  return args.room_beyond + static_cast<int64_t>(blockIdx.x) * args.beyond * 4 * kConsumers + threadIdx.x;
}

void whole_masses(const SelectParams& params, const SelectBatch& batch, cudaStream_t stream);
void part_masses(const SelectParams& params, const SelectBatch& batch, cudaStream_t stream);
void plane_masses(const SelectParams& params, const SelectBatch& batch, cudaStream_t stream);

}  // namespace sb::gpu
