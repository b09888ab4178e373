#include <bit>

#include "attention/gpu/hopper/masses.cuh"
#include "device/kernel.cuh"

namespace sb::gpu {
namespace {

// Mean and variance per channel of a key block, the variance times scale/2: what q and q² are multiplied with. A thread
// has eight channels of every so many tokens.
template <int D, int kTokensOfBlock>
__global__ void __launch_bounds__(256) statistics_kernel(const __nv_bfloat16* k, const SelectBlock* blocks,
                                                         __nv_bfloat16* out, int kv_heads, float variance_scale) {
  constexpr int kChannels = 8, kLanes = D / kChannels;  // lanes: of a token
  constexpr int kGroups = 256 / kLanes;                 // tokens at a time
  constexpr int kTokens = kTokensOfBlock / kGroups;     // of a thread
  SB_SHARED_ALIGNED(16, float, partial, [8][D]);
  SB_SHARED_ALIGNED(16, float, means, [D]);
  launch_dependents();
  const SelectBlock block = blocks[blockIdx.x];
  const int group = threadIdx.x / kLanes, channel = threadIdx.x % kLanes * kChannels;
  uint4 keys[kTokens];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const int t = group + i * kGroups;
    keys[i] = make_uint4(0, 0, 0, 0);
    if (t < block.keys)
      keys[i] = *reinterpret_cast<const uint4*>(
          k + (static_cast<int64_t>(block.token + t) * kv_heads + block.head) * D + channel);
  }
  const auto each = [&](auto body) {
#pragma unroll
    for (int i = 0; i < kTokens; ++i) {
      if (group + i * kGroups >= block.keys) continue;
      const uint32_t words[4] = {keys[i].x, keys[i].y, keys[i].z, keys[i].w};
#pragma unroll
      for (int c = 0; c < kChannels; ++c) body(c, c % 2 == 0 ? low_bf16(words[c / 2]) : high_bf16(words[c / 2]));
    }
  };
  // A warp's sums over its tokens, to shared memory.
  const auto leave = [&](float(&sum)[kChannels]) {
#pragma unroll
    for (int step = kLanes; step < 32; step *= 2)
#pragma unroll
      for (int c = 0; c < kChannels; ++c) sum[c] += __shfl_xor_sync(~0u, sum[c], step);
    if (threadIdx.x % 32 < kLanes) {
      float4* to = reinterpret_cast<float4*>(partial[threadIdx.x / 32] + channel);
      to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
      to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    }
    __syncthreads();
  };
  const float inverse = 1.f / block.keys;
  const auto average = [&](int c) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < 8; ++w) sum += partial[w][c];
    return sum * inverse;
  };
  // Two passes over the registers: the difference of large squares would lose the variance.
  float sum[kChannels] = {}, square[kChannels] = {}, mean[kChannels];
  each([&](int c, float x) { sum[c] += x; });
  leave(sum);
  if (threadIdx.x < D) means[threadIdx.x] = average(threadIdx.x);
  __syncthreads();
#pragma unroll
  for (int c = 0; c < kChannels; ++c) mean[c] = means[channel + c];
  each([&](int c, float x) { square[c] += (x - mean[c]) * (x - mean[c]); });
  leave(square);
  const int pair = threadIdx.x;
  if (pair >= D / 2) return;
  uint32_t* row = reinterpret_cast<uint32_t*>(out + static_cast<int64_t>(block.row) * 2 * D);
  const int to = statistics_pair(pair);
  row[to] = pack_bf16(means[2 * pair], means[2 * pair + 1]);
  row[D / 2 + to] = pack_bf16(average(2 * pair) * variance_scale, average(2 * pair + 1) * variance_scale);
}

// The same of every part of a key block, D / 2 threads a part. Only whole parts: others never compete. Deviations are
// taken from the part's first key, so that one pass is precise.
template <int D, bool kMoments>
__global__ void __launch_bounds__(256)
    part_statistics_kernel(const __nv_bfloat16* k, const SelectBlock* blocks, __nv_bfloat16* out, int kv_heads,
                           int parts, int part_tokens, float variance_scale) {
  constexpr int kPairs = D / 2;
  launch_dependents();
  const SelectBlock block = blocks[blockIdx.x];
  const int pair = threadIdx.x % kPairs;
  const float inverse = 1.f / part_tokens;
  for (int part = threadIdx.x / kPairs; part < parts; part += 256 / kPairs) {
    if ((part + 1) * part_tokens > block.keys) return;
    const __nv_bfloat16* key =
        k + (static_cast<int64_t>(block.token + part * part_tokens) * kv_heads + block.head) * D + pair * 2;
    const auto at = [&](int t) {
      return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(key + static_cast<int64_t>(t) * kv_heads * D));
    };
    const float2 first = at(0);
    float2 sum{0, 0}, square{0, 0};
#pragma unroll 8
    for (int t = 1; t < part_tokens; ++t) {
      const float2 x = at(t);
      const float2 by{x.x - first.x, x.y - first.y};
      sum.x += by.x;
      sum.y += by.y;
      square.x += by.x * by.x;
      square.y += by.y * by.y;
    }
    const float2 offset{sum.x * inverse, sum.y * inverse};
    uint32_t* row = reinterpret_cast<uint32_t*>(out + static_cast<int64_t>(block.row + part * kStatisticsGroup) *
                                                          (kMoments ? 2 * D : D));
    const int to = statistics_pair(pair);
    row[to] = pack_bf16(first.x + offset.x, first.y + offset.y);
    if constexpr (kMoments)
      row[kPairs + to] = pack_bf16(fmaxf(square.x * inverse - offset.x * offset.x, 0.f) * variance_scale,
                                   fmaxf(square.y * inverse - offset.y * offset.y, 0.f) * variance_scale);
  }
}

