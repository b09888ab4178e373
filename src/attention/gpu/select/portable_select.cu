#include "attention/gpu/launch/check.cuh"
#include "attention/gpu/select/select_steps.cuh"
#include "device/cuda_floats.cuh"
#include "device/kernel.cuh"

namespace sb::gpu {
namespace {

// Estimated masses with plain arithmetic, on any GPU and for any shape. A thread looks after every 128th key block and
// scores up to 16 tokens of one query head at a time, twice: for the sum of their rows, and for the masses.

constexpr int kThreads = 128;
constexpr int kTokens = kPortableScoreTile.tokens;
constexpr float kLog2e = 1.4426950408889634f;

using cuda::to_float;

// Mean and variance per channel of every part of the key blocks: [channels of a row][rows], so that neighbouring
// threads read neighbouring blocks. Parts without keys never compete.
template <typename T>
__global__ void statistics_kernel(const T* k, const SelectBlock* blocks, float* out, int64_t rows, int d, int kv_heads,
                                  int parts, int part_tokens, float mean_scale, float variance_scale, bool variances) {
  const SelectBlock block = blocks[blockIdx.x];
  for (int i = threadIdx.x; i < d * parts; i += blockDim.x) {
    const int c = i % d, part = i / d;
    const int keys = min(part_tokens, block.keys - part * part_tokens);
    if (keys <= 0) return;
    const T* column = k + (static_cast<int64_t>(block.token + part * part_tokens) * kv_heads + block.head) * d + c;
    float mean = 0, variance = 0;
    for (int t = 0; t < keys; ++t) mean += to_float(column[static_cast<int64_t>(t) * kv_heads * d]);
    mean /= static_cast<float>(keys);
    float* to = out + block.row + part * kStatisticsGroup;
    to[c * rows] = mean * mean_scale;
    if (!variances) continue;
    for (int t = 0; t < keys; ++t) {
      const float x = to_float(column[static_cast<int64_t>(t) * kv_heads * d]) - mean;
      variance += x * x;
    }
    to[(d + c) * rows] = variance / static_cast<float>(keys) * variance_scale;
  }
}

// Score `planes`: the channels that count of every key, likewise [channel][rows], as they are.
template <typename T>
__global__ void gather_keys_kernel(const T* k, const SelectBlock* blocks, const int32_t* planes, int channels,
                                   float* out, int64_t rows, int d, int kv_heads) {
  const SelectBlock block = blocks[blockIdx.x];
  for (int i = threadIdx.x; i < channels * block.keys; i += blockDim.x) {
    const int c = i % channels, key = i / channels;
    const T* from = k + (static_cast<int64_t>(block.token + key) * kv_heads + block.head) * d;
    out[c * rows + block.row + static_cast<int64_t>(key) * kStatisticsGroup] =
        to_float(from[planes[block.head * channels + c]]);
  }
}

struct Arguments {
  const void* q;
  const float* statistics;
  int64_t rows;  // of the statistics
  int32_t depth, parts;
  int32_t d, query_heads, group;
  const ScoreItem* items;
  const ScoreToken* score_rows;
  uint16_t* masses;
  const int32_t* planes;  // score `planes`: [kv_heads, depth]; then the group has one query, the mean
  const float* plane_scales;
};

template <typename T, bool kPlanes>
__global__ void __launch_bounds__(kThreads) masses_kernel(Arguments args) {
  SB_DYNAMIC_SHARED(float, q, 16);  // [2 d][token]: q, then its square; kPlanes: [depth][token]
  SB_SHARED(float, row_max, [kThreads / 32][kTokens]);
  SB_SHARED(float, row_sum, [kThreads / 32][kTokens]);
  const ScoreItem& item = args.items[blockIdx.x];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, d = args.d;
  const auto multiply = [&](const float* column, float(&s)[kTokens]) {
#pragma unroll
    for (int t = 0; t < kTokens; ++t) s[t] = 0;
    for (int c = 0; c < args.depth; ++c) {
      const float x = column[c * args.rows];
      const float4* row = reinterpret_cast<const float4*>(q + c * kTokens);
#pragma unroll
      for (int t = 0; t < kTokens / 4; ++t) {
        const float4 four = row[t];
        s[4 * t] += four.x * x;
        s[4 * t + 1] += four.y * x;
        s[4 * t + 2] += four.z * x;
        s[4 * t + 3] += four.w * x;
      }
    }
  };
  // The log of the sum over the parts of key block j; kPlanes: the largest.
  const auto score = [&](int j, float(&s)[kTokens]) {
    const float* column = args.statistics + item.statistics + j % kStatisticsGroup +
                          static_cast<int64_t>(j / kStatisticsGroup) * args.parts * kStatisticsGroup;
    multiply(column, s);
    if (args.parts == 1) return;
    float sum[kTokens];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) sum[t] = 1;
    for (int part = 1; part < args.parts; ++part) {
      float x[kTokens];
      multiply(column + part * kStatisticsGroup, x);
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        const float top = fmaxf(s[t], x[t]);
        if constexpr (!kPlanes) sum[t] = sum[t] * expf(s[t] - top) + expf(x[t] - top);
        s[t] = top;
      }
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) s[t] += kPlanes ? 0 : logf(sum[t]);
  };
  // Of the group's first query head.
  const auto query_of = [&](int t) {
    const int64_t token = item.token + args.score_rows[blockIdx.x * kTokens + t].later;
    return static_cast<const T*>(args.q) + (token * args.query_heads + item.head * args.group) * d;
  };
  const auto load_head = [&](int head) {
    for (int i = thread; i < kTokens * d; i += kThreads) {
      const int t = i / d, c = i % d;
      const float x = t < item.tokens ? to_float(query_of(t)[head * d + c]) : 0;
      q[c * kTokens + t] = x;
      q[(d + c) * kTokens + t] = x * x;
    }
  };
  const auto load_mean = [&] {
    const float factor = args.plane_scales[item.head] / static_cast<float>(args.group);
    for (int i = thread; i < kTokens * args.depth; i += kThreads) {
      const int t = i / args.depth, c = i % args.depth;
      float x = 0;
      for (int head = 0; head < args.group && t < item.tokens; ++head)
        x += to_float(query_of(t)[head * d + args.planes[item.head * args.depth + c]]);
      q[c * kTokens + t] = x * factor;
    }
  };
  for (int head = 0; head < (kPlanes ? 1 : args.group); ++head) {
    __syncthreads();
    if constexpr (kPlanes)
      load_mean();
    else
      load_head(head);
    __syncthreads();
    float top[kTokens], sum[kTokens];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      top[t] = -1e30f;
      sum[t] = 0;
    }
    for (int j = thread; j < item.competing; j += kThreads) {
      float s[kTokens];
      score(j, s);
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        const float m = fmaxf(top[t], s[t]);
        sum[t] = sum[t] * expf(top[t] - m) + expf(s[t] - m);
        top[t] = m;
      }
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(~0u, top[t], step), others = __shfl_xor_sync(~0u, sum[t], step);
        const float m = fmaxf(top[t], other);
        sum[t] = sum[t] * expf(top[t] - m) + others * expf(other - m);
        top[t] = m;
      }
      if (lane == 0) {
        row_max[warp][t] = top[t];
        row_sum[warp][t] = sum[t];
      }
    }
    __syncthreads();
    float lse[kTokens];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      float m = -1e30f, all = 0;
