#include <cuda_bf16.h>

#include "attention/cuda/check.cuh"
#include "attention/cuda/portable.cuh"
#include "attention/cuda/slash_masses.cuh"

namespace sb::gpu {
namespace {

constexpr int kRows = kSlashChunk;  // queries of the estimate, at most
constexpr int kThreads = 256;       // of a chunk in fp32
constexpr int kRun = 8;             // chunks of a thread block with tensor cores
constexpr int kRowParts = 16;       // threads that share a row's chunks

__device__ int sequence_of(const SlashParams& args, int chunk) {
  int low = 0, high = args.sequence_count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (args.sequences[middle].chunk_begin <= chunk ? low : high) = middle;
  }
  return low;
}

// Scores of the last queries against 64 keys, in fp32. First their part of the rows' sums; the second time, when those
// are known, the mass of each key and of the two query blocks that the queries may lie in.
template <bool kSecond>
__global__ void __launch_bounds__(kThreads) chunks_kernel(const __grid_constant__ SlashParams args) {
  extern __shared__ float shared[];
  const Shape& shape = args.select.shape;
  const int d = shape.head_dim, stride = d + 1, head = blockIdx.y;
  float *q = shared, *k = q + kRows * stride, *s = k + kSlashChunk * stride;  // s [row][65]
  const SlashSequence sequence = args.sequences[sequence_of(args, blockIdx.x)];
  const int chunk = blockIdx.x - sequence.chunk_begin, first_key = chunk * kSlashChunk;
  const int rows = min(kRows, sequence.tokens), first_row = sequence.tokens - rows;
  const int kv_head = head / (shape.query_heads / shape.kv_heads);
  for (int i = threadIdx.x; i < kRows * d; i += kThreads) {
    const int r = i / d, c = i % d;
    q[r * stride + c] =
        r < rows
            ? static_cast<const float*>(
                  args.select
                      .q)[(static_cast<int64_t>(sequence.token + first_row + r) * shape.query_heads + head) * d + c]
            : 0.f;
    k[r * stride + c] =
        first_key + r < sequence.tokens
            ? static_cast<const float*>(
                  args.select
                      .k)[(static_cast<int64_t>(sequence.token + first_key + r) * shape.kv_heads + kv_head) * d + c]
            : 0.f;
  }
  __syncthreads();
  const int y = threadIdx.x / 16, x = threadIdx.x % 16;
  float sum[4][4] = {};
  for (int c = 0; c < d; ++c) {
    float a[4], b[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = q[(4 * y + i) * stride + c];
      b[i] = k[(x + 16 * i) * stride + c];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) sum[i][j] = fmaf(a[i], b[j], sum[i][j]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = 4 * y + i, key = first_key + x + 16 * j;
      const bool seen = row < rows && key <= first_row + row;
      s[row * (kSlashChunk + 1) + x + 16 * j] = seen ? sum[i][j] * shape.scale : -INFINITY;
    }
  __syncthreads();
  const ChunkValues out(args, sequence, head, chunk);
  const int i = threadIdx.x;
  if constexpr (!kSecond) {
    if (i >= kRows) return;
    float top = -INFINITY, all = 0;
    for (int j = 0; j < kSlashChunk; ++j) top = fmaxf(top, s[i * (kSlashChunk + 1) + j]);
    if (top > -INFINITY)
      for (int j = 0; j < kSlashChunk; ++j) all += expf(s[i * (kSlashChunk + 1) + j] - top);
    out.rows[2 * i] = top;
    out.rows[2 * i + 1] = all;
  } else {
    __shared__ float masses[2][kSlashChunk];
    const float* row_sums = args.row_sums + static_cast<int64_t>(sequence.list + head) * kRows;
    const int last_block = (sequence.tokens - 1) / args.select.select_block;
    if (i < kSlashChunk) {
      float mass[2] = {0, 0};
      for (int r = 0; r < rows; ++r) {
        const float p = expf(s[r * (kSlashChunk + 1) + i] - row_sums[r]);
        mass[(first_row + r) / args.select.select_block == last_block ? 0 : 1] += p;
      }
      out.keys[i] = mass[0] + mass[1];
      masses[0][i] = mass[0];
      masses[1][i] = mass[1];
    }
    __syncthreads();
    if (i < 2) {
      float mass = 0;
      for (int j = 0; j < kSlashChunk; ++j) mass += masses[i][j];
      out.blocks[i] = mass;
    }
  }
}

// Adds up the first 2·kHalf numbers of two lanes, each of which keeps half of them.
template <int kHalf>
__device__ __forceinline__ void add_halves(float (&x)[16], int lane) {
  const bool upper = (lane & 2 * kHalf) != 0;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float mine = upper ? x[i + kHalf] : x[i], theirs = upper ? x[i] : x[i + kHalf];
    x[i] = mine + __shfl_xor_sync(~0u, theirs, 2 * kHalf);
  }
}

// The same in bf16 with tensor cores: four warps, each 16 of the queries, and a few chunks one after the other, the
// next one's keys on their way. Scores in units of log2.
template <int D, bool kSecond>
__global__ void __launch_bounds__(128) tensor_chunks_kernel(const __grid_constant__ SlashParams args) {
  constexpr float kLog2e = 1.4426950408889634f;
  extern __shared__ __align__(16) unsigned char raw[];
  __nv_bfloat16 *q = reinterpret_cast<__nv_bfloat16*>(raw), *k = q + kRows * kTileStride<D>;  // k: two chunks
  __shared__ float key_masses[4][kSlashChunk], block_masses[4][2];
  const Shape& shape = args.select.shape;
  const int head = blockIdx.y, kv_head = head / (shape.query_heads / shape.kv_heads);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int begin = blockIdx.x * kRun, end = min(args.head_chunks, begin + kRun);
  int which = sequence_of(args, begin), loaded = -1;
  SlashSequence sequence = args.sequences[which];
  const auto load_keys = [&](int at) {
    const SlashSequence& of = args.sequences[sequence_of(args, at)];
    const int first_key = (at - of.chunk_begin) * kSlashChunk, token = of.token, tokens = of.tokens;
    load_tile<D>(
        k + at % 2 * kSlashChunk * kTileStride<D>, static_cast<const __nv_bfloat16*>(args.select.k), [&](int r) {
          return first_key + r < tokens ? (static_cast<int64_t>(token + first_key + r) * shape.kv_heads + kv_head) * D
                                        : int64_t{-1};
        });
  };
  load_keys(begin);
  for (int at = begin; at < end; ++at) {
    if (at - sequence.chunk_begin >= sequence.chunks) {
      which = sequence_of(args, at);
      sequence = args.sequences[which];
    }
    const int chunk = at - sequence.chunk_begin, first_key = chunk * kSlashChunk;
    const int rows = min(kRows, sequence.tokens), first_row = sequence.tokens - rows;
    if (which != loaded)
      load_tile<D>(q, static_cast<const __nv_bfloat16*>(args.select.q), [&](int r) {
        return r < rows ? (static_cast<int64_t>(sequence.token + first_row + r) * shape.query_heads + head) * D
                        : int64_t{-1};
      });
    loaded = which;
    copies_done();
    __syncthreads();
    if (at + 1 < end) load_keys(at + 1);
    float s[32];
    product<D, 8>(s, q, warp * 16, k + at % 2 * kSlashChunk * kTileStride<D>, 0);
    const ChunkValues out(args, sequence, head, chunk);
    const int row[2] = {warp * 16 + lane / 4, warp * 16 + lane / 4 + 8};
    const float unit = shape.scale * kLog2e;
    if (rows == kRows && first_key + kSlashChunk - 1 <= first_row) {
#pragma unroll
      for (int i = 0; i < 32; ++i) s[i] *= unit;
    } else {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int r = row[i / 2 % 2], key = first_key + i / 4 * 8 + 2 * (lane % 4) + i % 2;
        s[i] = r < rows && key <= first_row + r ? s[i] * unit : -INFINITY;
      }
    }
    if constexpr (!kSecond) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float top = -INFINITY, all = 0;
#pragma unroll
        for (int i = 0; i < 16; ++i) top = fmaxf(top, s[i / 2 * 4 + 2 * h + i % 2]);
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        const float base = top == -INFINITY ? 0.f : top;
#pragma unroll
        for (int i = 0; i < 16; ++i) all += exp2f(s[i / 2 * 4 + 2 * h + i % 2] - base);
        all += __shfl_xor_sync(~0u, all, 1);
        all += __shfl_xor_sync(~0u, all, 2);
        if (lane % 4 == 0) *reinterpret_cast<float2*>(out.rows + 2 * row[h]) = {top / kLog2e, all};
      }
    } else {
      const float* row_sums = args.row_sums + static_cast<int64_t>(sequence.list + head) * kRows;
      const int last_block = (sequence.tokens - 1) / args.select.select_block;
      const float sums[2] = {row[0] < rows ? row_sums[row[0]] * kLog2e : 0.f,
                             row[1] < rows ? row_sums[row[1]] * kLog2e : 0.f};
      float mass[16], by_row[2] = {0, 0};  // of this lane's keys, over its two rows; of the rows
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int j = i / 2 * 4 + i % 2;
        const float p[2] = {exp2f(s[j] - sums[0]), exp2f(s[j + 2] - sums[1])};
        mass[i] = p[0] + p[1];
        by_row[0] += p[0];
        by_row[1] += p[1];
      }
      float blocks[2] = {0, 0};  // of the two query blocks that the rows may lie in
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const bool last = (first_row + row[h]) / args.select.select_block == last_block;
        blocks[0] += last ? by_row[h] : 0.f;
        blocks[1] += last ? 0.f : by_row[h];
      }
      // Over the lanes that have the other rows; each keeps two of the sixteen keys.
      add_halves<8>(mass, lane);
      add_halves<4>(mass, lane);
      add_halves<2>(mass, lane);
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        blocks[0] += __shfl_xor_sync(~0u, blocks[0], step);
        blocks[1] += __shfl_xor_sync(~0u, blocks[1], step);
      }
      // Index of this lane's first among its sixteen, by the halves it kept.
      const int kept = (lane & 16) / 2 + (lane & 8) / 2 + (lane & 4) / 2;