template <int D>
void launch_statistics(const SelectParams& p, cudaStream_t stream) {
  if (p.block_count == 0) return;
  const auto* k = static_cast<const __nv_bfloat16*>(p.k);
  auto* out = static_cast<__nv_bfloat16*>(p.statistics);
  const float variance_scale = p.moments ? p.shape.scale / 2 : 0.f;
  if (p.parts == 1) {
    const auto kernel = p.select_block == 256 ? statistics_kernel<D, 256> : statistics_kernel<D, 128>;
    launch_kernel(kernel, {p.block_count, 256, 0, stream}, k, p.blocks, out, p.shape.kv_heads, variance_scale);
  } else {
    const auto kernel = p.statistics_channels == 2 ? part_statistics_kernel<D, true> : part_statistics_kernel<D, false>;
    launch_kernel(kernel, {p.block_count, 256, 0, stream}, k, p.blocks, out, p.shape.kv_heads, p.parts,
                  p.select_block / p.parts, variance_scale);
  }
  check(cudaGetLastError(), "block statistics");
}

}  // namespace

int64_t hopper_kept_bytes(const SelectPlan& plan) {
  return statistics_only_bytes(plan.statistics_rows, plan.row_width);
}

int64_t hopper_room_bytes(const Shape& shape, const SelectPlan& plan) {
  const int depth = plan.row_width;
  const int rows = plan.plane_depth > 0 ? kPlaneRows : plan.parts > 1 ? part_rows(depth) : whole_rows(shape.head_dim);
  return room_beyond_bytes(plan.max_competing, depth, rows) + shape.tokens * shape.kv_heads * plan.plane_depth * 2;
}

int64_t hopper_statistics_bytes(const Shape& shape, const SelectPlan& plan) {
  return hopper_kept_bytes(plan) + hopper_room_bytes(shape, plan);
}

ScoreTile hopper_score_tile(const Shape& shape, const SelectionConfig& config) {
  if (config.judges_by_planes()) {
    const int depth = hopper_plane_depth(config);
    return {kPlaneRows, 1, true, depth, kPlaneRowWidth / depth};
  }
  const BlockScoring scoring(config);
  const int group = shape.query_heads / shape.kv_heads;
  const int rows =
      scoring.parts() > 1 ? part_rows(static_cast<int>(scoring.row_width(shape.head_dim))) : whole_rows(shape.head_dim);
  int slices = 1;
  while (group % slices != 0 || group / slices > kSliceHeads) ++slices;
  return {rows / static_cast<int>(std::bit_ceil(static_cast<unsigned>(group / slices))), slices, true};
}

void hopper_block_statistics(const SelectParams& p, void* stream) {
  if (p.shape.head_dim != 64 && p.shape.head_dim != 128) throw_unsupported("head_dim", p.shape.head_dim);
  if (p.plane_depth > 0) return gather_planes(p, true, false, static_cast<cudaStream_t>(stream));
  if (p.shape.head_dim == 128)
    launch_statistics<128>(p, static_cast<cudaStream_t>(stream));
  else
    launch_statistics<64>(p, static_cast<cudaStream_t>(stream));
}

void hopper_select(const SelectParams& p, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  begin_selection(p, cuda_stream);
  if (p.plane_depth > 0 && p.max_competing > 0)
    gather_planes(p, !p.statistics_given, true, cuda_stream);
  else if (p.max_competing > 0 && !p.statistics_given)
    hopper_block_statistics(p, stream);
  const auto masses = p.plane_depth > 0 ? plane_masses : p.parts > 1 ? part_masses : whole_masses;
  for (const SelectBatch& batch : p.batches) {
    if (batch.score_count > 0) masses(p, batch, cuda_stream);
    select_blocks(p, batch, cuda_stream, batch.score_count > 0);
  }
  finish_selection(p, cuda_stream);
}

}  // namespace sb::gpu