#pragma unroll
      for (int w = 0; w < kThreads / 32; ++w) m = fmaxf(m, row_max[w][t]);
#pragma unroll
      for (int w = 0; w < kThreads / 32; ++w) all += row_sum[w][t] * expf(row_max[w][t] - m);
      lse[t] = m + logf(all);
    }
    for (int j = thread; j < item.competing; j += kThreads) {
      float s[kTokens];
      score(j, s);
#pragma unroll
      for (int t = 0; t < kTokens; ++t) {
        if (t >= item.tokens) continue;
        uint16_t& to = args.masses[item.masses + static_cast<int64_t>(t) * item.stride + j];
        const uint32_t mass = ordered(__half_as_ushort(__float2half_rn((s[t] - lse[t]) * kLog2e))) & 0xFFFF;
        to = static_cast<uint16_t>(head == 0 ? mass : max(mass, static_cast<uint32_t>(to)));
      }
    }
  }
}

template <typename T>
void launch_statistics(const SelectParams& p, cudaStream_t stream) {
  if (p.block_count == 0) return;
  if (p.plane_depth > 0) {
    launch_kernel(gather_keys_kernel<T>, {p.block_count, 256, 0, stream}, static_cast<const T*>(p.k), p.blocks,
                  p.planes, p.plane_depth, static_cast<float*>(p.statistics), p.statistics_rows, p.shape.head_dim,
                  p.shape.kv_heads);
    check(cudaGetLastError(), "channels of keys");
    return;
  }
  launch_kernel(statistics_kernel<T>, {p.block_count, 128, 0, stream}, static_cast<const T*>(p.k), p.blocks,
                static_cast<float*>(p.statistics), p.statistics_rows, p.shape.head_dim, p.shape.kv_heads, p.parts,
                p.select_block / p.parts, p.shape.scale, p.moments ? p.shape.scale * p.shape.scale / 2 : 0.f,
                p.statistics_channels == 2);
  check(cudaGetLastError(), "block statistics");
}

