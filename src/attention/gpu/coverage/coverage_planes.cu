#include "attention/gpu/coverage/coverage_blocks.cuh"
#include "attention/gpu/launch/check.cuh"
#include "device/cuda_floats.cuh"
#include "device/kernel.cuh"

namespace sb::gpu {
namespace {

constexpr int kThreads = 128;

using cuda::to_float;

// The estimates of one key block under one key/value head, for the measured tokens of its sequence that see it: the
// largest product of a token's mean query with one of the keys, the same for all heads of the group.
template <typename T>
__global__ void __launch_bounds__(kThreads) estimates_kernel(const __grid_constant__ CoverageParams args) {
  SB_DYNAMIC_SHARED(float, query);  // [channels]
  SB_SHARED(float, room, [kThreads / 32]);
  const CoverageBlock measured = measured_block(args, blockIdx.x);
  const CoverageSequence sequence = args.sequences[measured.sequence];
  const int block = measured.block, kv = blockIdx.y;
  if (block >= sequence.blocks) return;
  const int d = args.shape.head_dim, group = args.shape.query_heads / args.shape.kv_heads;
  const int first_key = block * args.block, keys = min(args.block, sequence.tokens - first_key);
  const int32_t* channels = args.planes + kv * args.plane_channels;
  const float factor = args.plane_scales[kv] / static_cast<float>(group);
  const auto *q = static_cast<const T*>(args.q), *k = static_cast<const T*>(args.k);
  for (int i = 0; i < sequence.sampled; ++i) {
    if (args.tokens[sequence.first_token + i].position < first_key) continue;  // the same for all threads
    const T* row = q + (query_row(args, sequence, i) * args.shape.query_heads + kv * group) * d;
    for (int c = threadIdx.x; c < args.plane_channels; c += kThreads) {
      float sum = 0;
      for (int head = 0; head < group; ++head) sum += to_float(row[static_cast<int64_t>(head) * d + channels[c]]);
      query[c] = sum * factor;
    }
    __syncthreads();
    float best = -INFINITY;
    for (int key = threadIdx.x; key < keys; key += kThreads) {
      const T* from = k + (static_cast<int64_t>(measured.token + key) * args.shape.kv_heads + kv) * d;
      float score = 0;
      for (int c = 0; c < args.plane_channels; ++c) score += query[c] * to_float(from[channels[c]]);
      best = fmaxf(best, score);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) best = fmaxf(best, __shfl_xor_sync(~0u, best, step));
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = best;
    __syncthreads();
    for (int w = 0; w < kThreads / 32; ++w) best = fmaxf(best, room[w]);
    for (int head = threadIdx.x; head < group; head += kThreads)
      block_triple(args, sequence, i, kv * group + head, block)[2] = best;
    __syncthreads();
  }
}

}  // namespace

void plane_coverage_blocks(const CoverageParams& p, int count, Precision precision, cudaStream_t stream) {
  const auto kernel = precision == Precision::fp32 ? estimates_kernel<float> : estimates_kernel<__nv_bfloat16>;
  launch_kernel(kernel, {dim3(count, p.shape.kv_heads), kThreads, p.plane_channels * sizeof(float), stream}, p);
  check(cudaGetLastError(), "coverage by planes");
}

}  // namespace sb::gpu
