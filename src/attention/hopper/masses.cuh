#pragma once

// Estimated masses of key blocks, what judging by whole blocks and by parts share. A thread block scores 128 or 192
// rows at a time, rows being (token, head of the group) with the heads padded to a power of two, against 64 key blocks
// at a time. The queries (and their squares) stay in registers as one operand, the statistics of the key blocks stream
// through shared memory as the other. Scores wait as 16-bit floats, each thread's own, until the sum of their row is
// known: in shared memory, and of long sequences the rest beyond it. Then the largest of the heads of a token goes to
// memory. Everything is in units of log2.

#include <algorithm>
#include <bit>

#include "attention/cuda/choose.cuh"
#include "attention/cuda/early.cuh"
#include "attention/hopper/launch.cuh"
#include "attention/hopper/tile.cuh"
#include "attention/hopper/wgmma.cuh"

namespace sb::gpu {

constexpr int kChunk = kStatisticsGroup;  // key blocks scored at a time
constexpr int kMaxStages = 4;

struct MassArguments {
  const __nv_bfloat16* q;
  int32_t query_heads, group, planes;  // group: query heads of a plane
  const ScoreItem* items;
  int32_t item_count;
  int32_t stages, kept;  // kept: chunks whose scores wait in shared memory
  int32_t beyond;        // and those that wait beyond it, at most
  uint4* room_beyond;    // [thread block][beyond][4][computing thread]
  int32_t parts;
  float unit;  // of the products, in log2
  uint16_t* masses;
  int64_t plane_masses;
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

// An item as a thread needs it.
struct MassItem {
  int token, tokens, head, competing, stride;
  int64_t masses;
  int later[2];  // of this thread's two rows
  __device__ __forceinline__ int chunks() const { return (competing + kChunk - 1) / kChunk; }
};

// A thread's part of two rows. kLog: log2 of the row slots a token has. kConsumers: threads that compute.
template <int D, int kLog, int kConsumers>
struct MassRows {
  static constexpr int kSlots = 1 << kLog;
  static constexpr int kTokens = kSubtileRows / kSlots;  // of a warpgroup
  const MassArguments& args;
  uint4 *kept, *beyond;  // this thread's: [chunk][4], a thread block's threads apart
  int group, warp, lane;
  // Scores are relative to one of the row, so that 16 bits are precise near the top; sums besides that to 2^raised,
  // which is 1 unless a sum would overflow.
  float reference[2], raised[2], sum[2];
  __half2 row_lse[2];

  __device__ int token_of(int h) const { return group * kTokens + (warp * 16 + lane / 4 + 8 * h) / kSlots; }
  __device__ MassItem fetch(int index) const {
    const ScoreItem& item = args.items[min(index, args.item_count - 1)];
    return {item.token,
            item.tokens,
            item.head,
            item.competing,
            item.stride,
            item.masses + item.head % args.planes * args.plane_masses,
            {item.later[token_of(0)], item.later[token_of(1)]}};
  }

  // The queries of an item as an operand. What pads the rows are other rows again: nobody looks at their masses.
  __device__ void load_queries(const MassItem& item, uint32_t* q) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int head = min((warp * 16 + lane / 4 + 8 * h) % kSlots, args.group - 1);
      const __nv_bfloat16* row =
          args.q +
          (static_cast<int64_t>(item.token + item.later[h]) * args.query_heads + item.head * args.group + head) * D +
          2 * (lane % 4);
#pragma unroll
      for (int i = 0; i < D / 8; ++i) q[2 * i + h] = *reinterpret_cast<const uint32_t*>(row + i * 8);
    }
  }
  __device__ static uint32_t squared(uint32_t two) {
    const auto x = *reinterpret_cast<const __nv_bfloat162*>(&two);
    const __nv_bfloat162 square = __hmul2(x, x);
    return *reinterpret_cast<const uint32_t*>(&square);
  }

  // Key blocks past the end, whatever was multiplied there. left: blocks from this chunk on.
  __device__ void hide_tail(float (&s)[32], int left) const {
    left -= 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (8 * j + e >= left) s[4 * j + e] = s[4 * j + 2 + e] = -INFINITY;
  }

  // A row's reference, the largest of its first sixteen. Not even the rounding may show what comes later: those past
  // the end are hidden before.
  __device__ void begin_rows(const float (&s)[32]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float m = fmaxf(fmaxf(s[2 * h], s[2 * h + 1]), fmaxf(s[4 + 2 * h], s[4 + 2 * h + 1]));
      m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
      reference[h] = fmaxf(m, __shfl_xor_sync(~0u, m, 2)) * args.unit;
      raised[h] = sum[h] = 0;
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

  __device__ void finish_sums() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float m = fmaxf(raised[h], __shfl_xor_sync(~0u, raised[h], 1));
      m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
      float all = sum[h] * exp2_fast(raised[h] - m);
      all += __shfl_xor_sync(~0u, all, 1);
      all += __shfl_xor_sync(~0u, all, 2);
      // Padded heads must never win.
      const bool padding = (warp * 16 + lane / 4 + 8 * h) % kSlots >= args.group;
      row_lse[h] = __float2half2_rn(padding ? INFINITY : m + __log2f(all));
    }
  }

  // Reduces x[0..7] over the lanes that hold the heads of a token; each of them ends up with 8 / 2^kSteps column
  // groups.
  template <int kSteps>
  __device__ void largest(uint32_t (&x)[8]) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int lanes = 4 << (kSteps - 1 - step), half = 4 >> step;
      const bool upper = (lane & lanes) != 0;
