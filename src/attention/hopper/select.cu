#include "attention/hopper/select.h"

#include <cuda_fp16.h>

#include "attention/hopper/launch.cuh"
#include "attention/hopper/tile.cuh"
#include "attention/hopper/wgmma.cuh"

namespace sb::hopper {
namespace {

constexpr uint8_t kUnchosen = 255;
constexpr int kChunk = 64;  // key blocks scored at a time

// Mean and variance per channel of a key block, times scale and scale²/2: what q and q² are multiplied with.
template <int D>
__global__ void __launch_bounds__(256) statistics_kernel(const __nv_bfloat16* k, const SelectBlock* blocks,
                                                         __nv_bfloat16* out, int kv_heads, float scale) {
  constexpr int kPairs = D / 2;              // threads of a token
  constexpr int kGroups = 256 / kPairs;      // tokens at a time
  constexpr int kTokens = kBlock / kGroups;  // of a thread
  __shared__ float2 partial[kGroups][kPairs];
  const SelectBlock block = blocks[blockIdx.x];
  const int pair = threadIdx.x % kPairs, group = threadIdx.x / kPairs;
  __nv_bfloat162 keys[kTokens];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const int t = group + i * kGroups;
    keys[i] = __nv_bfloat162{};
    if (t < block.keys)
      keys[i] = *reinterpret_cast<const __nv_bfloat162*>(
          k + (static_cast<int64_t>(block.token + t) * kv_heads + block.head) * D + pair * 2);
  }
  float2 mean{0, 0}, variance{0, 0};
  const float inverse = 1.f / block.keys;
  // Two passes over the registers: the difference of large squares would lose the variance.
#pragma unroll
  for (int pass = 0; pass < 2; ++pass) {
    float2 sum{0, 0};
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (group + i * kGroups >= block.keys) continue;
      const float2 x = __bfloat1622float2(keys[i]);
      if (pass == 0) {
        sum.x += x.x;
        sum.y += x.y;
      } else {
        sum.x += (x.x - mean.x) * (x.x - mean.x);
        sum.y += (x.y - mean.y) * (x.y - mean.y);
      }
    }
    __syncthreads();
    partial[group][pair] = sum;
    __syncthreads();
    float2 all{0, 0};
    for (int g = 0; g < kGroups; ++g) {
      all.x += partial[g][pair].x;
      all.y += partial[g][pair].y;
    }
    (pass == 0 ? mean : variance) = {all.x * inverse, all.y * inverse};
  }
  if (group != 0) return;
  uint32_t* row = reinterpret_cast<uint32_t*>(out + static_cast<int64_t>(blockIdx.x) * 2 * D);
  row[pair] = pack_bf16(mean.x * scale, mean.y * scale);
  row[kPairs + pair] = pack_bf16(variance.x * scale * scale / 2, variance.y * scale * scale / 2);
}

struct Arguments {
  RowMap rows;
  int32_t query_block;
  int32_t padded;  // competing blocks, rounded up to whole chunks
  const SelectItem* items;
  uint32_t* entries;
  uint8_t* map;
};

template <int D>
struct alignas(1024) Smem {
  __nv_bfloat16 q[2 * kSubtileRows * D];     // q, then q²: [d / 64][row][64] each
  __nv_bfloat16 statistics[kChunk * 2 * D];  // [2 d / 64][block][64]
  __half2 lse[kSubtileRows];                 // twice
  alignas(8) uint64_t q_full, statistics_full;
  // then: scores __half [64][padded + 8], first uint8 [padded]
};

template <int D>
size_t shared_bytes(int padded) {
  return sizeof(Smem<D>) + kSubtileRows * (padded + 8) * sizeof(__half) + padded;
}

// Larger mass first, ties to the lower block: the low bits of the order-preserving bits of the mass give way to the
// block, so that no two keys are equal. Never zero.
__device__ __forceinline__ uint32_t sort_key(float mass, int block) {
  const uint32_t bits = __float_as_uint(mass);
  const uint32_t ordered = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return (ordered & 0xFFFFF000u) | static_cast<uint32_t>(0xFFF - block);
}

// The choices of one warp for the tokens of a tile, one after the other. Lane l holds blocks 32·i + l.
template <int kPer>
struct Chooser {
  uint8_t* first;  // of each block, the token that chose it
  int lane;
  uint64_t taken = 0;  // bit i: block 32·i + lane is chosen or does not exist

