#include <algorithm>
#include <bit>

#include "attention/cuda/choose.cuh"
#include "attention/hopper/launch.cuh"
#include "attention/hopper/tile.cuh"
#include "attention/hopper/wgmma.cuh"

namespace sb::gpu {
namespace {

// Estimated masses of key blocks. A thread block scores 128 or 192 rows at a time, rows being (token, head of the
// group) with the heads padded to a power of two, against 64 key blocks at a time. The queries and their squares stay
// in registers as one operand, the statistics of the key blocks stream through shared memory as the other. Scores wait
// as 16-bit floats, each thread's own, until the sum of their row is known; those that do not fit the shared memory are
// computed a second time. Then the largest of the heads of a token goes to memory.

constexpr int kChunk = 64;  // key blocks scored at a time
constexpr int kMaxStages = 4;

// As many computing warpgroups as there are registers for, and one more, of which one warp loads.
template <int D>
struct Build {
  static constexpr int kGroups = D == 128 ? 2 : 3;
  static constexpr int kConsumers = 128 * kGroups, kThreads = kConsumers + 128;
  static constexpr int kLoading = D == 128 ? 40 : 56, kComputing = D == 128 ? 232 : 152;  // registers
  static constexpr int kKeptBytes = kGroups * kSubtileRows * kChunk * 2;                  // of a chunk's scores
};

// Mean and variance per channel of a key block, times scale and scale²/2: what q and q² are multiplied with. Everything
// is in units of log2.
template <int D, int kTokensOfBlock>
__global__ void __launch_bounds__(256)
    statistics_kernel(const __nv_bfloat16* k, const SelectBlock* blocks, __nv_bfloat16* out, int kv_heads, float scale,
                      float variance_scale, int32_t* column_counts, int column_count) {
  constexpr int kPairs = D / 2;                      // threads of a token
  constexpr int kGroups = 256 / kPairs;              // tokens at a time
  constexpr int kTokens = kTokensOfBlock / kGroups;  // of a thread
  __shared__ float2 partial[kGroups][kPairs];
  for (int i = blockIdx.x * 256 + threadIdx.x; i < column_count; i += gridDim.x * 256) column_counts[i] = 0;
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
  row[kPairs + pair] = pack_bf16(variance.x * variance_scale, variance.y * variance_scale);
}

struct Arguments {
  const __nv_bfloat16* q;
  int32_t query_heads, group;  // group: query heads of a key/value head
  const ScoreItem* items;
  int32_t item_count;
  int32_t stages, kept;  // kept: chunks whose scores wait in shared memory
  uint16_t* masses;
};

struct Barriers {
  uint64_t full[kMaxStages], empty[kMaxStages];
};

template <int D>
constexpr int stage_bytes() {
  return kChunk * 2 * D * 2;
}

// Chunks of an item in the order in which they are multiplied: all of them, then again those that were not kept.
__device__ __forceinline__ int steps_of(int chunks, int kept) {
  return chunks + max(0, chunks - kept);
}
__device__ __forceinline__ int chunk_of(int step, int chunks, int kept) {
  return step < chunks ? step : step - chunks + kept;
}

__device__ __forceinline__ uint32_t half_max(uint32_t a, uint32_t b) {
  const __half2 r = __hmax2(*reinterpret_cast<__half2*>(&a), *reinterpret_cast<__half2*>(&b));
  return *reinterpret_cast<const uint32_t*>(&r);
}
__device__ __forceinline__ __half2 half_exp2(__half2 x) {
  uint32_t y;
  asm("ex2.approx.f16x2 %0, %1;" : "=r"(y) : "r"(*reinterpret_cast<uint32_t*>(&x)));
  return *reinterpret_cast<__half2*>(&y);
}
__device__ __forceinline__ __half2 as_half2(uint32_t x) {
  return *reinterpret_cast<__half2*>(&x);
}
__device__ __forceinline__ uint32_t as_bits(__half2 x) {
  return *reinterpret_cast<uint32_t*>(&x);
}
constexpr uint32_t kHiddenPair = 0xFC00FC00u;  // minus infinity, twice

// kLog: log2 of the row slots a token has.
template <int D, int kLog>
struct Scorer {
  static constexpr int kConsumers = Build<D>::kConsumers;
  static constexpr int kSlots = 1 << kLog;
  static constexpr int kTokens = kSubtileRows / kSlots;  // of a warpgroup
  const Arguments& args;
  Barriers& barriers;
  uint32_t statistics;  // shared addresses
  uint4* kept;          // this thread's: [chunk][4], a thread block's threads apart
  int group, warp, lane;
  Cursor ring;
  uint32_t a[2 * D / 4];  // operand: q, then its square
  uint32_t ahead[D / 4];  // the next item's q
  float reference[2];     // scores are kept relative to one of the row, so that 16 bits are precise near the top
  float top[2], sum[2];   // of this thread's columns of two rows
  __half2 row_lse[2];

