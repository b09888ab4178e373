#include <cuda_bf16.h>

#include <algorithm>
#include <type_traits>

#include "attention/gpu/launch/check.cuh"
#include "attention/gpu/launch/early.cuh"
#include "attention/gpu/portable/portable.cuh"
#include "attention/gpu/select/select_steps.cuh"
#include "attention/gpu/select/slash_masses.cuh"
#include "device/kernel.cuh"

namespace sb::gpu {
namespace {

constexpr int kRows = kSlashChunk;  // queries of the estimate, at most
constexpr int kThreads = 256;       // of a chunk in fp32
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
  SB_DYNAMIC_SHARED(float, shared);
  launch_dependents();
  if constexpr (kSecond) wait_for_dependencies();
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
    SB_SHARED(float, masses, [2][kSlashChunk]);
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

// Rows of a tile to shared memory, by all threads.
template <int D, int kThreadCount, typename Offset>
__device__ __forceinline__ void copy_rows(__nv_bfloat16* to, const __nv_bfloat16* from, Offset offset) {
  constexpr int kPieces = D / 8;
#pragma unroll
  for (int i = threadIdx.x; i < kRows * kPieces; i += kThreadCount) {
    const int row = i / kPieces, piece = i % kPieces;
    const int64_t at = offset(row);
    copy_async(to + row * kTileStride<D> + piece * 8, from + (at < 0 ? 0 : at) + piece * 8, at >= 0);
  }
}

// The same in bf16 with tensor cores: kHeads heads that share their keys, of each two warps with 32 of the queries, and
// a run of chunks one after the other, the next one's keys on their way. Scores in units of log2.
template <int D, int kHeads, bool kSecond>
__global__ void __launch_bounds__(64 * kHeads)
    tensor_chunks_kernel(const __grid_constant__ SlashParams args, const int run) {
  constexpr float kLog2e = 1.4426950408889634f;
  constexpr int kTile = kRows * kTileStride<D>, kCount = 64 * kHeads;
  SB_DYNAMIC_SHARED(unsigned char, raw, 16);
  __nv_bfloat16 *q = reinterpret_cast<__nv_bfloat16*>(raw), *k = q + kHeads * kTile;  // k: two chunks
  SB_SHARED(float, key_masses, [kHeads][2][kSlashChunk]);
  SB_SHARED(float, block_masses, [kHeads][2][2]);
  launch_dependents();
  const Shape& shape = args.select.shape;
  const int group = shape.query_heads / shape.kv_heads, parts = (group + kHeads - 1) / kHeads;
  const int kv_head = blockIdx.y / parts, first_head = blockIdx.y % parts * kHeads;  // of the group
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = warp % 2;
  const int head = kv_head * group + min(first_head + warp / 2, group - 1);
  const bool real = first_head + warp / 2 < group;
  const int begin = blockIdx.x * run, end = min(args.head_chunks, begin + run);
  int which = sequence_of(args, begin), loaded = -1;
  SlashSequence sequence = args.sequences[which];
  const auto load_keys = [&](int at) {
    const SlashSequence& of = args.sequences[sequence_of(args, at)];
    const int first_key = (at - of.chunk_begin) * kSlashChunk, token = of.token, tokens = of.tokens;
    copy_rows<D, kCount>(k + at % 2 * kTile, static_cast<const __nv_bfloat16*>(args.select.k), [&](int r) {
      return first_key + r < tokens ? (static_cast<int64_t>(token + first_key + r) * shape.kv_heads + kv_head) * D
                                    : int64_t{-1};
    });
  };
  load_keys(begin);
  if constexpr (kSecond) wait_for_dependencies();
  for (int at = begin; at < end; ++at) {
    if (at - sequence.chunk_begin >= sequence.chunks) {
      which = sequence_of(args, at);
      sequence = args.sequences[which];
    }
    const int chunk = at - sequence.chunk_begin, first_key = chunk * kSlashChunk;
    const int rows = min(kRows, sequence.tokens), first_row = sequence.tokens - rows;
    if (which != loaded)
      for (int h = 0; h < kHeads; ++h) {
        const int of = kv_head * group + min(first_head + h, group - 1);
        copy_rows<D, kCount>(q + h * kTile, static_cast<const __nv_bfloat16*>(args.select.q), [&](int r) {
          return r < rows ? (static_cast<int64_t>(sequence.token + first_row + r) * shape.query_heads + of) * D
                          : int64_t{-1};
        });
      }
    loaded = which;
    copies_done();
    __syncthreads();
    if (at + 1 < end) load_keys(at + 1);
    float s[2][32] = {};
    {
      const uint32_t from_a = window(q + warp / 2 * kTile + (half * 32 + lane % 16) * kTileStride<D> + lane / 16 * 8);
      const uint32_t from_b =
          window(k + at % 2 * kTile + ((lane & 7) + (lane >> 4) * 8) * kTileStride<D> + ((lane >> 3) & 1) * 8);
#pragma unroll
      for (int kk = 0; kk < D / 16; ++kk) {
        uint32_t x[2][4];
        matrix_load(x[0], from_a + kk * 32);
        matrix_load(x[1], from_a + 16 * kTileStride<D> * 2 + kk * 32);
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
          uint32_t y[4];
          matrix_load(y, from_b + j * 8 * kTileStride<D> * 2 + kk * 32);
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            multiply(s[m] + 4 * j, x[m], y[0], y[1]);
            multiply(s[m] + 4 * j + 4, x[m], y[2], y[3]);
          }
        }
      }
    }
    const ChunkValues out(args, sequence, head, chunk);
    // Row h of the 16 · m: half · 32 + 16 · m + 8 · h + lane / 4.
    const auto row_of = [&](int m, int h) { return half * 32 + 16 * m + 8 * h + lane / 4; };
    const float unit = shape.scale * kLog2e;
    const bool whole = rows == kRows && first_key + kSlashChunk - 1 <= first_row;
    if (!whole)
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int i = 0; i < 32; ++i) {
          const int r = row_of(m, i / 2 % 2), key = first_key + i / 4 * 8 + 2 * (lane % 4) + i % 2;
          if (r >= rows || key > first_row + r) s[m][i] = -INFINITY;
        }
    if constexpr (!kSecond) {
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float top = -INFINITY, all = 0;
#pragma unroll
          for (int i = 0; i < 16; ++i) top = fmaxf(top, s[m][i / 2 * 4 + 2 * h + i % 2]);
          top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
          top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
          top *= unit;
          const float base = top == -INFINITY ? 0.f : top;
#pragma unroll
          for (int i = 0; i < 16; ++i) all += exp2_fast(fmaf(s[m][i / 2 * 4 + 2 * h + i % 2], unit, -base));
          all += __shfl_xor_sync(~0u, all, 1);
          all += __shfl_xor_sync(~0u, all, 2);
          if (lane % 4 == 0 && real) *reinterpret_cast<float2*>(out.rows + 2 * row_of(m, h)) = {top / kLog2e, all};
        }
    } else {
      const float* row_sums = args.row_sums + static_cast<int64_t>(sequence.list + head) * kRows;
      const int last_block = (sequence.tokens - 1) / args.select.select_block;
      float mass[16] = {};       // of this lane's keys, over its four rows
      float blocks[2] = {0, 0};  // of the two query blocks that the rows may lie in
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int r = row_of(m, h);
          const float base = r < rows ? row_sums[r] * kLog2e : 0.f;
          float by_row = 0;
#pragma unroll
          for (int i = 0; i < 16; ++i) {
            const float p = exp2_fast(fmaf(s[m][i / 2 * 4 + 2 * h + i % 2], unit, -base));
            mass[i] += p;
            by_row += p;
          }
          const bool last = (first_row + r) / args.select.select_block == last_block;
          blocks[0] += last ? by_row : 0.f;
          blocks[1] += last ? 0.f : by_row;
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
      for (int i = 0; i < 2; ++i)
        key_masses[warp / 2][half][(kept + i) / 2 * 8 + 2 * (lane % 4) + (kept + i) % 2] = mass[i];
      if (lane == 0) {
        block_masses[warp / 2][half][0] = blocks[0];
        block_masses[warp / 2][half][1] = blocks[1];
      }
      __syncthreads();
      const int i = threadIdx.x % 64, h = threadIdx.x / 64;
      if (real) {
        out.keys[i] = key_masses[h][0][i] + key_masses[h][1][i];
        if (i < 2) out.blocks[i] = block_masses[h][0][i] + block_masses[h][1][i];
      }
    }
    __syncthreads();
  }
}