template <typename T>
void launch(const SelectParams& p, cudaStream_t stream) {
  const int d = p.shape.head_dim;
  if (p.max_competing > 0 && !p.statistics_given) launch_statistics<T>(p, stream);
  begin_selection(p, stream);
  for (const SelectBatch& batch : p.batches) {
    if (batch.score_count > 0) {
      const Arguments args{p.q,
                           static_cast<const float*>(p.statistics),
                           p.statistics_rows,
                           p.row_width,
                           p.parts,
                           d,
                           p.shape.query_heads,
                           p.shape.query_heads / p.shape.kv_heads,
                           p.scores + batch.score_begin,
                           p.score_rows + int64_t{batch.score_begin} * kTokens,
                           p.masses,
                           p.planes,
                           p.plane_scales};
      if (p.plane_depth > 0)
        launch_kernel(masses_kernel<T, true>,
                      {batch.score_count, kThreads, p.plane_depth * kTokens * sizeof(float), stream}, args);
      else
        launch_kernel(masses_kernel<T, false>, {batch.score_count, kThreads, 2 * d * kTokens * sizeof(float), stream},
                      args);
      check(cudaGetLastError(), "masses of key blocks");
    }
    select_blocks(p, batch, stream, false);
  }
  finish_selection(p, stream);
}

}  // namespace

int64_t portable_statistics_bytes(const Shape& shape, const SelectPlan& plan) {
  return int64_t{plan.statistics_rows} * plan.row_width * static_cast<int64_t>(sizeof(float));
}

void portable_block_statistics(const SelectParams& p, Precision precision, void* stream) {
  if (precision == Precision::fp32)
    launch_statistics<float>(p, static_cast<cudaStream_t>(stream));
  else
    launch_statistics<__nv_bfloat16>(p, static_cast<cudaStream_t>(stream));
}

void portable_select(const SelectParams& p, Precision precision, void* stream) {
  if (p.shape.head_dim > 256) throw_unsupported("head_dim", p.shape.head_dim);
  if (precision == Precision::fp32)
    launch<float>(p, static_cast<cudaStream_t>(stream));
  else
    launch<__nv_bfloat16>(p, static_cast<cudaStream_t>(stream));
}

}  // namespace sb::gpu