#pragma unroll
      for (int i = 0; i < 2; ++i) key_masses[warp][(kept + i) / 2 * 8 + 2 * (lane % 4) + (kept + i) % 2] = mass[i];
      if (lane == 0) {
        block_masses[warp][0] = blocks[0];
        block_masses[warp][1] = blocks[1];
      }
      __syncthreads();
      const int i = threadIdx.x;
      if (i < kSlashChunk) out.keys[i] = (key_masses[0][i] + key_masses[1][i]) + (key_masses[2][i] + key_masses[3][i]);
      if (i < 2) out.blocks[i] = (block_masses[0][i] + block_masses[1][i]) + (block_masses[2][i] + block_masses[3][i]);
    }
    __syncthreads();
  }
}

// Log-sum-exp of every row. A thread block a list.
__global__ void __launch_bounds__(kRows* kRowParts) rows_kernel(const __grid_constant__ SlashParams args) {
  __shared__ float2 partial[kRowParts][kRows];
  const int heads = args.select.shape.query_heads;
  const SlashSequence sequence = args.sequences[blockIdx.x / heads];
  const int head = blockIdx.x % heads, row = threadIdx.x % kRows, part = threadIdx.x / kRows;
  float top = -INFINITY, all = 0;
  const auto join = [&](float2 other) {
    const float m = fmaxf(top, other.x);
    if (m == -INFINITY) return;
    all = all * expf(top - m) + other.y * expf(other.x - m);
    top = m;
  };
#pragma unroll 4
  for (int chunk = part; chunk < sequence.chunks; chunk += kRowParts)
    join(*reinterpret_cast<const float2*>(ChunkValues(args, sequence, head, chunk).rows + 2 * row));
  partial[part][row] = {top, all};
  __syncthreads();
  if (part != 0) return;
  for (int other = 1; other < kRowParts; ++other) join(partial[other][row]);
  args.row_sums[static_cast<int64_t>(sequence.list + head) * kRows + row] = top + logf(all);
}

}  // namespace