#pragma unroll
      for (int j = 0; j < half; ++j) {
        const uint32_t mine = upper ? x[j + half] : x[j], theirs = upper ? x[j] : x[j + half];
        x[j] = half_max(mine, __shfl_xor_sync(~0u, theirs, lanes));
      }
    }
  }

  // Masses of a chunk to memory.
  __device__ void store(uint32_t (&x)[2][8], const MassItem& item, int chunk) const {
    constexpr int kSteps = kLog < 3 ? kLog : 3;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int j = 0; j < 8; ++j) x[h][j] = as_bits(__hsub2(as_half2(x[h][j]), row_lse[h]));
    largest<kSteps>(x[0]);
    largest<kSteps>(x[1]);
    constexpr int kLeft = 8 >> kSteps;
    const int group_begin = ((lane / 4) % (1 << kSteps)) * kLeft;
    if constexpr (kLog == 4) {
#pragma unroll
      for (int j = 0; j < kLeft; ++j) x[0][j] = half_max(x[0][j], x[1][j]);
    }
#pragma unroll
    for (int h = 0; h < (kLog == 4 ? 1 : 2); ++h) {
      const int token = token_of(h);
      if (token >= item.tokens) continue;
      uint32_t* to = reinterpret_cast<uint32_t*>(args.masses + item.masses + static_cast<int64_t>(token) * item.stride +
                                                 chunk * kChunk);
#pragma unroll
      for (int j = 0; j < kLeft; ++j) to[(group_begin + j) * 4 + lane % 4] = ordered(x[h][j]);
    }
  }

  __device__ void store_kept(const MassItem& item) const {
    const auto move = [&](const uint4* from, int chunk) {
      uint32_t x[2][8];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 four = from[i * kConsumers];
        x[i / 2][4 * (i % 2)] = four.x;
        x[i / 2][4 * (i % 2) + 1] = four.y;
        x[i / 2][4 * (i % 2) + 2] = four.z;
        x[i / 2][4 * (i % 2) + 3] = four.w;
      }
      store(x, item, chunk);
    };
    const int chunks = item.chunks();
#pragma unroll 2
    for (int chunk = 0; chunk < min(chunks, args.kept); ++chunk) move(kept + chunk * 4 * kConsumers, chunk);
    for (int chunk = args.kept; chunk < chunks; ++chunk) move(beyond + (chunk - args.kept) * 4 * kConsumers, chunk);
  }
};

// One warp brings the statistics, `kBytes` (a multiple of 64 rows of 128 bytes) a product.
template <int kBytes>
__device__ void load_statistics(const CUtensorMap& map, const MassArguments& args, MassBarriers& barriers,
                                uint32_t statistics, int lane) {
  Cursor ring;
  wait_for_dependencies();
  for (int index = blockIdx.x; index < args.item_count; index += gridDim.x) {
    const int competing = args.items[index].competing, first_row = args.items[index].statistics;
    const int products = (competing + kChunk - 1) / kChunk * args.parts;
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
template <int kDepth>
__device__ __forceinline__ void multiply_statistics(float (&s)[32], const uint32_t (&a)[kDepth / 4], uint64_t first,
                                                    int stage) {
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
inline int64_t statistics_only_bytes(int64_t rows, int channels, int d) {
  return (rows * channels * d * 2 + 255) / 256 * 256;
}

inline MassArguments mass_arguments(const SelectParams& p, const SelectBatch& batch, const MassMemory& memory) {
  return {static_cast<const __nv_bfloat16*>(p.q),
          p.shape.query_heads,
          p.shape.query_heads / p.shape.kv_heads / p.planes,
          p.planes,
          p.scores + batch.score_begin,
          batch.score_count,
          memory.stages,
          memory.kept,
          memory.beyond,
          reinterpret_cast<uint4*>(static_cast<char*>(p.statistics) +
                                   statistics_only_bytes(p.statistics_rows, p.statistics_channels, p.shape.head_dim)),
          p.parts,
          p.shape.scale * kLog2e,
          p.masses,
          p.plane_masses};
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
constexpr int kPlaneHeads = 16;
inline int log_slots(const SelectParams& p) {
  return std::bit_width(static_cast<unsigned>(p.shape.query_heads / p.shape.kv_heads / p.planes - 1));
}

// This thread's room in shared memory and beyond.
template <int kConsumers>
__device__ __forceinline__ uint4* room_beyond(const MassArguments& args) {
  return args.room_beyond + static_cast<int64_t>(blockIdx.x) * args.beyond * 4 * kConsumers + threadIdx.x;
}

void whole_masses(const SelectParams& params, const SelectBatch& batch, cudaStream_t stream);
void part_masses(const SelectParams& params, const SelectBatch& batch, cudaStream_t stream);

}  // namespace sb::gpu