  // An item as a thread needs it.
  struct Item {
    int token, tokens, head, competing, stride;
    int64_t masses;
    int later[2];  // of this thread's two rows
  };
  __device__ int token_of(int h) const { return group * kTokens + (warp * 16 + lane / 4 + 8 * h) / kSlots; }
  __device__ Item fetch(int index) const {
    const ScoreItem& item = args.items[min(index, args.item_count - 1)];
    return {item.token,
            item.tokens,
            item.head,
            item.competing,
            item.stride,
            item.masses,
            {item.later[token_of(0)], item.later[token_of(1)]}};
  }

  __device__ void load_ahead(const Item& item) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int head = (warp * 16 + lane / 4 + 8 * h) % kSlots;
      const __nv_bfloat16* row = nullptr;
      if (token_of(h) < item.tokens && head < args.group)
        row = args.q +
              (static_cast<int64_t>(item.token + item.later[h]) * args.query_heads + item.head * args.group + head) * D;
#pragma unroll
      for (int kk = 0; kk < D / 16; ++kk)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          ahead[4 * kk + 2 * half + h] =
              row == nullptr ? 0 : *reinterpret_cast<const uint32_t*>(row + kk * 16 + half * 8 + 2 * (lane % 4));
    }
  }

  __device__ void take_ahead() {
#pragma unroll
    for (int i = 0; i < D / 4; ++i) {
      a[i] = ahead[i];
      const float2 x = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&ahead[i]));
      a[D / 4 + i] = pack_bf16(x.x * x.x, x.y * x.y);
    }
  }

  __device__ void issue(float (&s)[32], int stage) {
    const uint64_t b = tile_descriptor(statistics + stage * stage_bytes<D>());
#pragma unroll
    for (int kk = 0; kk < 2 * D / 16; ++kk)
      wgmma_rs<0>(s, a + 4 * kk, further(b, (kk / 4) * kChunk * 128 + (kk % 4) * 32), kk != 0);
    wgmma_commit();
  }

  __device__ void relative(const float (&s)[32], uint32_t (&x)[2][8]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int j = 0; j < 8; ++j)
        x[h][j] = as_bits(__floats2half2_rn(s[4 * j + 2 * h] - reference[h], s[4 * j + 2 * h + 1] - reference[h]));
  }

  __device__ void hide_tail(uint32_t (&x)[2][8], int left) const {  // left: blocks from this chunk on
    left -= 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint32_t keep = (8 * j < left ? 0xFFFFu : 0u) | (8 * j + 1 < left ? 0xFFFF0000u : 0u);
#pragma unroll
      for (int h = 0; h < 2; ++h) x[h][j] = (x[h][j] & keep) | (kHiddenPair & ~keep);
    }
  }

  // The first look at a chunk: its share of the row's sum; the scores are kept if there is room.
  __device__ void add(const float (&s)[32], int chunk, int competing) {
    if (chunk == 0) {
      // Not even the rounding may show what comes later: columns past the end have no say in the reference.
      const int left = competing - 2 * (lane % 4);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float m = -1e30f;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          m = fmaxf(m, 8 * j < left ? s[4 * j + 2 * h] : -1e30f);
          m = fmaxf(m, 8 * j + 1 < left ? s[4 * j + 2 * h + 1] : -1e30f);
        }
        m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
        reference[h] = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
        top[h] = -6e4f;
        sum[h] = 0;
      }
    }
    uint32_t x[2][8];
    relative(s, x);
    if (competing - chunk * kChunk < kChunk) hide_tail(x, competing - chunk * kChunk);
    if (chunk < args.kept) {
      uint4* to = kept + chunk * 4 * kConsumers;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        to[i * kConsumers] = make_uint4(x[i / 2][4 * (i % 2)], x[i / 2][4 * (i % 2) + 1], x[i / 2][4 * (i % 2) + 2],
                                        x[i / 2][4 * (i % 2) + 3]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t m2 = x[h][0];
#pragma unroll
      for (int j = 1; j < 8; ++j) m2 = half_max(m2, x[h][j]);
      const float2 m1 = __half22float2(as_half2(m2));
      const float m = fmaxf(top[h], fmaxf(m1.x, m1.y));
      const __half2 shift = __float2half2_rn(m);
      __half2 e[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) e[j] = half_exp2(__hsub2(as_half2(x[h][j]), shift));
#pragma unroll
      for (int step = 4; step > 0; step /= 2)
#pragma unroll
        for (int j = 0; j < step; ++j) e[j] = __hadd2(e[j], e[j + step]);
      const float2 added = __half22float2(e[0]);
      sum[h] = sum[h] * exp2_fast(top[h] - m) + (added.x + added.y);
      top[h] = m;
    }
  }

  __device__ void finish_sums() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float m = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 1));
      m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
      float all = sum[h] * exp2_fast(top[h] - m);
      all += __shfl_xor_sync(~0u, all, 1);
      all += __shfl_xor_sync(~0u, all, 2);
      // Padded heads must never win.
      const bool padding = (warp * 16 + lane / 4 + 8 * h) % kSlots >= args.group;
      row_lse[h] = __float2half2_rn(padding ? INFINITY : m + __log2f(all));
    }
  }

  // Reduces x[0..7] over the lanes that hold the heads of a token; each of them ends up with 8 / 2^kSteps column
  // groups: `kept_from` onwards.
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
  __device__ void store(uint32_t (&x)[2][8], const Item& item, int chunk) const {
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

  __device__ void store_kept(const Item& item, int chunk) const {
    const uint4* from = kept + chunk * 4 * kConsumers;
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
  }

  __device__ void step(float (&s)[32], const Item& item, int index, int chunks) {
    const int chunk = chunk_of(index, chunks, args.kept);
    if (index < chunks) {
      add(s, chunk, item.competing);
      if (index + 1 < chunks) return;
      finish_sums();
      for (int c = 0; c < min(chunks, args.kept); ++c) store_kept(item, c);
      return;
    }
    uint32_t x[2][8];
    relative(s, x);
    if (item.competing - chunk * kChunk < kChunk) hide_tail(x, item.competing - chunk * kChunk);
    store(x, item, chunk);
  }

  // Two steps: the second's product runs while the first's scores are worked on. Where there is no second, the product
  // is of whatever lies there: a branch around it would make the compiler serialise the products.
  __device__ void two_steps(const Item& item, int index, int chunks, int steps) {
    float s[2][32];
    Cursor second = ring;
    second.advance(args.stages);
    const bool both = index + 1 < steps;
    barrier_wait(shared_address(&barriers.full[ring.stage]), ring.phase);
    pin(a);
    wgmma_fence();
    issue(s[0], ring.stage);
    if (both) barrier_wait(shared_address(&barriers.full[second.stage]), second.phase);
    issue(s[1], second.stage);
    wgmma_wait<1>();
    pin(s[0]);
    release(barriers.empty[ring.stage], lane);
    step(s[0], item, index, chunks);
    wgmma_wait<0>();
    pin(s[1]);
    ring = second;
    if (!both) return;
    release(barriers.empty[ring.stage], lane);
    ring.advance(args.stages);
    step(s[1], item, index + 1, chunks);
  }

  __device__ void run() {
    // An item is read two rounds before its turn and its queries one round before, so that nobody waits for either.
    Item item = fetch(blockIdx.x), next = fetch(blockIdx.x + gridDim.x);
    load_ahead(item);
    for (int index = blockIdx.x; index < args.item_count; index += gridDim.x) {
      take_ahead();
      const Item after = fetch(index + 2 * gridDim.x);
      load_ahead(next);
      const int chunks = (item.competing + kChunk - 1) / kChunk, steps = steps_of(chunks, args.kept);
      for (int i = 0; i < steps; i += 2) two_steps(item, i, chunks, steps);
      item = next;
      next = after;
    }
  }
};