  __device__ void begin(int count) {
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int j = 32 * i + lane;
      if (j >= count || first[j] != kUnchosen) taken |= uint64_t{1} << i;
    }
  }

  // Marks the `room` largest of `keys` that are free as chosen by token `row`.
  __device__ void choose(const uint32_t* keys, int room, int row) {
    uint32_t key[kPer];
    uint32_t best = 0;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      key[i] = (taken >> i & 1) != 0 ? 0 : keys[32 * i + lane];
      best = max(best, key[i]);
    }
    best = __reduce_max_sync(~0u, best);
    uint32_t threshold = best;
    if (room > 1) {
      // The largest threshold that at least `room` keys reach, bit by bit below what the best and the least share.
      uint32_t least = ~0u;
#pragma unroll
      for (int i = 0; i < kPer; ++i)
        if (key[i] != 0) least = min(least, key[i]);
      least = __reduce_min_sync(~0u, least);
      int bit = 31 - __clz(static_cast<int>(best ^ least));
      threshold = bit < 0 ? best : best & ~((2u << bit) - 1);
      for (; bit >= 0; --bit) {
        const uint32_t trial = threshold | (1u << bit);
        unsigned reached = 0;
#pragma unroll
        for (int i = 0; i < kPer; ++i) reached += key[i] >= trial;
        if (__reduce_add_sync(~0u, reached) >= static_cast<unsigned>(room)) threshold = trial;
      }
    }
#pragma unroll
    for (int i = 0; i < kPer; ++i)
      if (key[i] >= threshold && key[i] != 0) {
        taken |= uint64_t{1} << i;
        first[32 * i + lane] = static_cast<uint8_t>(row);
      }
  }
};

template <int D, int kPer>
__global__ void __launch_bounds__(128)
    select_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap statistics_map,
                  const __grid_constant__ Arguments args) {
  extern __shared__ __align__(1024) unsigned char raw[];
  Smem<D>& smem = *reinterpret_cast<Smem<D>*>(raw);
  const int stride = args.padded + 8;
  __half* scores = reinterpret_cast<__half*>(raw + sizeof(Smem<D>));
  uint8_t* first = reinterpret_cast<uint8_t*>(scores + kSubtileRows * stride);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const SelectItem item = args.items[blockIdx.x];

  if (thread == 0) {
    barrier_init(shared_address(&smem.q_full), 1);
    barrier_init(shared_address(&smem.statistics_full), 1);
    barrier_init_fence();
  }
  for (int j = thread; j < item.competing; j += 128)
    first[j] = item.everything || j < item.sinks || j >= item.competing - item.local ? 0 : kUnchosen;
  __syncthreads();

  const int chunks = item.everything ? 0 : (item.competing + kChunk - 1) / kChunk;
  const auto load_rows = [&](int begin) {
    const uint32_t barrier = shared_address(&smem.q_full);
    barrier_expect(barrier, args.rows.heads * args.rows.tokens * D * 2);
    for (int c = 0; c < D / 64; ++c)
      tensor_load(shared_address(smem.q + c * kSubtileRows * 64), &q_map, c * 64, item.head * args.rows.heads,
                  item.token + begin, barrier);
  };
  const auto load_chunk = [&](int chunk) {
    const uint32_t barrier = shared_address(&smem.statistics_full);
    barrier_expect(barrier, sizeof(smem.statistics));
    for (int c = 0; c < 2 * D / 64; ++c)
      tensor_load(shared_address(smem.statistics + c * kChunk * 64), &statistics_map, c * 64, 0,
                  item.statistics + chunk * kChunk, barrier);
  };
  if (thread == 0 && chunks > 0) {
    load_rows(0);
    load_chunk(0);
  }

  uint32_t q_phase = 0, statistics_phase = 0;
  int chosen = 0;
  Chooser<kPer> chooser{first, lane};
  if (warp == 0) chooser.begin(item.competing);
  for (int begin = 0; begin < item.tokens && chunks > 0; begin += args.rows.tokens) {
    barrier_wait(shared_address(&smem.q_full), q_phase);
    q_phase ^= 1;
    // q², element by element, so the swizzle stays as it is.
    for (int i = thread; i < kSubtileRows * D / 8; i += 128) {
      const uint4 four = reinterpret_cast<const uint4*>(smem.q)[i];
      const uint32_t in[4] = {four.x, four.y, four.z, four.w};
      uint32_t out[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float2 x = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&in[e]));
        out[e] = pack_bf16(x.x * x.x, x.y * x.y);
      }
      reinterpret_cast<uint4*>(smem.q + kSubtileRows * D)[i] = make_uint4(out[0], out[1], out[2], out[3]);
    }
    async_fence();
    __syncthreads();

    float top[2] = {-1e30f, -1e30f}, sum[2] = {0, 0};  // of this thread's columns of two rows
    float reference[2] = {0,
                          0};  // scores are kept relative to one of the row, so that 16 bits are precise near the top
    for (int chunk = 0; chunk < chunks; ++chunk) {
      barrier_wait(shared_address(&smem.statistics_full), statistics_phase);
      statistics_phase ^= 1;
      float s[32];
      const uint64_t a = tile_descriptor(shared_address(smem.q));
      const uint64_t b = tile_descriptor(shared_address(smem.statistics));
      wgmma_fence();
#pragma unroll
      for (int kk = 0; kk < 2 * D / 16; ++kk) {
        const uint32_t at = (kk / 4) * kSubtileRows * 128 + (kk % 4) * 32;
        wgmma_ss<0, 0>(s, further(a, at), further(b, at), kk != 0);
      }
      wgmma_commit();
      wgmma_wait<0>();
      pin(s);
      __syncthreads();  // all have read the chunk: the next may come
      if (thread == 0) {
        const int next = begin + args.rows.tokens;
        if (chunk + 1 < chunks) {
          load_chunk(chunk + 1);
        } else if (next < item.tokens) {
          load_rows(next);
          load_chunk(0);
        }
      }
      const int row = warp * 16 + lane / 4;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float m = -1e30f;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const int column = chunk * kChunk + 8 * (i / 2) + 2 * (lane % 4) + i % 2;
          float& x = s[4 * (i / 2) + 2 * h + i % 2];
          x = column < item.competing ? x - reference[h] : -INFINITY;
          m = fmaxf(m, x);
        }
        if (chunk == 0) {
          m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
          m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
          reference[h] = m;
#pragma unroll
          for (int i = 0; i < 16; ++i) s[4 * (i / 2) + 2 * h + i % 2] -= m;
          m = 0;
        }
        m = fmaxf(m, top[h]);
        float add = 0;
