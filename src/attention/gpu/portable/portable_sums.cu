#include "attention/gpu/launch/check.cuh"
#include "attention/gpu/portable/plain.cuh"
#include "attention/gpu/portable/portable.cuh"
#include "device/cuda_floats.cuh"
#include "device/kernel.cuh"

namespace sb::gpu {
namespace {

// What the backward needs before and after its products, in either precision.

using cuda::from_float;
using cuda::to_float;

struct StatisticsArguments {
  Tiling tiling;
  const int32_t *cu_seqlens, *cu_subtiles;
  int32_t sequences, query_heads, d;
  int64_t tokens;
  const float* lse;
  float* out;
};

// A thread block per subtile, a warp per row.
template <typename T>
__global__ void __launch_bounds__(128) statistics_kernel(StatisticsArguments args, const T* o, const T* d_o) {
  const int list_head = blockIdx.x / args.tiling.subtiles, in_head = blockIdx.x % args.tiling.subtiles;
  int low = 0, high = args.sequences;  // cu_subtiles[low] <= in_head < cu_subtiles[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (args.cu_subtiles[middle] <= in_head ? low : high) = middle;
  }
  const int token = args.cu_seqlens[low] + (in_head - args.cu_subtiles[low]) * args.tiling.tokens;
  const SubtileRows rows{token,
                         args.tiling.tokens,
                         max(0, min(args.tiling.tokens, args.cu_seqlens[low + 1] - token)),
                         list_head * args.tiling.heads,
                         args.tiling.heads,
                         args.query_heads};
  float* out = args.out + static_cast<int64_t>(blockIdx.x) * 2 * kSubtileRows;
  for (int r = threadIdx.x / 32; r < kSubtileRows; r += 4) {
    float sum = 0, lse = INFINITY;
    if (rows.exists(r)) {
      const int64_t at = rows.packed(r) * args.d;
      for (int c = threadIdx.x % 32; c < args.d; c += 32) sum += to_float(o[at + c]) * to_float(d_o[at + c]);
      lse = args.lse[rows.statistic(r, args.tokens)];
      if (lse == -INFINITY) lse = INFINITY;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (threadIdx.x % 32 == 0) {
      out[r] = lse;
      out[kSubtileRows + r] = sum;
    }
  }
}

struct FinishArguments {
  const SplitColumn* splits;
  const WorkCounts* counts;
  const float *partials, *gathered_sums;
  ColumnWalk walk;
  int32_t d;
  float scale;
  bool adds;  // to dk and dv
};

// A thread block a split column and result.
template <typename T>
__global__ void __launch_bounds__(256) finish_kernel(const __grid_constant__ FinishArguments args, T* dk, T* dv) {
  if (static_cast<int>(blockIdx.x) >= args.counts->splits) return;
  const SplitColumn split = args.splits[blockIdx.x];
  const int which = blockIdx.y, d = args.d, list_heads = args.walk.heads_per_kv / args.walk.tiling.parts;
  T* out = which == 0 ? dk : dv;
  for (int i = threadIdx.x; i < split.keys * d; i += 256) {
    float sum = 0;
    for (int slot = split.begin; slot < split.begin + split.count; ++slot)
      sum += args.partials[static_cast<int64_t>(slot * 2 + which) * kBlock * d + i];
    for (int list = 0; split.gathered >= 0 && list < list_heads; ++list) {
      const int64_t row =
          gathered_row(args.walk.gathered, split.gathered + split.head * list_heads + list, split.position + i / d);
      if (row >= 0) sum += args.gathered_sums[gathered_place(row, which, d) + i % d];
    }
    const int64_t at = (static_cast<int64_t>(split.token + i / d) * args.walk.kv_heads + split.head) * d + i % d;
    const float before = args.adds ? to_float(out[at]) : 0.f;
    out[at] = from_float<T>(before + (which == 0 ? sum * args.scale : sum));
  }
}

}  // namespace

void portable_statistics(const BackwardParams& p, Precision precision, cudaStream_t stream) {
  const StatisticsArguments args{p.tiling,         p.cu_seqlens,   p.cu_subtiles, p.sequences, p.shape.query_heads,
                                 p.shape.head_dim, p.shape.tokens, p.lse,         p.statistics};
  const int subtiles = p.shape.query_heads / p.tiling.heads * p.tiling.subtiles;
  if (precision == Precision::fp32)
    launch_kernel(statistics_kernel<float>, {subtiles, 128, 0, stream}, args, static_cast<const float*>(p.o),
                  static_cast<const float*>(p.d_o));
  else
    launch_kernel(statistics_kernel<__nv_bfloat16>, {subtiles, 128, 0, stream}, args,
                  static_cast<const __nv_bfloat16*>(p.o), static_cast<const __nv_bfloat16*>(p.d_o));
  check(cudaGetLastError(), "attention backward: statistics");
}

void portable_finish_columns(const BackwardParams& p, Precision precision, cudaStream_t stream) {
  if (p.limits.splits == 0) return;
  const dim3 grid(p.limits.splits, 2);
  const FinishArguments args{p.splits,       p.counts,         p.partials,    p.gathered_sums,
                             column_walk(p), p.shape.head_dim, p.shape.scale, p.adds};
  if (precision == Precision::fp32 || p.adds)
    launch_kernel(finish_kernel<float>, {grid, 256, 0, stream}, args, static_cast<float*>(p.dk),
                  static_cast<float*>(p.dv));
  else
    launch_kernel(finish_kernel<__nv_bfloat16>, {grid, 256, 0, stream}, args, static_cast<__nv_bfloat16*>(p.dk),
                  static_cast<__nv_bfloat16*>(p.dv));
  check(cudaGetLastError(), "attention backward: split columns");
}

}  // namespace sb::gpu
