#include <cuda_bf16.h>

#include "attention/cuda/check.cuh"
#include "attention/cuda/choose.cuh"

namespace sb::gpu {
namespace {

// Estimated masses with plain arithmetic, on any GPU and for any shape. A thread looks after every 128th key block and
// scores up to 16 tokens of one query head at a time, twice: for the sum of their rows, and for the masses.

constexpr int kThreads = 128;
constexpr int kTokens = kPortableScoreTokens;
constexpr float kLog2e = 1.4426950408889634f;

__device__ __forceinline__ float to_float(float x) {
  return x;
}
__device__ __forceinline__ float to_float(__nv_bfloat16 x) {
  return __bfloat162float(x);
}

// Mean and variance per channel of every key block: [2 d][blocks], so that neighbouring threads read neighbouring
// blocks.
template <typename T>
__global__ void statistics_kernel(const T* k, const SelectBlock* blocks, float* out, int count, int d, int kv_heads,
                                  float mean_scale, float variance_scale) {
  const SelectBlock block = blocks[blockIdx.x];
  for (int c = threadIdx.x; c < d; c += blockDim.x) {
    const T* column = k + (static_cast<int64_t>(block.token) * kv_heads + block.head) * d + c;
    float mean = 0, variance = 0;
    for (int t = 0; t < block.keys; ++t) mean += to_float(column[static_cast<int64_t>(t) * kv_heads * d]);
    mean /= static_cast<float>(block.keys);
    for (int t = 0; t < block.keys; ++t) {
      const float x = to_float(column[static_cast<int64_t>(t) * kv_heads * d]) - mean;
      variance += x * x;
    }
    out[static_cast<int64_t>(c) * count + blockIdx.x] = mean * mean_scale;
    out[static_cast<int64_t>(d + c) * count + blockIdx.x] = variance / static_cast<float>(block.keys) * variance_scale;
  }
}

struct Arguments {
  const void* q;
  const float* statistics;
  int32_t blocks, d, query_heads, group;
  const ScoreItem* items;
  uint16_t* masses;
};

template <typename T>
__global__ void __launch_bounds__(kThreads) masses_kernel(Arguments args) {
  extern __shared__ float q[];  // [2 d][token]: q, then its square
  __shared__ float row_max[kThreads / 32][kTokens], row_sum[kThreads / 32][kTokens];
  const ScoreItem& item = args.items[blockIdx.x];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, d = args.d;
  const auto score = [&](int j, float(&s)[kTokens]) {
#pragma unroll
    for (int t = 0; t < kTokens; ++t) s[t] = 0;
    const float* column = args.statistics + item.statistics + j;
    for (int c = 0; c < 2 * d; ++c) {
      const float x = column[static_cast<int64_t>(c) * args.blocks];
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
  for (int head = 0; head < args.group; ++head) {
    __syncthreads();
    for (int i = thread; i < kTokens * d; i += kThreads) {
      const int t = i / d, c = i % d;
      float x = 0;
      if (t < item.tokens)
        x = to_float(
            static_cast<const T*>(args.q)[(static_cast<int64_t>(item.token + item.later[t]) * args.query_heads +
                                           item.head * args.group + head) *
                                              d +
                                          c]);
      q[c * kTokens + t] = x;
      q[(d + c) * kTokens + t] = x * x;
    }
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
void launch(const SelectParams& p, cudaStream_t stream) {
  const int d = p.shape.head_dim;
  check(cudaMemsetAsync(p.column_counts, 0, p.column_count * sizeof(int32_t), stream), "column counts");
  if (p.max_competing > 0) {
    statistics_kernel<T><<<p.block_count, 128, 0, stream>>>(
        static_cast<const T*>(p.k), p.blocks, static_cast<float*>(p.statistics), p.block_count, d, p.shape.kv_heads,
        p.shape.scale, p.moments ? p.shape.scale * p.shape.scale / 2 : 0.f);
    check(cudaGetLastError(), "block statistics");
  }
  begin_choices(p, stream);
  for (const SelectBatch& batch : p.batches) {
    if (batch.score_count > 0) {
      const Arguments args{p.q,
                           static_cast<const float*>(p.statistics),
                           p.block_count,
                           d,
                           p.shape.query_heads,
                           p.shape.query_heads / p.shape.kv_heads,
                           p.scores + batch.score_begin,
                           p.masses};
      masses_kernel<T><<<batch.score_count, kThreads, 2 * d * kTokens * sizeof(float), stream>>>(args);
      check(cudaGetLastError(), "masses of key blocks");
    }
    choose_blocks(p, batch, stream);
  }
  list_columns(p, stream);
}

}  // namespace

int64_t portable_statistics_bytes(const Shape& shape, int64_t blocks) {
  return blocks * 2 * shape.head_dim * static_cast<int64_t>(sizeof(float));
}

void portable_select(const SelectParams& p, Precision precision, void* stream) {
  if (p.shape.head_dim > 256) throw_unsupported("head_dim", p.shape.head_dim);
  if (precision == Precision::fp32)
    launch<float>(p, static_cast<cudaStream_t>(stream));
  else
    launch<__nv_bfloat16>(p, static_cast<cudaStream_t>(stream));
}

}  // namespace sb::gpu