template <int D, int kLog>
__global__ void __launch_bounds__(Build<D>::kThreads, 1)
    masses_kernel(const __grid_constant__ CUtensorMap statistics_map, const __grid_constant__ Arguments args) {
  constexpr int kConsumers = Build<D>::kConsumers;
  extern __shared__ __align__(1024) unsigned char raw[];
  __shared__ Barriers barriers;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < args.stages; ++i) {
      barrier_init(shared_address(&barriers.full[i]), 1);
      barrier_init(shared_address(&barriers.empty[i]), kConsumers / 32);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const uint32_t statistics = shared_address(raw);
  if (warp >= kConsumers / 32) {
    registers_shrink<Build<D>::kLoading>();
    if (warp > kConsumers / 32) return;
    Cursor ring;
    for (int index = blockIdx.x; index < args.item_count; index += gridDim.x) {
      const ScoreItem item = args.items[index];
      const int chunks = (item.competing + kChunk - 1) / kChunk, steps = steps_of(chunks, args.kept);
      for (int i = 0; i < steps; ++i) {
        barrier_wait(shared_address(&barriers.empty[ring.stage]), ring.phase ^ 1);
        const uint32_t barrier = shared_address(&barriers.full[ring.stage]);
        if (lane == 0) barrier_expect(barrier, stage_bytes<D>());
        __syncwarp();
        if (lane < 2 * D / 64)
          tensor_load(statistics + ring.stage * stage_bytes<D>() + lane * kChunk * 128, &statistics_map, lane * 64, 0,
                      item.statistics + chunk_of(i, chunks, args.kept) * kChunk, barrier);
        ring.advance(args.stages);
      }
    }
  } else {
    registers_grow<Build<D>::kComputing>();
    Scorer<D, kLog> scorer{
        args,     barriers, statistics, reinterpret_cast<uint4*>(raw + args.stages * stage_bytes<D>()) + threadIdx.x,
        warp / 4, warp % 4, lane};
    scorer.run();
  }
}

