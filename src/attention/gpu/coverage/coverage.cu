#include "attention/gpu/coverage/coverage.h"

#include <algorithm>

#include "attention/gpu/coverage/coverage_blocks.cuh"
#include "attention/gpu/launch/check.cuh"
#include "attention/gpu/launch/head_dims.h"
#include "device/cuda_floats.cuh"
#include "device/kernel.cuh"

namespace sb::gpu {
namespace {

constexpr int kThreads = 128;      // of a key block
constexpr int kRankThreads = 512;  // of a measured token
constexpr int kHeads = 4;          // scored at a time

struct Four {
  float x[4];
};
__device__ __forceinline__ Four load_four(const float* p) {
  const float4 v = *reinterpret_cast<const float4*>(p);
  return {{v.x, v.y, v.z, v.w}};
}
using cuda::to_float;

// Over the thread block, in a fixed order; everybody gets the result. `room` has a float a warp.
template <typename Join>
__device__ float reduce(float x, float* room, Join join) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = join(x, __shfl_xor_sync(~0u, x, step));
  __syncthreads();
  if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
  __syncthreads();
  x = room[0];
  for (int w = 1; w < static_cast<int>(blockDim.x) / 32; ++w) x = join(x, room[w]);
  return x;
}
__device__ float sum_all(float x, float* room) {
  return reduce(x, room, [](float a, float b) { return a + b; });
}
__device__ float max_all(float x, float* room) {
  return reduce(x, room, [](float a, float b) { return fmaxf(a, b); });
}

// In fp32, one key block under one key/value head, for all measured tokens of its sequence and all heads of the group:
// the largest score, the sum of exponentials relative to it, and the estimate that the selection would make. `at_once`:
// parts of the block whose statistics the shared memory holds; the exact part comes with the first of them.
__global__ void __launch_bounds__(kThreads)
    blocks_kernel(const __grid_constant__ CoverageParams args, const int at_once) {
  SB_DYNAMIC_SHARED(float, shared, 16);  // q of kHeads heads; of every part mean and variance
  SB_SHARED(float, room, [kThreads / 32]);
  const CoverageBlock measured = measured_block(args, blockIdx.x);
  const CoverageSequence sequence = args.sequences[measured.sequence];
  const int block = measured.block, kv = blockIdx.y;
  if (block >= sequence.blocks) return;
  const int d = args.shape.head_dim, group = args.shape.query_heads / args.shape.kv_heads;
  const int first_key = block * args.block, keys = min(args.block, sequence.tokens - first_key);
  const int64_t key_stride = static_cast<int64_t>(args.shape.kv_heads) * d;
  const float* k = static_cast<const float*>(args.k) + measured.token * key_stride + kv * d;
  float *q = shared, *statistics = shared + kHeads * d;
  const int part_tokens = args.block / args.parts;
  const int parts = (keys + part_tokens - 1) / part_tokens;  // that have keys
  for (int first_part = 0; first_part < parts; first_part += at_once) {
    const int now = min(at_once, parts - first_part);
    __syncthreads();
    for (int at = threadIdx.x; at < d * now; at += kThreads) {
      const int c = at % d, begin = (first_part + at / d) * part_tokens, end = min(keys, begin + part_tokens);
      float sum = 0, square = 0;
#pragma unroll 8
      for (int t = begin; t < end; ++t) sum += k[t * key_stride + c];
      sum /= static_cast<float>(end - begin);
#pragma unroll 8
      for (int t = begin; t < end; ++t) {
        const float x = k[t * key_stride + c] - sum;
        square += x * x;
      }
      float* mean = statistics + at / d * 2 * d;
      mean[c] = sum * args.shape.scale;
      mean[d + c] =
          args.moments ? square / static_cast<float>(end - begin) * args.shape.scale * args.shape.scale / 2 : 0.f;
    }
    for (int i = 0; i < sequence.sampled; ++i) {
      const int position = args.tokens[sequence.first_token + i].position;
      if (position < first_key) continue;
      for (int h0 = 0; h0 < group; h0 += kHeads) {
        __syncthreads();
        for (int at = threadIdx.x; at < kHeads * d; at += kThreads) {
          const int head = kv * group + min(h0 + at / d, group - 1);
          q[at] = static_cast<const float*>(
              args.q)[(query_row(args, sequence, i) * args.shape.query_heads + head) * d + at % d];
        }
        __syncthreads();
        float top[kHeads], sum[kHeads];
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          top[h] = -INFINITY;
          sum[h] = 0;
        }
        for (int t = threadIdx.x; first_part == 0 && t < keys && first_key + t <= position; t += kThreads) {
          float s[kHeads] = {};
          for (int c = 0; c < d; c += 4) {
            const Four x = load_four(k + t * key_stride + c);
#pragma unroll
            for (int h = 0; h < kHeads; ++h) {
              const Four y = load_four(q + h * d + c);
#pragma unroll
              for (int e = 0; e < 4; ++e) s[h] = fmaf(x.x[e], y.x[e], s[h]);
            }
          }
#pragma unroll
          for (int h = 0; h < kHeads; ++h) {
            const float x = s[h] * args.shape.scale, m = fmaxf(top[h], x);
            sum[h] = sum[h] * expf(top[h] - m) + expf(x - m);
            top[h] = m;
          }
        }
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          const float m = max_all(top[h], room);
          const float z = sum_all(top[h] == -INFINITY ? 0.f : sum[h] * expf(top[h] - m), room);
          // Of every part, a warp a part; their log-sum-exp.
          const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
          float best = -INFINITY, all = 0;
          for (int part = warp; part < now; part += kThreads / 32) {
            const float* mean = statistics + part * 2 * d;
            float estimate = 0;
            for (int c = lane; c < d; c += 32) {
              const float x = q[h * d + c];
              estimate += x * mean[c] + x * x * mean[d + c];
            }
#pragma unroll
            for (int step = 16; step > 0; step /= 2) estimate += __shfl_xor_sync(~0u, estimate, step);
            const float next = fmaxf(best, estimate);
            all = all * expf(best - next) + expf(estimate - next);
            best = next;
          }
          const float highest = max_all(best, room);
          all = sum_all(lane == 0 && best > -INFINITY ? all * expf(best - highest) : 0.f, room);
          if (threadIdx.x == 0 && h0 + h < group) {
            float* to = block_triple(args, sequence, i, kv * group + h0 + h, block);
            float estimate = highest + logf(all);
            if (first_part == 0) {
              to[0] = m;
              to[1] = z;
            } else {
              const float top_of_both = fmaxf(estimate, to[2]);
              estimate = top_of_both + logf(expf(estimate - top_of_both) + expf(to[2] - top_of_both));
            }
            to[2] = estimate;
          }
        }
      }
    }
  }
}

