#include "attention/cuda/vertical_slash.h"

#include <cuda_bf16.h>

#include "attention/cuda/check.cuh"
#include "attention/cuda/emit.cuh"

namespace sb::gpu {
namespace {

constexpr int kRows = kSlashChunk;  // queries of the estimate, at most
constexpr int kThreads = 256;       // of a chunk
constexpr int kPickThreads = 1024;

__device__ __forceinline__ float as_float(float x) {
  return x;
}
__device__ __forceinline__ float as_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

// Of a chunk: [row][largest score, sum], then the mass of each key, then the mass by query block (the last, the one
// before it).
struct ChunkValues {
  float* rows;
  float* keys;
  float* blocks;
  __device__ ChunkValues(const SlashParams& args, const SlashSequence& sequence, int head, int chunk)
      : rows(args.chunk_values +
             (sequence.first_chunk + static_cast<int64_t>(head) * sequence.chunks + chunk) * kSlashChunkFloats),
        keys(rows + 2 * kRows),
        blocks(keys + kSlashChunk) {}
};

// Scores of the last queries against 64 keys. First their part of the rows' sums; the second time, when those are
// known, the mass of each key and of the two query blocks that the queries may lie in.
template <typename T, bool kSecond>
__global__ void __launch_bounds__(kThreads) chunks_kernel(const __grid_constant__ SlashParams args) {
  extern __shared__ float shared[];
  const Shape& shape = args.select.shape;
  const int d = shape.head_dim, stride = d + 1, head = blockIdx.y;
  float *q = shared, *k = q + kRows * stride, *s = k + kSlashChunk * stride;  // s [row][65]
  int low = 0, high = args.sequence_count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (args.sequences[middle].chunk_begin <= static_cast<int>(blockIdx.x) ? low : high) = middle;
  }
  const SlashSequence sequence = args.sequences[low];
  const int chunk = blockIdx.x - sequence.chunk_begin, first_key = chunk * kSlashChunk;
  const int rows = min(kRows, sequence.tokens), first_row = sequence.tokens - rows;
  const int kv_head = head / (shape.query_heads / shape.kv_heads);
  for (int i = threadIdx.x; i < kRows * d; i += kThreads) {
    const int r = i / d, c = i % d;
    q[r * stride + c] =
        r < rows
            ? as_float(static_cast<const T*>(
                  args.select
                      .q)[(static_cast<int64_t>(sequence.token + first_row + r) * shape.query_heads + head) * d + c])
            : 0.f;
    k[r * stride + c] =
        first_key + r < sequence.tokens
            ? as_float(static_cast<const T*>(
                  args.select
                      .k)[(static_cast<int64_t>(sequence.token + first_key + r) * shape.kv_heads + kv_head) * d + c])
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

// Log-sum-exp of every row. A thread block a list, a thread a row.
__global__ void __launch_bounds__(kRows) rows_kernel(const __grid_constant__ SlashParams args) {
  const int heads = args.select.shape.query_heads;
  const SlashSequence sequence = args.sequences[blockIdx.x / heads];
  const int head = blockIdx.x % heads, row = threadIdx.x;
  float top = -INFINITY, all = 0;
  for (int chunk = 0; chunk < sequence.chunks; ++chunk) {
    const float* part = ChunkValues(args, sequence, head, chunk).rows + 2 * row;
    if (part[0] == -INFINITY) continue;
    const float m = fmaxf(top, part[0]);
    all = all * expf(top - m) + part[1] * expf(part[0] - m);
    top = m;
  }
  args.row_sums[static_cast<int64_t>(sequence.list + head) * kRows + row] = top + logf(all);
}

// Sums over the thread block, in a fixed order.
struct Reached {
  int count;
  double mass;
};
__device__ Reached sum_block(Reached own) {
  __shared__ int counts[kPickThreads / 32];
  __shared__ double masses[kPickThreads / 32];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    own.count += __shfl_xor_sync(~0u, own.count, step);
    own.mass += __shfl_xor_sync(~0u, own.mass, step);
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) {
    counts[threadIdx.x / 32] = own.count;
    masses[threadIdx.x / 32] = own.mass;
  }
  __syncthreads();
  Reached all{0, 0};
  for (int w = 0; w < kPickThreads / 32; ++w) {
    all.count += counts[w];
    all.mass += masses[w];
  }
  return all;
}
// How many threads before this one have the flag; adds all that do to `total`.
__device__ int count_before(bool flag, int& total) {
  __shared__ int counts[kPickThreads / 32];
  const unsigned set = __ballot_sync(~0u, flag);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();
  if (lane == 0) counts[warp] = __popc(set);
  __syncthreads();
  int before = total + __popc(set & ((1u << lane) - 1)), all = 0;
  for (int w = 0; w < kPickThreads / 32; ++w) {
    if (w < warp) before += counts[w];
    all += counts[w];
  }
  total += all;
  return before;
}

// The fewest of `count` masses that reach `share` of all, `already` counting as reached; at most `most`; larger ones
// first, ties to the first. Calls take(i, how many were taken before it), i ascending.
template <typename Mass, typename Take>
__device__ int fewest_reaching(int count, float share, int most, double already, Mass mass, Take take) {
  const auto reached = [&](uint32_t least) {
    Reached own{0, 0};
    for (int i = threadIdx.x; i < count; i += kPickThreads) {
      const float x = mass(i);
      if (__float_as_uint(x) < least) continue;
      ++own.count;
      own.mass += static_cast<double>(x);
    }
    return sum_block(own);
  };
  most = min(most, count);
  const double wanted = static_cast<double>(share) * (already + reached(0).mass);
  // The largest mass such that all from it on are enough; masses are not negative, so that their bits order them.
  uint32_t least = 0;
  for (int bit = 30; bit >= 0; --bit) {
    const Reached found = reached(least | 1u << bit);
    if (found.count >= most || (share < 1 && already + found.mass >= wanted)) least |= 1u << bit;
  }
  const Reached above = reached(least + 1);
  int ties = most - above.count;
  if (share < 1 && least > 0) {
    const double needed = ceil((wanted - already - above.mass) / static_cast<double>(__uint_as_float(least)));
    ties = min(ties, max(0, static_cast<int>(fmin(needed, 2e9))));
  }
  if (share < 1 && already + above.mass >= wanted) ties = 0;
  int tied = 0, taken = 0;
  for (int base = 0; base < count; base += kPickThreads) {
    const int i = base + threadIdx.x;
    const uint32_t bits = i < count ? __float_as_uint(mass(i)) : 0;
    const bool tie = i < count && bits == least;
    const bool lucky = count_before(tie, tied) < ties && tie;
    const bool chosen = i < count && (bits > least || lucky);
    const int at = count_before(chosen, taken);
    if (chosen) take(i, at);
  }
  return taken;
}

// Columns (y = 0) or diagonals (y = 1) of one list.
__global__ void __launch_bounds__(kPickThreads) pick_kernel(const __grid_constant__ SlashParams args) {
  const int heads = args.select.shape.query_heads, head = blockIdx.x % heads;
  const SlashSequence sequence = args.sequences[blockIdx.x / heads];
  if (blockIdx.y == 0) {
    const GatheredList list = args.gathered.lists[sequence.list + head];
    int32_t* columns = args.columns + list.columns;
    const float* chunks = ChunkValues(args, sequence, head, 0).keys;
    const int taken = fewest_reaching(
        sequence.tokens, args.vertical_coverage, sequence.vertical_cap, 0.0,
        [&](int i) { return chunks[static_cast<int64_t>(i / kSlashChunk) * kSlashChunkFloats + i % kSlashChunk]; },
        [&](int i, int at) { columns[at] = i; });
    for (int i = taken + threadIdx.x; i < list.pieces * kGatheredPiece; i += kPickThreads) columns[i] = kNoColumn;
    return;
  }
  const int64_t first = sequence.first_block + static_cast<int64_t>(head) * sequence.blocks;
  float* distances = args.distances + first;
  uint8_t* slashes = args.slashes + first;
  const int per_block = args.select.select_block / kSlashChunk;
  for (int distance = threadIdx.x; distance < sequence.blocks; distance += kPickThreads) {
    float sum = 0;
    for (int which = 0; which < 2; ++which) {
      const int block = sequence.blocks - 1 - which - distance;
      for (int c = block * per_block; block >= 0 && c < min((block + 1) * per_block, sequence.chunks); ++c)
        sum += ChunkValues(args, sequence, head, c).blocks[which];
    }
    distances[distance] = sum;
    slashes[distance] = distance == 0;
  }
  __syncthreads();
  fewest_reaching(
      sequence.blocks - 1, args.slash_coverage, max(0, sequence.slash_cap - 1), static_cast<double>(distances[0]),
      [&](int i) { return distances[i + 1]; }, [&](int i, int) { slashes[i + 1] = 1; });
}

// A warp a query block: its key blocks, and which columns lie outside of them.
__global__ void __launch_bounds__(32 * kWarps)
    lists_kernel(const __grid_constant__ SlashParams args, const __grid_constant__ ChoiceArguments choice) {
  extern __shared__ uint8_t flags[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, index = blockIdx.x * kWarps + warp;
  if (index >= choice.count) return;
  const SelectItem item = choice.items[index];
  const GatheredList list = args.gathered.lists[item.pool];
  const SlashSequence sequence = args.sequences[item.pool / args.select.shape.query_heads];
  const uint8_t* slashes = args.slashes + sequence.first_block + static_cast<int64_t>(list.head) * sequence.blocks;
  uint8_t* first = flags + warp * choice.warp_bytes;
  const int own_end = (item.position + item.tokens - 1) / choice.select_block + 1;
  for (int j = lane; j < item.competing; j += 32) {
    bool listed = j < item.sinks || j >= item.competing - item.local;
    for (int own = item.competing; own < own_end; ++own) listed = listed || slashes[own - j] != 0;
    first[j] = listed ? 0 : kUnchosen;
  }
  __syncwarp();
  emit(choice, item, first, lane);
  const int row = item.position / choice.query_block;
  unsigned seen = 0;
  for (int piece = 0; piece < list.pieces; ++piece) {
    uint64_t bits = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = args.columns[list.columns + piece * kGatheredPiece + half * 32 + lane];
      const int block = column / choice.select_block;
      const bool alone = column != kNoColumn && block < item.competing && first[block] == kUnchosen;
      bits |= static_cast<uint64_t>(__ballot_sync(~0u, alone)) << (32 * half);
    }
    if (lane == 0) args.bits[list.bits + static_cast<int64_t>(row) * list.pieces + piece] = bits;
    seen += __popcll(bits);
  }
  if (lane == 0 && choice.chosen != nullptr)
    atomicAdd(choice.chosen + 2 * item.length_class + 1, static_cast<unsigned long long>(seen) * item.tokens);
}

template <typename T>
void launch(const SlashParams& p, cudaStream_t stream) {
  const Shape& shape = p.select.shape;
  const int stride = shape.head_dim + 1;
  const int bytes = static_cast<int>(sizeof(float)) * (2 * kRows * stride + kRows * (kSlashChunk + 1));
  for (const auto kernel : {chunks_kernel<T, false>, chunks_kernel<T, true>})
    allow_shared_memory(kernel, bytes, "shared memory of the last queries");
  const dim3 grid(p.head_chunks, shape.query_heads);
  chunks_kernel<T, false><<<grid, kThreads, bytes, stream>>>(p);
  rows_kernel<<<p.lists, kRows, 0, stream>>>(p);
  chunks_kernel<T, true><<<grid, kThreads, bytes, stream>>>(p);
  check(cudaGetLastError(), "masses of columns and diagonals");
}

}  // namespace

void select_vertical_slash(const SlashParams& p, Precision precision, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  check(cudaMemsetAsync(p.select.column_counts, 0, p.select.column_count * sizeof(int32_t), cuda_stream),
        "column counts");
  if (precision == Precision::fp32)
    launch<float>(p, cuda_stream);
  else
    launch<__nv_bfloat16>(p, cuda_stream);
  pick_kernel<<<dim3(p.lists, 2), kPickThreads, 0, cuda_stream>>>(p);
  check(cudaGetLastError(), "choice of columns and diagonals");
  const int items = p.select.batches[0].item_count, warp_bytes = (p.max_blocks + 63) / 64 * 64;
  allow_shared_memory(lists_kernel, kWarps * warp_bytes, "shared memory of the lists");
  lists_kernel<<<(items + kWarps - 1) / kWarps, 32 * kWarps, kWarps * warp_bytes, cuda_stream>>>(
      p, choice_arguments(p.select, 0, items, warp_bytes));
  check(cudaGetLastError(), "lists of columns and diagonals");
}

}  // namespace sb::gpu