#pragma unroll
        for (int i = 0; i < 16; ++i) add += exp2_fast((s[4 * (i / 2) + 2 * h + i % 2] - m) * kLog2e);
        sum[h] = sum[h] * exp2_fast((top[h] - m) * kLog2e) + add;
        top[h] = m;
#pragma unroll
        for (int j = 0; j < 8; ++j)
          *reinterpret_cast<__half2*>(scores + (row + 8 * h) * stride + chunk * kChunk + 8 * j + 2 * (lane % 4)) =
              __floats2half2_rn(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float m = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 1));
      m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
      float all = sum[h] * exp2_fast((top[h] - m) * kLog2e);
      all += __shfl_xor_sync(~0u, all, 1);
      all += __shfl_xor_sync(~0u, all, 2);
      if (lane % 4 == 0) smem.lse[warp * 16 + lane / 4 + 8 * h] = __float2half2_rn(m + logf(all));
    }
    __syncthreads();

    // The masses of a token, as keys, take the place of its own scores (the upper half when a token has one row only).
    const auto keys_of = [&](int t) {
      const int row = args.rows.heads > 1 ? t * args.rows.heads : kSubtileRows / 2 + 2 * t;
      return reinterpret_cast<uint32_t*>(scores + row * stride);
    };
    const int tokens = min(args.rows.tokens, item.tokens - begin);
    for (int t = warp; t < tokens; t += 4) {
      // Two blocks at a time, in 16 bits, as the scores are.
      __half2 mass[kPer / 2];
#pragma unroll
      for (int i = 0; i < kPer / 2; ++i) mass[i] = __half2half2(__ushort_as_half(0xFC00));  // -infinity
      for (int r = t * args.rows.heads; r < (t + 1) * args.rows.heads; ++r) {
        const __half2* row = reinterpret_cast<const __half2*>(scores + r * stride) + lane;
        const __half2 lse = smem.lse[r];
#pragma unroll
        for (int i = 0; i < kPer / 2; ++i)
          if (64 * i < item.competing) mass[i] = __hmax2(mass[i], __hsub2(row[32 * i], lse));
      }
      __syncwarp();
      uint2* keys = reinterpret_cast<uint2*>(keys_of(t)) + lane;
#pragma unroll
      for (int i = 0; i < kPer / 2; ++i) {
        const int j = 64 * i + 2 * lane;
        const float2 m = __half22float2(mass[i]);
        if (64 * i < item.competing) keys[32 * i] = make_uint2(sort_key(m.x, j), sort_key(m.y, j + 1));
      }
    }
    __syncthreads();
    if (warp == 0) {
      // Token after token: what it would choose, among what nobody before it chose.
      for (int t = 0; t < tokens; ++t) {
        const int allowed = item.first + (item.total - item.first) * (begin + t) / (args.query_block - 1);
        if (allowed > chosen) chooser.choose(keys_of(t), allowed - chosen, begin + t);
        chosen = allowed;
      }
    }
    __syncthreads();
  }
  __syncthreads();

  for (int j = thread; j < item.visible; j += 128) args.map[item.map + j] = j < item.competing ? first[j] : 0;
  if (warp != 0) return;
  int at = item.list_begin;
  for (int base = 0; base < item.visible; base += 32) {
    const int j = base + lane;
    uint8_t by = kUnchosen;
    if (j < item.visible) by = j < item.competing ? first[j] : 0;
    const uint32_t kept = __ballot_sync(~0u, by != kUnchosen);
    if (by != kUnchosen) args.entries[at + __popc(kept & ((1u << lane) - 1))] = list_entry(j, by);
    at += __popc(kept);
  }
}

