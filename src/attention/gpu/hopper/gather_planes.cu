#include "attention/gpu/hopper/masses.cuh"
#include "device/kernel.cuh"

namespace sb::gpu {
namespace {

// What the score by planes multiplies: of every key the channels that count, in the layout of the statistics, and of
// every token that is scored the mean query of its group over the same channels, times the scale; as 16-bit floats,
// which hold more of them than bf16 does once the mean is taken from the keys. A thread block has one key block, or
// some tokens of a score item.
constexpr int kThreads = 256;
constexpr int kTokens = 32;  // of a thread block
static_assert(kPlaneRows % kTokens == 0);

struct Arguments {
  const __nv_bfloat16 *q, *k;
  int32_t query_heads, kv_heads;
  const int32_t* planes;  // [kv_heads, channels]
  const float* scales;
  const float* key_means;  // [kv_heads, channels]
  int32_t channels;
  const SelectBlock* blocks;
  int32_t block_count;
  __half* keys;
  const ScoreItem* items;
  const ScoreToken* rows;
  __half* queries;  // [tokens, kv_heads, kDepth]
};

__device__ __forceinline__ uint32_t pack_half(float low, float high) {
  const auto finite = [](float x) { return fminf(fmaxf(x, -kLargestHalf), kLargestHalf); };
  return as_bits(__floats2half2_rn(finite(low), finite(high)));
}

// A thread has eight channels of every so many keys: those that the queries' operand has in one thread, see
// statistics_pair().
template <int D, int kDepth>
__device__ void gather_keys(const Arguments& args, const SelectBlock& block) {
  constexpr int kKeys = kPlaneRowWidth / kDepth;  // of a row
  constexpr int kPieces = kDepth / 8, kAtOnce = kThreads / kPieces;
  const int piece = threadIdx.x % kPieces;
  int source[8];
  float mean[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int pair = piece / 4 * 16 + i / 2 * 4 + piece % 4;
    const int index = 2 * pair + i % 2;
    const bool counts = index < args.channels;
    source[i] = counts ? args.planes[block.head * args.channels + index] : -1;
    mean[i] = counts ? args.key_means[block.head * args.channels + index] : 0.0f;
  }
#pragma unroll 2
  for (int key = threadIdx.x / kPieces; key < block.keys; key += kAtOnce) {
    const auto* from = reinterpret_cast<const uint16_t*>(args.k) +
                       (static_cast<int64_t>(block.token + key) * args.kv_heads + block.head) * D;
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = source[i] < 0 ? 0.0f : low_bf16(from[source[i]]) - mean[i];
    __half* row = args.keys + static_cast<int64_t>(block.row + key / kKeys * kStatisticsGroup) * kPlaneRowWidth;
    *reinterpret_cast<uint4*>(row + key % kKeys * kDepth + 8 * piece) =
        make_uint4(pack_half(x[0], x[1]), pack_half(x[2], x[3]), pack_half(x[4], x[5]), pack_half(x[6], x[7]));
  }
}

// A thread has eight neighbouring channels of a token, the threads of a token lie in one warp. Channels of which none
// counts are not read.
template <int D, int kDepth>
__device__ void gather_queries(const Arguments& args, int number) {
  constexpr int kLanes = D / 8, kAtOnce = kThreads / kLanes;
  SB_SHARED_ALIGNED(16, float, sums, [kAtOnce][D]);
  SB_SHARED(int32_t, listed, [kDepth]);
  SB_SHARED(uint32_t, used, [kLanes]);
  const int index = number / (kPlaneRows / kTokens), first = number % (kPlaneRows / kTokens) * kTokens;
  const ScoreItem item = args.items[index];
  if (first >= item.tokens) return;
  const int slot = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  if (threadIdx.x < kLanes) used[threadIdx.x] = 0;
  __syncthreads();
  if (threadIdx.x < args.channels) {
    const int32_t channel = args.planes[item.head * args.channels + threadIdx.x];
    listed[threadIdx.x] = channel;
    used[channel / 8] = 1;
  }
  __syncthreads();
  const bool reads = used[lane] != 0;
  const int group = args.query_heads / args.kv_heads;
  const float factor = args.scales[item.head] / (kPlaneScoreUnit * static_cast<float>(group));
  for (int base = 0; base < kTokens; base += kAtOnce) {
    const int row = first + base + slot;
    const bool have = row < item.tokens;
    int64_t token = 0;
    if (have) token = item.token + args.rows[static_cast<int64_t>(index) * kPlaneRows + row].later;
    if (have && reads) {
      const __nv_bfloat16* from = args.q + (token * args.query_heads + item.head * group) * D + 8 * lane;
      float sum[8] = {};
#pragma unroll 8
      for (int head = 0; head < group; ++head) {
        const uint4 eight = *reinterpret_cast<const uint4*>(from + static_cast<int64_t>(head) * D);
        const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int c = 0; c < 8; ++c) sum[c] += c % 2 == 0 ? low_bf16(words[c / 2]) : high_bf16(words[c / 2]);
      }
      auto* to = reinterpret_cast<float4*>(sums[slot] + 8 * lane);
      to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
      to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    }
    __syncwarp();
    if (have) {
      auto* to = reinterpret_cast<uint32_t*>(args.queries + (token * args.kv_heads + item.head) * kDepth);
      for (int pair = lane; pair < kDepth / 2; pair += kLanes)
        to[pair] = 2 * pair < args.channels
                       ? pack_half(sums[slot][listed[2 * pair]] * factor, sums[slot][listed[2 * pair + 1]] * factor)
                       : 0u;
    }
    __syncwarp();
  }
}

template <int D, int kDepth>
__global__ void __launch_bounds__(kThreads) gather_kernel(const __grid_constant__ Arguments args) {
  launch_dependents();
  const int number = blockIdx.x;
  if (number < args.block_count)
    gather_keys<D, kDepth>(args, args.blocks[number]);
  else
    gather_queries<D, kDepth>(args, number - args.block_count);
}

template <int D>
auto kernel_for(int depth) {
  if constexpr (D == 128) {
    if (depth == 128) return gather_kernel<D, 128>;
  }
  return depth == 32 ? gather_kernel<D, 32> : gather_kernel<D, 64>;
}

}  // namespace

void gather_planes(const SelectParams& p, bool keys, bool queries, cudaStream_t stream) {
  const int items = queries && !p.batches.empty() ? p.batches.back().score_begin + p.batches.back().score_count : 0;
  const int block_count = keys ? p.block_count : 0;
  const int blocks = block_count + items * (kPlaneRows / kTokens);
  if (blocks == 0) return;
  const Arguments args{static_cast<const __nv_bfloat16*>(p.q),
                       static_cast<const __nv_bfloat16*>(p.k),
                       p.shape.query_heads,
                       p.shape.kv_heads,
                       p.planes,
                       p.plane_scales,
                       p.plane_key_means,
                       p.plane_channels,
                       p.blocks,
                       block_count,
                       static_cast<__half*>(p.statistics),
                       p.scores,
                       p.score_rows,
                       items > 0 ? plane_queries(p) : nullptr};
  const auto kernel = p.shape.head_dim == 128 ? kernel_for<128>(p.plane_depth) : kernel_for<64>(p.plane_depth);
  launch_kernel(kernel, {blocks, kThreads, 0, stream}, args);
  check(cudaGetLastError(), "channels of keys and queries");
}

}  // namespace sb::gpu
