#include "attention/gpu/hopper/prepare.cuh"

#include "attention/gpu/hopper/gathered.cuh"
#include "attention/gpu/hopper/launch.cuh"
#include "attention/gpu/hopper/tile.cuh"
#include "attention/gpu/launch/early.cuh"
#include "device/kernel.cuh"

namespace sb::gpu {
namespace {

struct SubtileArguments {
  RowMap rows;
  int64_t tokens;
  int32_t query_heads, subtiles, sequences;
  const int32_t *cu_seqlens, *cu_subtiles;
};

SubtileArguments subtile_arguments(const BackwardParams& p) {
  return {row_map(p.tiling), p.shape.tokens, p.shape.query_heads, p.tiling.subtiles,
          p.sequences,       p.cu_seqlens,   p.cu_subtiles};
}

// Where a subtile's rows are in the packed tensors.
struct SubtilePlace {
  RowMap rows;
  int token, tokens, head, query_heads;
  __device__ SubtilePlace(const SubtileArguments& args, int subtile) : rows(args.rows), query_heads(args.query_heads) {
    const int list_head = subtile / args.subtiles;
    const int in_head = subtile - list_head * args.subtiles;
    int low = 0, high = args.sequences;  // cu_subtiles[low] <= in_head < cu_subtiles[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (args.cu_subtiles[middle] <= in_head ? low : high) = middle;
    }
    token = args.cu_seqlens[low] + (in_head - args.cu_subtiles[low]) * rows.tokens;
    tokens = min(rows.tokens, args.cu_seqlens[low + 1] - token);
    head = list_head * rows.heads;
  }
  // Index of (token, head), or -1 for padding.
  __device__ int64_t row(int r) const {
    const int t = rows.token(r);
    if (t >= tokens) return -1;
    return static_cast<int64_t>(token + t) * query_heads + head + (r - t * rows.heads);
  }
  // Of the same row in [query_heads, tokens].
  __device__ int64_t statistic(int r, int64_t all_tokens) const {
    const int t = rows.token(r);
    return (head + (r - t * rows.heads)) * all_tokens + token + t;
  }
};

template <int D>
__global__ void __launch_bounds__(256)
    prepare_kernel(SubtileArguments args, const __nv_bfloat16* o, const __nv_bfloat16* d_o, const float* lse,
                   float* statistics, float* dq_sum, int32_t* counters) {
  const int subtile = blockIdx.x;
  wait_for_dependencies();
  launch_dependents();
  if (subtile == 0 && threadIdx.x < kBackwardCounters) counters[threadIdx.x] = 0;
  const SubtilePlace place(args, subtile);
  constexpr int kLanes = D / 8;
  constexpr int kRows = 256 / kLanes;  // rows at a time
  const int lane = threadIdx.x % kLanes;
  if (dq_sum != nullptr) {
    float4* out = reinterpret_cast<float4*>(dq_sum + static_cast<int64_t>(subtile) * kSubtileRows * D);
#pragma unroll
    for (int i = 0; i < kSubtileRows * D / 4; i += 256) out[i + threadIdx.x] = make_float4(0, 0, 0, 0);
  }
#pragma unroll
  for (int r = 0; r < kSubtileRows; r += kRows) {
    const int row = r + threadIdx.x / kLanes;
    const int64_t at = place.row(row);
    float sum = 0;
    if (at >= 0) {
      const uint4 a = *reinterpret_cast<const uint4*>(o + at * D + lane * 8);
      const uint4 b = *reinterpret_cast<const uint4*>(d_o + at * D + lane * 8);
      const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 u = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&x[i]));
        const float2 w = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&y[i]));
        sum += u.x * w.x + u.y * w.y;
      }
    }
#pragma unroll
    for (int i = 1; i < kLanes; i *= 2) sum += __shfl_xor_sync(~0u, sum, i);
    if (lane == 0) {
      float l = INFINITY;
      if (at >= 0) {
        l = lse[place.statistic(row, args.tokens)] * kLog2e;
        if (l == -INFINITY) l = INFINITY;
      }
      float* out = statistics + static_cast<int64_t>(subtile) * 2 * kSubtileRows;
      out[row] = l;
      out[kSubtileRows + row] = sum;
    }
  }
}