// One measured token under one key/value head: what its list holds, and the curve over budgets.
template <typename T>
__global__ void __launch_bounds__(kRankThreads) ranks_kernel(const __grid_constant__ CoverageParams args) {
  SB_SHARED(float, room, [kRankThreads / 32]);
  const int number = args.own_tokens != nullptr ? args.own_tokens[blockIdx.x] : blockIdx.x;
  const CoverageToken token = args.tokens[number];
  const CoverageSequence sequence = args.sequences[token.sequence];
  const int kv = blockIdx.y, kv_heads = args.shape.kv_heads, group = args.shape.query_heads / kv_heads;
  const int local = number - sequence.first_token;
  const int tile_begin = token.position / args.query_block * args.query_block;
  const int competing = tile_begin / args.block, seen = token.position / args.block + 1;
  const int row = token.position % args.list_query_block;
  const bool per_query_head = args.list_heads == args.shape.query_heads;
  float* mass = args.ranks + 3 * (sequence.ranks + (static_cast<int64_t>(local) * kv_heads + kv) * sequence.blocks);
  float *key = mass + sequence.blocks, *sorted = key + sequence.blocks;
  const auto forced = [&](int j) { return j < args.sinks || j >= competing - args.local; };
  // What the list of a list head holds of a mass that `of` gives.
  const auto held_by = [&](int list_head, auto of) {
    const CoverageList list = args.lists[static_cast<int64_t>(number) * args.list_heads + list_head];
    const int expand = args.block / args.list_block;
    float sum = 0;
    for (int i = threadIdx.x; i < list.count; i += kRankThreads) {
      const uint32_t entry = args.row_entries[list.begin + i];
      const int id = static_cast<int>(entry_id(entry));
      if (id % expand == 0 && id / expand < seen && static_cast<int>(entry_first(entry)) <= row) sum += of(id / expand);
    }
    return sum_all(sum, room);
  };

  // And its gathered columns; `log_sum` is the row's.
  const auto held_columns = [&](int head, float log_sum) {
    const GatheredList& list = args.gathered.lists[sequence.gathered + head];
    const int d = args.shape.head_dim, lane = threadIdx.x % 32;
    const T* q = static_cast<const T*>(args.q) +
                 (static_cast<int64_t>(sequence.token + token.position) * args.shape.query_heads + head) * d;
    const uint64_t* bits =
        args.gathered.bits + list.bits + static_cast<int64_t>(token.position / args.list_query_block) * list.pieces;
    float sum = 0;
    for (int i = threadIdx.x / 32; i < list.pieces * kGatheredPiece; i += kRankThreads / 32) {
      const int column = args.gathered.columns[list.columns + i];
      if ((bits[i / kGatheredPiece] >> (i % kGatheredPiece) & 1) == 0 || column > token.position) continue;
      const T* k = static_cast<const T*>(args.k) + (static_cast<int64_t>(sequence.token + column) * kv_heads + kv) * d;
      float s = 0;
      for (int c = lane; c < d; c += 32) s += to_float(q[c]) * to_float(k[c]);
#pragma unroll
      for (int step = 16; step > 0; step /= 2) s += __shfl_xor_sync(~0u, s, step);
      if (lane == 0) sum += expf(s * args.shape.scale - log_sum);
    }
    return sum_all(sum, room);
  };

  // Of every query head, a warp each: the log of the row's sum, and of the sum of the estimates.
  SB_DYNAMIC_SHARED(float2, logs, 16);
  const auto triples = [&](int h) { return block_triple(args, sequence, local, kv * group + h, 0); };
  for (int h = threadIdx.x / 32; h < group; h += kRankThreads / 32) {
    const float* from = triples(h);
    const int lane = threadIdx.x % 32;
    float top = -INFINITY, best = -INFINITY, sum = 0, estimates = 0;
    for (int j = lane; j < seen; j += 32) {
      top = fmaxf(top, from[3 * j]);
      if (j < competing) best = fmaxf(best, from[3 * j + 2]);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
      best = fmaxf(best, __shfl_xor_sync(~0u, best, step));
    }
    for (int j = lane; j < seen; j += 32) {
      sum += from[3 * j + 1] * expf(from[3 * j] - top);
      if (j < competing) estimates += expf(from[3 * j + 2] - best);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      sum += __shfl_xor_sync(~0u, sum, step);
      estimates += __shfl_xor_sync(~0u, estimates, step);
    }
    if (lane == 0) logs[h] = {top + logf(sum), best + logf(estimates)};
  }
  __syncthreads();
  const auto own = [&](int h, int j) { return triples(h)[3 * j + 1] * expf(triples(h)[3 * j] - logs[h].x); };
  for (int j = threadIdx.x; j < seen; j += kRankThreads) {
    float all = 0, largest = -INFINITY;
    for (int h = 0; h < group; ++h) {
      all += own(h, j);
      if (j < competing) largest = fmaxf(largest, triples(h)[3 * j + 2] - logs[h].y);
    }
    mass[j] = all;
    key[j] = largest;
    sorted[j] = 0;
  }
  __syncthreads();
  float held = sequence.dense ? static_cast<float>(group) : 0.f;
  if (!sequence.dense && !per_query_head) held = held_by(kv, [&](int j) { return mass[j]; });
  for (int h = 0; h < group && !sequence.dense && per_query_head; ++h) {
    held += held_by(kv * group + h, [&](int j) { return own(h, j); });
    if (sequence.gathered >= 0) held += held_columns(kv * group + h, logs[h].x);
  }

  // Free blocks in the order in which this token would take them: larger estimate first, ties to the lower block.
  const int free_begin = min(args.sinks, competing), free_end = max(free_begin, competing - args.local);
  float given = 0;
  for (int j = threadIdx.x; j < seen; j += kRankThreads) {
    if (j >= competing || forced(j)) {
      given += mass[j];
      continue;
    }
    const float mine = key[j];
    int rank = 0;
    for (int i = free_begin; i < free_end; ++i) rank += key[i] > mine || (key[i] == mine && i < j);
    sorted[rank] = mass[j];
  }
  const float held_mass = sum_all(given, room);  // and everything is sorted
  const int candidates = free_end - free_begin, given_blocks = seen - candidates;
  float* out = args.results + sequence.results + (static_cast<int64_t>(local) * kv_heads + kv) * (1 + sequence.points);
  if (threadIdx.x == 0) out[0] = held;
  // A warp a budget.
  for (int i = threadIdx.x / 32; i < sequence.points; i += kRankThreads / 32) {
    const int until = min(max(args.grid[sequence.grid + i] - given_blocks, 0), candidates);
    float added = 0;
    for (int r = threadIdx.x % 32; r < until; r += 32) added += sorted[r];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) added += __shfl_xor_sync(~0u, added, step);
    if (threadIdx.x % 32 == 0) out[1 + i] = held_mass + added;
  }
}

}  // namespace

