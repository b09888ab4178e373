#include "attention/gpu/launch/check.cuh"
#include "attention/gpu/portable/plain.cuh"
#include "attention/gpu/portable/portable.cuh"
#include "device/kernel.cuh"

namespace sb::gpu {
namespace {

// A thread block of four warps works on one subtile of 64 rows, each warp on 16 of them, and takes 64 keys at a time.

template <int D>
struct Smem {
  __nv_bfloat16 q[64 * kTileStride<D>], k[64 * kTileStride<D>], v[64 * kTileStride<D>];
};

struct Arguments {
  RowWalk walk;
  const __nv_bfloat16 *q, *k, *v;
  __nv_bfloat16* o;
  float* lse;
  int64_t tokens;
  float scale;
};

template <int D>
__global__ void __launch_bounds__(128) forward_kernel(const __grid_constant__ Arguments args) {
  SB_DYNAMIC_SHARED(unsigned char, raw, 16);
  Smem<D>& smem = *reinterpret_cast<Smem<D>*>(raw);
  const ForwardItem item = args.walk.items[blockIdx.x / 2];
  const int sub = blockIdx.x % 2, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const SubtileRows rows = args.walk.rows(item, sub);
  if (rows.valid == 0) return;
  const int kv_head = item.head / args.walk.heads_per_kv;
  const int before = sub * rows.tokens;  // tokens of the tile before this subtile
  int row[2], token[2];                  // of this lane; tokens count from the tile's start
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    row[h] = warp * 16 + lane / 4 + 8 * h;
    token[h] = before + rows.token_of(row[h]);
  }
  load_tile<D>(smem.q, args.q, [&](int r) { return rows.exists(r) ? rows.packed(r) * D : int64_t{-1}; });

  float o[D / 2] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
  const auto attend = [&](auto key_row, auto sees) {
    __syncthreads();
    load_tile<D>(smem.k, args.k, key_row);
    load_tile<D>(smem.v, args.v, key_row);
    copies_done();
    __syncthreads();
    float s[32];
    product<D, 8>(s, smem.q, warp * 16, smem.k, 0);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float shrink = softmax_step(s, h, args.scale, top[h], sum[h], sees);
#pragma unroll
      for (int j = 0; j < D / 8; ++j) {
        o[4 * j + 2 * h] *= shrink;
        o[4 * j + 2 * h + 1] *= shrink;
      }
    }
    add_product<D, 8>(o, s, smem.v, 0);
  };
  each_sixty_four<D>(args.walk, item, kv_head, token, attend);
  copies_done();

#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float all = softmax_sum(sum[h]);
    if (!rows.exists(row[h])) continue;
    const float inverse = all > 0 ? 1.f / all : 0.f;
    __nv_bfloat16* out = args.o + rows.packed(row[h]) * D + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < D / 8; ++j)
      *reinterpret_cast<uint32_t*>(out + 8 * j) = pack(o[4 * j + 2 * h] * inverse, o[4 * j + 2 * h + 1] * inverse);
    if (lane % 4 == 0) args.lse[rows.statistic(row[h], args.tokens)] = all > 0 ? top[h] + logf(all) : -INFINITY;
  }
}

template <int D>
void launch(const ForwardParams& p, cudaStream_t stream) {
  const Arguments args{row_walk(p, p.items),
                       static_cast<const __nv_bfloat16*>(p.q),
                       static_cast<const __nv_bfloat16*>(p.k),
                       static_cast<const __nv_bfloat16*>(p.v),
                       static_cast<__nv_bfloat16*>(p.o),
                       p.lse,
                       p.shape.tokens,
                       p.shape.scale};
  check(cudaFuncSetAttribute(forward_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Smem<D>)),
        "shared memory of the forward");
  launch_kernel(forward_kernel<D>, {2 * p.item_count, 128, sizeof(Smem<D>), stream}, args);
  check(cudaGetLastError(), "attention forward");
}

}  // namespace

void portable_forward(const ForwardParams& p, Precision precision, void* stream) {
  if (p.item_count == 0) return;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (precision == Precision::fp32) return plain_forward(p, cuda_stream);
  for_head_dim(p.shape.head_dim, [&](auto d) { launch<d()>(p, cuda_stream); });
}

}  // namespace sb::gpu