// A thread block a subtile: pieces of 64 columns, each in the order of the accumulator that wrote it.
template <int D>
__global__ void __launch_bounds__(128)
    finish_dq_kernel(SubtileArguments args, const float* dq_sum, __nv_bfloat16* dq, float scale) {
  SB_SHARED_ALIGNED(1024, __nv_bfloat16, staging, [kSubtileRows * D]);
  const int subtile = blockIdx.x;
  wait_for_dependencies();
  launch_dependents();
  const SubtilePlace place(args, subtile);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float4* in = reinterpret_cast<const float4*>(dq_sum + static_cast<int64_t>(subtile) * kSubtileRows * D);
  float a[D / 2];
#pragma unroll
  for (int j = 0; j < D / 8; ++j) {
    const float4 x = in[j * 128 + threadIdx.x];
    a[4 * j] = x.x;
    a[4 * j + 1] = x.y;
    a[4 * j + 2] = x.z;
    a[4 * j + 3] = x.w;
  }
  const uint32_t address = shared_address(staging);
  stage_accumulator<D>(address, a, scale, scale, warp, lane);
  __syncwarp();
  store_staged<D>(dq, address, warp, lane, false, [&](int row) { return place.row(row) * D; });
}

template <int D>
__global__ void __launch_bounds__(128)
    finish_split_kernel(const SplitColumn* splits, const WorkCounts* counts, const float* partials, void* dk, void* dv,
                        bool adds, int kv_heads, float scale, const __grid_constant__ GatheredSums gathered) {
  SB_SHARED_ALIGNED(1024, __nv_bfloat16, staging, [kSubtileRows * D]);
  wait_for_dependencies();
  if (static_cast<int>(blockIdx.x) >= counts->splits) return;
  const SplitColumn split = splits[blockIdx.x];
  const int which = blockIdx.y / 2, group = blockIdx.y % 2;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float a[D / 2] = {};
  for (int slot = split.begin; slot < split.begin + split.count; ++slot) {
    const float4* in = reinterpret_cast<const float4*>(partials) +
                       (static_cast<int64_t>(slot * 2 + which) * 2 + group) * (D / 8) * 128 + threadIdx.x;
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      const float4 x = in[j * 128];
      a[4 * j] += x.x;
      a[4 * j + 1] += x.y;
      a[4 * j + 2] += x.z;
      a[4 * j + 3] += x.w;
    }
  }
  if (split.gathered >= 0)
    gathered.each(split.gathered, split.head, split.position, group * 64 + warp * 16 + lane / 4, lane,
                  [&](int h, int row) {
                    if (h == 0)
                      gathered.template add<D, 0>(a, row, which, lane);
                    else
                      gathered.template add<D, 1>(a, row, which, lane);
                  });
  const float factor = which == 0 ? scale : 1.f;
  void* out = which == 0 ? dk : dv;
  const auto element = [&](int row) -> int64_t {
    const int key = group * 64 + row;
    return key < split.keys ? (static_cast<int64_t>(split.token + key) * kv_heads + split.head) * D : -1;
  };
  if (adds) return add_accumulator<D>(static_cast<float*>(out), a, factor, warp, lane, element);
  const uint32_t address = shared_address(staging);
  stage_accumulator<D>(address, a, factor, factor, warp, lane);
  __syncwarp();
  store_staged<D>(static_cast<__nv_bfloat16*>(out), address, warp, lane, false, element);
}

int subtile_count(const BackwardParams& p) {
  return p.shape.query_heads / p.tiling.heads * p.tiling.subtiles;
}

}  // namespace

void prepare_rows(const BackwardParams& p, bool clear_dq, cudaStream_t stream) {
  const auto kernel = p.shape.head_dim == 128 ? prepare_kernel<128> : prepare_kernel<64>;
  launch_early(kernel, {subtile_count(p), 256, 0, stream}, subtile_arguments(p), static_cast<const __nv_bfloat16*>(p.o),
               static_cast<const __nv_bfloat16*>(p.d_o), p.lse, first_statistics(p),
               clear_dq ? first_dq_sum(p) : nullptr, p.counter);
  // Read with the first subtile, and masked.
  if (p.tiling.tile == 1)
    check(cudaMemsetAsync(p.statistics, 0, 2 * kSubtileRows * sizeof(float), stream),
          "statistics before the first subtile");
}

void finish_dq(const BackwardParams& p, cudaStream_t stream) {
  const auto kernel = p.shape.head_dim == 128 ? finish_dq_kernel<128> : finish_dq_kernel<64>;
  launch_early(kernel, {subtile_count(p), 128, 0, stream}, subtile_arguments(p),
               static_cast<const float*>(first_dq_sum(p)), static_cast<__nv_bfloat16*>(p.dq), p.shape.scale);
}

void finish_split_columns(const BackwardParams& p, cudaStream_t stream) {
  if (p.limits.splits == 0) return;
  const auto kernel = p.shape.head_dim == 128 ? finish_split_kernel<128> : finish_split_kernel<64>;
  launch_early(kernel, {dim3(p.limits.splits, 4), 128, 0, stream}, p.splits, p.counts,
               static_cast<const float*>(p.partials), p.dk, p.dv, p.adds, p.shape.kv_heads, p.shape.scale,
               gathered_sums(p));
}

}  // namespace sb::gpu