void measure_blocks(const CoverageParams& p, Precision precision, void* stream) {
  const int count = p.held != nullptr ? p.held_count : p.blocks;
  if (p.token_count == 0 || count == 0) return;
  if (p.shape.head_dim % kCoverageHeadDimUnit != 0) throw_unsupported("head_dim", p.shape.head_dim);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (precision != Precision::fp32) {
    tensor_coverage_blocks(p, count, cuda_stream);
  } else {
    // More would leave too few thread blocks per multiprocessor.
    const int at_once = std::min(p.parts, std::max(1, 32 * 1024 / (2 * p.shape.head_dim * 4)));
    const size_t bytes = (kHeads + 2 * at_once) * p.shape.head_dim * sizeof(float);
    launch_kernel(blocks_kernel, {dim3(count, p.shape.kv_heads), kThreads, bytes, cuda_stream}, p, at_once);
    check(cudaGetLastError(), "coverage of key blocks");
  }
  if (p.planes != nullptr) plane_coverage_blocks(p, count, precision, cuda_stream);
}

void measure_tokens(const CoverageParams& p, Precision precision, void* stream) {
  const int count = p.own_tokens != nullptr ? p.own_count : p.token_count;
  if (count == 0) return;
  const auto ranks = precision == Precision::fp32 ? ranks_kernel<float> : ranks_kernel<__nv_bfloat16>;
  // For an even number of heads: the compiler reads `logs` in pairs, of 16 bytes, the last of an odd group included.
  const size_t pairs = (p.shape.query_heads / p.shape.kv_heads + 1) / 2;
  launch_kernel(
      ranks,
      {dim3(count, p.shape.kv_heads), kRankThreads, pairs * 2 * sizeof(float2), static_cast<cudaStream_t>(stream)}, p);
  check(cudaGetLastError(), "coverage of tokens");
}

void measure_coverage(const CoverageParams& p, Precision precision, void* stream) {
  measure_blocks(p, precision, stream);
  measure_tokens(p, precision, stream);
}

}  // namespace sb::gpu