// A warp a column: counts (entries == nullptr) or writes the query blocks that chose a key block, ascending.
__global__ void __launch_bounds__(256)
    columns_kernel(const SelectColumn* columns, int count, const uint8_t* map, int32_t* offsets, uint32_t* entries) {
  const int id = blockIdx.x * 2 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (id >= count) return;
  const SelectColumn column = columns[id];
  int at = entries != nullptr ? offsets[id] : 0;
  constexpr int kAhead = 8;  // loads in flight
  for (int base = 0; base < column.blocks; base += 32 * kAhead) {
    uint8_t by[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int b = base + 32 * i + lane;
      by[i] = b < column.blocks ? map[column.map + static_cast<int64_t>(b) * column.stride] : kUnchosen;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const uint32_t kept = __ballot_sync(~0u, by[i] != kUnchosen);
      if (entries != nullptr && by[i] != kUnchosen)
        entries[at + __popc(kept & ((1u << lane) - 1))] = list_entry(column.first_block + base + 32 * i + lane, by[i]);
      at += __popc(kept);
    }
  }
  if (entries == nullptr && lane == 0) offsets[id] = at;
}

// Counts to offsets, in place; offsets[count] becomes the total. One thread block.
__global__ void __launch_bounds__(1024) scan_kernel(int32_t* offsets, int count) {
  __shared__ int32_t warp_sums[32];
  int32_t carry = 0;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int base = 0; base < count; base += 1024) {
    const int i = base + threadIdx.x;
    const int32_t own = i < count ? offsets[i] : 0;
    int32_t sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int32_t left = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += left;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    int32_t before = carry, total = carry;
    for (int w = 0; w < 32; ++w) {
      if (w < warp) before += warp_sums[w];
      total += warp_sums[w];
    }
    if (i < count) offsets[i] = before + sum - own;
    carry = total;
    __syncthreads();
  }
  if (threadIdx.x == 0) offsets[count] = carry;
}

template <int D>
void launch(const SelectParams& p, cudaStream_t stream) {
  const int group = p.shape.query_heads / p.shape.kv_heads;
  statistics_kernel<D><<<p.block_count, 256, 0, stream>>>(static_cast<const __nv_bfloat16*>(p.k), p.blocks,
                                                          static_cast<__nv_bfloat16*>(p.statistics), p.shape.kv_heads,
                                                          p.shape.scale);
  check(cudaGetLastError(), "block statistics");
  const int padded = (p.max_competing + kChunk - 1) / kChunk * kChunk;
  const size_t bytes = shared_bytes<D>(padded);
  if (bytes > kSharedMemory) throw_unsupported("blocks to choose among", p.max_competing);
  const Arguments args{row_map({group, p.subtile_tokens, 0, 0}), p.query_block, padded, p.items, p.row_entries, p.map};
  const auto kernel = padded <= 256   ? select_kernel<D, 8>
                      : padded <= 512 ? select_kernel<D, 16>
                                      : select_kernel<D, kMaxCompeting / 32>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
        "shared memory of the selection");
  kernel<<<p.item_count, 128, bytes, stream>>>(
      packed_map(p.q, p.shape.tokens, p.shape.query_heads, D, group, p.subtile_tokens),
      packed_map(p.statistics, p.block_count, 1, 2 * D, 1, kChunk), args);
  check(cudaGetLastError(), "selection");
  const int grid = (p.column_count + 1) / 2;
  columns_kernel<<<grid, 64, 0, stream>>>(p.columns, p.column_count, p.map, p.column_offsets, nullptr);
  scan_kernel<<<1, 1024, 0, stream>>>(p.column_offsets, p.column_count);
  columns_kernel<<<grid, 64, 0, stream>>>(p.columns, p.column_count, p.map, p.column_offsets, p.column_entries);
  check(cudaGetLastError(), "column lists");
}

}  // namespace

void select(const SelectParams& p, void* stream) {
  if (p.shape.head_dim != 64 && p.shape.head_dim != 128) throw_unsupported("head_dim", p.shape.head_dim);
  if (p.query_block < 2) throw_unsupported("query_block", p.query_block);
  if (p.item_count == 0) return;
  if (p.shape.head_dim == 128)
    launch<128>(p, static_cast<cudaStream_t>(stream));
  else
    launch<64>(p, static_cast<cudaStream_t>(stream));
}

}  // namespace sb::hopper