void slash_masses(const SlashParams& p, Precision precision, cudaStream_t stream) {
  const Shape& shape = p.select.shape;
  const auto both = [&](auto first, auto second, dim3 grid, int threads, int bytes) {
    allow_shared_memory(first, bytes, "shared memory of the last queries");
    allow_shared_memory(second, bytes, "shared memory of the last queries");
    first<<<grid, threads, bytes, stream>>>(p);
    rows_kernel<<<p.lists, kRows * kRowParts, 0, stream>>>(p);
    second<<<grid, threads, bytes, stream>>>(p);
    check(cudaGetLastError(), "masses of columns and diagonals");
  };
  if (precision == Precision::fp32)
    return both(chunks_kernel<false>, chunks_kernel<true>, dim3(p.head_chunks, shape.query_heads), kThreads,
                static_cast<int>(sizeof(float)) * (2 * kRows * (shape.head_dim + 1) + kRows * (kSlashChunk + 1)));
  for_head_dim(shape.head_dim, [&](auto d) {
    constexpr int D = decltype(d)::value;
    both(tensor_chunks_kernel<D, false>, tensor_chunks_kernel<D, true>,
         dim3((p.head_chunks + kRun - 1) / kRun, shape.query_heads), 128, 3 * kRows * kTileStride<D> * 2);
  });
}

}  // namespace sb::gpu