template <int D, int kLog>
void launch_masses(const SelectParams& p, const SelectBatch& batch, cudaStream_t stream) {
  constexpr int kKeptBytes = Build<D>::kKeptBytes;
  const int chunks = (p.max_competing + kChunk - 1) / kChunk;
  const int limit = static_cast<int>(kSharedMemory) - 1024;
  int stages = D == 128 ? 3 : 4;
  if (stages * stage_bytes<D>() + chunks * kKeptBytes > limit) stages = 2;
  const int kept = std::min(chunks, (limit - stages * stage_bytes<D>()) / kKeptBytes);
  const int bytes = stages * stage_bytes<D>() + kept * kKeptBytes;
  const Arguments args{static_cast<const __nv_bfloat16*>(p.q),
                       p.shape.query_heads,
                       p.shape.query_heads / p.shape.kv_heads,
                       p.scores + batch.score_begin,
                       batch.score_count,
                       stages,
                       kept,
                       p.masses};
  const auto kernel = masses_kernel<D, kLog>;
  allow_shared_memory(kernel, bytes, "shared memory of the masses");
  kernel<<<std::min(batch.score_count, multiprocessors()), Build<D>::kThreads, bytes, stream>>>(
      packed_map(p.statistics, p.block_count, 1, 2 * D, 1, kChunk), args);
  check(cudaGetLastError(), "masses of key blocks");
}

template <int D>
void launch(const SelectParams& p, cudaStream_t stream) {
  if (p.max_competing > 0) {
    const auto kernel = p.select_block == 256 ? statistics_kernel<D, 256> : statistics_kernel<D, 128>;
    kernel<<<p.block_count, 256, 0, stream>>>(
        static_cast<const __nv_bfloat16*>(p.k), p.blocks, static_cast<__nv_bfloat16*>(p.statistics), p.shape.kv_heads,
        p.shape.scale * kLog2e, p.moments ? p.shape.scale * p.shape.scale / 2 * kLog2e : 0.f, p.column_counts,
        p.column_count);
    check(cudaGetLastError(), "block statistics");
  } else {
    check(cudaMemsetAsync(p.column_counts, 0, p.column_count * sizeof(int32_t), stream), "column counts");
  }
  const int log = std::bit_width(static_cast<unsigned>(p.shape.query_heads / p.shape.kv_heads - 1));
  begin_choices(p, stream);
  for (const SelectBatch& batch : p.batches) {
    if (batch.score_count > 0) {
      switch (log) {
        case 0:
          launch_masses<D, 0>(p, batch, stream);
          break;
        case 1:
          launch_masses<D, 1>(p, batch, stream);
          break;
        case 2:
          launch_masses<D, 2>(p, batch, stream);
          break;
        case 3:
          launch_masses<D, 3>(p, batch, stream);
          break;
        default:
          launch_masses<D, 4>(p, batch, stream);
      }
    }
    choose_blocks(p, batch, stream);
  }
  list_columns(p, stream);
}

}  // namespace

int64_t hopper_statistics_bytes(const Shape& shape, int64_t blocks) {
  return blocks * 2 * shape.head_dim * 2;
}

int hopper_score_tokens(const Shape& shape) {
  const unsigned group = shape.query_heads / shape.kv_heads;
  const int warpgroups = shape.head_dim == 128 ? Build<128>::kGroups : Build<64>::kGroups;
  return group > 16 ? 0 : warpgroups * kSubtileRows / static_cast<int>(std::bit_ceil(group));
}

void hopper_select(const SelectParams& p, void* stream) {
  if (p.shape.head_dim != 64 && p.shape.head_dim != 128) throw_unsupported("head_dim", p.shape.head_dim);
  if (hopper_score_tokens(p.shape) == 0)
    throw_unsupported("query heads of a group", p.shape.query_heads / p.shape.kv_heads);
  if (p.shape.head_dim == 128)
    launch<128>(p, static_cast<cudaStream_t>(stream));
  else
    launch<64>(p, static_cast<cudaStream_t>(stream));
}

}  // namespace sb::gpu