// Log-sum-exp of every row. A thread block a list.
__global__ void __launch_bounds__(kRows* kRowParts) rows_kernel(const __grid_constant__ SlashParams args) {
  SB_SHARED(float2, partial, [kRowParts][kRows]);
  launch_dependents();
  wait_for_dependencies();
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
#pragma unroll 8
  for (int chunk = part; chunk < sequence.chunks; chunk += kRowParts)
    join(*reinterpret_cast<const float2*>(ChunkValues(args, sequence, head, chunk).rows + 2 * row));
  partial[part][row] = {top, all};
  __syncthreads();
  if (part != 0) return;
  for (int other = 1; other < kRowParts; ++other) join(partial[other][row]);
  args.row_sums[static_cast<int64_t>(sequence.list + head) * kRows + row] = top + logf(all);
}

int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  check(cudaGetDevice(&device), "the device");
  check(cudaDeviceGetAttribute(&value, attribute, device), "what the device has");
  return value;
}
int multiprocessor_count() {
  return device_attribute(cudaDevAttrMultiProcessorCount);
}
int multiprocessor_memory() {
  return device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
}

}  // namespace

void slash_masses(const SlashParams& p, Precision precision, cudaStream_t stream) {
  const Shape& shape = p.select.shape;
  const auto both = [&](auto first, auto second, dim3 grid, int threads, int bytes, auto... more) {
    allow_shared_memory(first, bytes, "shared memory of the last queries");
    allow_shared_memory(second, bytes, "shared memory of the last queries");
    launch_kernel(first, {grid, threads, bytes, stream}, p, more...);
    launch_after(rows_kernel, {p.lists, kRows * kRowParts, 0, stream}, p);
    launch_after(second, {grid, threads, bytes, stream}, p, more...);
    check(cudaGetLastError(), "masses of columns and diagonals");
  };
  if (precision == Precision::fp32)
    return both(chunks_kernel<false>, chunks_kernel<true>, dim3(p.head_chunks, shape.query_heads), kThreads,
                static_cast<int>(sizeof(float)) * (2 * kRows * (shape.head_dim + 1) + kRows * (kSlashChunk + 1)));
  for_head_dim(shape.head_dim, [&](auto d) {
    constexpr int D = decltype(d)::value;
    const auto by_heads = [&](auto heads) {
      constexpr int kHeads = decltype(heads)::value, kBytes = (kHeads + 2) * kRows * kTileStride<D> * 2;
      const int group = shape.query_heads / shape.kv_heads, columns = shape.kv_heads * ((group + kHeads - 1) / kHeads);
      // As many thread blocks as run at a time, of long sequences more.
      const int slots = multiprocessor_count() * std::clamp(multiprocessor_memory() / (kBytes + 3072), 1, 8 / kHeads);
      const int run = std::clamp(static_cast<int>((int64_t{p.head_chunks} * columns + slots - 1) / slots), 2, 16);
      both(tensor_chunks_kernel<D, kHeads, false>, tensor_chunks_kernel<D, kHeads, true>,
           dim3((p.head_chunks + run - 1) / run, columns), 64 * kHeads, kBytes, run);
    };
    if (shape.query_heads == shape.kv_heads) return by_heads(std::integral_constant<int, 1>());
    by_heads(std::integral_constant<int, 2>());
  });
}

}  // namespace sb::gpu
