#include "attention/gpu/launch/check.cuh"
#include "attention/gpu/portable/plain.cuh"
#include "attention/gpu/portable/portable.cuh"
#include "device/kernel.cuh"

namespace sb::gpu {
namespace {

// Two kernels that sum nothing concurrently: dK and dV with 64 keys per thread block, dQ with 64 rows per thread block.

template <int D>
struct Smem {
  __nv_bfloat16 k[64 * kTileStride<D>], v[64 * kTileStride<D>], q[64 * kTileStride<D>], d_o[64 * kTileStride<D>];
  float statistics[2][64];
};

struct KeyArguments {
  ColumnWalk walk;
  const __nv_bfloat16 *q, *k, *v, *d_o;
  const float* statistics;
  void *dk, *dv;
  float *partials, *gathered_sums;
  float scale;
  bool adds;  // to fp32; else dk and dv are bf16 and written
};

template <int D>
__device__ void store_keys(const KeyArguments& args, const BackwardItem& item, int part, int which, float (&a)[D / 2],
                           void* out, float scale) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int key = part + warp * 16 + lane / 4 + 8 * h;
    if (key >= item.keys) continue;
    if (item.partial >= 0) {
      float* to = args.partials + (static_cast<int64_t>(item.partial * 2 + which) * kBlock + key) * D + 2 * (lane % 4);
#pragma unroll
      for (int j = 0; j < D / 8; ++j)
        *reinterpret_cast<float2*>(to + 8 * j) = make_float2(a[4 * j + 2 * h], a[4 * j + 2 * h + 1]);
      continue;
    }
    if (item.gathered >= 0) {
      const int list_heads = args.walk.heads_per_kv / args.walk.tiling.parts;
      for (int list = 0; list < list_heads; ++list) {
        const int64_t row =
            gathered_row(args.walk.gathered, item.gathered + item.head * list_heads + list, item.position + key);
        if (row < 0) continue;
        const float* from = args.gathered_sums + gathered_place(row, which, D) + 2 * (lane % 4);
#pragma unroll
        for (int j = 0; j < D / 8; ++j) {
          a[4 * j + 2 * h] += from[8 * j];
          a[4 * j + 2 * h + 1] += from[8 * j + 1];
        }
      }
    }
    const int64_t at = (static_cast<int64_t>(item.token + key) * args.walk.kv_heads + item.head) * D + 2 * (lane % 4);
    if (args.adds) {
      float* sums = static_cast<float*>(out) + at;
#pragma unroll
      for (int j = 0; j < D / 8; ++j) {
        sums[8 * j] += a[4 * j + 2 * h] * scale;
        sums[8 * j + 1] += a[4 * j + 2 * h + 1] * scale;
      }
      continue;
    }
    __nv_bfloat16* to = static_cast<__nv_bfloat16*>(out) + at;
#pragma unroll
    for (int j = 0; j < D / 8; ++j)
      *reinterpret_cast<uint32_t*>(to + 8 * j) = pack(a[4 * j + 2 * h] * scale, a[4 * j + 2 * h + 1] * scale);
  }
}

// One subtile of queries against 64 keys in shared memory: dV += Pᵀ·dO and dK += dSᵀ·Q. sees(token of the subtile, h)
// says whether that token looks at this lane's key h.
template <int D, typename Sees>
__device__ void add_subtile(const KeyArguments& args, Smem<D>& smem, const SubtileRows& rows, int64_t statistics,
                            float (&dk)[D / 2], float (&dv)[D / 2], Sees sees) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto query_row = [&](int r) { return rows.exists(r) ? rows.packed(r) * D : int64_t{-1}; };
  __syncthreads();
  load_tile<D>(smem.q, args.q, query_row);
  load_tile<D>(smem.d_o, args.d_o, query_row);
  smem.statistics[threadIdx.x / 64][threadIdx.x % 64] = args.statistics[statistics * 128 + threadIdx.x];
  copies_done();
  __syncthreads();
#pragma unroll 1
  for (int half = 0; half < 64; half += 32) {
    float s[16], dp[16];
    product<D, 4>(s, smem.k, warp * 16, smem.q, half);
    product<D, 4>(dp, smem.v, warp * 16, smem.d_o, half);
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int r = half + 8 * j + 2 * (lane % 4) + e, t = rows.token_of(r);
        const float lse = smem.statistics[0][r], delta = smem.statistics[1][r];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float& x = s[4 * j + 2 * h + e];
          x = sees(t, h) ? __expf(x * args.scale - lse) : 0.f;
          float& y = dp[4 * j + 2 * h + e];
          y = x * (y - delta);
        }
      }
    add_product<D, 4>(dv, s, smem.d_o, half);
    add_product<D, 4>(dk, dp, smem.q, half);
  }
}

template <int D>
__global__ void __launch_bounds__(128) keys_kernel(const __grid_constant__ KeyArguments args) {
  SB_DYNAMIC_SHARED(unsigned char, raw, 16);
  Smem<D>& smem = *reinterpret_cast<Smem<D>*>(raw);
  if (static_cast<int>(blockIdx.x) >= args.walk.counts->items) return;
  const BackwardItem item = args.walk.items[blockIdx.x];
  const int part = blockIdx.y * 64, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (part >= item.keys) return;
  const auto key_row = [&](int r) {
    return part + r < item.keys ? (static_cast<int64_t>(item.token + part + r) * args.walk.kv_heads + item.head) * D
                                : int64_t{-1};
  };
  load_tile<D>(smem.k, args.k, key_row);
  load_tile<D>(smem.v, args.v, key_row);
  float dk[D / 2] = {}, dv[D / 2] = {};
  const int key = item.position + part + warp * 16 + lane / 4;
  args.walk.each_subtile(item, [&](int head, int subtile, int first) {
    const SubtileRows rows = args.walk.rows(item, head, subtile);
    const int position = args.walk.first_query + subtile * rows.tokens;
    add_subtile<D>(args, smem, rows, static_cast<int64_t>(head) * args.walk.tiling.subtiles + item.subtile + subtile,
                   dk, dv, [&](int t, int h) { return t >= first && key + 8 * h <= position + t; });
  });
  copies_done();
  store_keys<D>(args, item, part, 0, dk, args.dk, args.scale);
  store_keys<D>(args, item, part, 1, dv, args.dv, 1.f);
}

// 64 gathered columns and all that see them; their sums wait for the block that holds the key.
template <int D>
__global__ void __launch_bounds__(128) pieces_kernel(const __grid_constant__ KeyArguments args) {
  SB_DYNAMIC_SHARED(unsigned char, raw, 16);
  Smem<D>& smem = *reinterpret_cast<Smem<D>*>(raw);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const PieceWalk walk(args.walk);
  const auto key_row = [&](int r) { return walk.key_row(r, D); };
  load_tile<D>(smem.k, args.k, key_row);
  load_tile<D>(smem.v, args.v, key_row);
  float dk[D / 2] = {}, dv[D / 2] = {};
  const int own = warp * 16 + lane / 4, key[2] = {walk.column(own), walk.column(own + 8)};
  walk.each_subtile([&](int head, int subtile, uint64_t seen) {
    const SubtileRows rows = args.walk.rows_of(walk.list.token, head, subtile);
    const int position = subtile * rows.tokens;
    add_subtile<D>(args, smem, rows,
                   static_cast<int64_t>(head) * args.walk.tiling.subtiles + walk.list.subtile + subtile, dk, dv,
                   [&](int t, int h) { return (seen >> (own + 8 * h) & 1) != 0 && key[h] <= position + t; });
  });
  copies_done();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t row = static_cast<int64_t>(blockIdx.x) * kGatheredPiece + own + 8 * h;
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      const int column = 8 * j + 2 * (lane % 4);
      *reinterpret_cast<float2*>(args.gathered_sums + gathered_place(row, 0, D) + column) =
          make_float2(dk[4 * j + 2 * h], dk[4 * j + 2 * h + 1]);
      *reinterpret_cast<float2*>(args.gathered_sums + gathered_place(row, 1, D) + column) =
          make_float2(dv[4 * j + 2 * h], dv[4 * j + 2 * h + 1]);
    }
  }
}

struct RowArguments {
  RowWalk walk;
  const __nv_bfloat16 *q, *k, *v, *d_o;
  const float* statistics;
  __nv_bfloat16* dq;
  float scale;
};

template <int D>
__global__ void __launch_bounds__(128) rows_kernel(const __grid_constant__ RowArguments args) {
  SB_DYNAMIC_SHARED(unsigned char, raw, 16);
  Smem<D>& smem = *reinterpret_cast<Smem<D>*>(raw);
  const ForwardItem item = args.walk.items[blockIdx.x / 2];
  const int sub = blockIdx.x % 2, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const SubtileRows rows = args.walk.rows(item, sub);
  if (rows.valid == 0) return;
  const int kv_head = item.head / args.walk.heads_per_kv;
  const auto query_row = [&](int r) { return rows.exists(r) ? rows.packed(r) * D : int64_t{-1}; };
  load_tile<D>(smem.q, args.q, query_row);
  load_tile<D>(smem.d_o, args.d_o, query_row);
  const float* statistics = args.statistics + static_cast<int64_t>(item.subtile + sub) * 128;
  int row[2], token[2];
  float lse[2], delta[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    row[h] = warp * 16 + lane / 4 + 8 * h;
    token[h] = sub * rows.tokens + rows.token_of(row[h]);
    lse[h] = statistics[row[h]];
    delta[h] = statistics[64 + row[h]];
  }
  float dq[D / 2] = {};
  const auto attend = [&](auto key_row, auto sees) {
    __syncthreads();
    load_tile<D>(smem.k, args.k, key_row);
    load_tile<D>(smem.v, args.v, key_row);
    copies_done();
    __syncthreads();
#pragma unroll 1
    for (int half = 0; half < 64; half += 32) {
      float s[16], dp[16];
      product<D, 4>(s, smem.q, warp * 16, smem.k, half);
      product<D, 4>(dp, smem.d_o, warp * 16, smem.v, half);
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int i = 4 * j + 2 * h + e;
            const float p = sees(h, half + 8 * j + 2 * (lane % 4) + e) ? __expf(s[i] * args.scale - lse[h]) : 0.f;
            dp[i] = p * (dp[i] - delta[h]);
          }
      add_product<D, 4>(dq, dp, smem.k, half);
    }
  };
  each_sixty_four<D>(args.walk, item, kv_head, token, attend);
  copies_done();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (!rows.exists(row[h])) continue;
    __nv_bfloat16* out = args.dq + rows.packed(row[h]) * D + 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < D / 8; ++j)
      *reinterpret_cast<uint32_t*>(out + 8 * j) =
          pack(dq[4 * j + 2 * h] * args.scale, dq[4 * j + 2 * h + 1] * args.scale);
  }
}

template <int D>
void launch(const BackwardParams& p, cudaStream_t stream) {
  const auto q = static_cast<const __nv_bfloat16*>(p.q), k = static_cast<const __nv_bfloat16*>(p.k),
             v = static_cast<const __nv_bfloat16*>(p.v), d_o = static_cast<const __nv_bfloat16*>(p.d_o);
  const KeyArguments keys{column_walk(p), q,     k, v, d_o, p.statistics, p.dk, p.dv, p.partials, p.gathered_sums,
                          p.shape.scale,  p.adds};
  if (p.gathered.piece_count > 0) {
    check(cudaFuncSetAttribute(pieces_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Smem<D>)),
          "shared memory of the backward");
    launch_kernel(pieces_kernel<D>, {p.gathered.piece_count, 128, sizeof(Smem<D>), stream}, keys);
    check(cudaGetLastError(), "attention backward: gathered columns");
  }
  check(cudaFuncSetAttribute(keys_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Smem<D>)),
        "shared memory of the backward");
  launch_kernel(keys_kernel<D>, {dim3(p.limits.items, p.tiling.block / 64), 128, sizeof(Smem<D>), stream}, keys);
  check(cudaGetLastError(), "attention backward: keys");
  const RowArguments rows{
      row_walk(p, p.row_items), q, k, v, d_o, p.statistics, static_cast<__nv_bfloat16*>(p.dq), p.shape.scale};
  check(cudaFuncSetAttribute(rows_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Smem<D>)),
        "shared memory of the backward");
  launch_kernel(rows_kernel<D>, {2 * p.row_item_count, 128, sizeof(Smem<D>), stream}, rows);
  check(cudaGetLastError(), "attention backward: rows");
}

}  // namespace

void portable_backward(const BackwardParams& p, Precision precision, void* stream) {
  if (p.shape.tokens == 0) return;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  portable_statistics(p, precision, cuda_stream);
  if (precision == Precision::fp32)
    plain_backward(p, cuda_stream);
  else
    for_head_dim(p.shape.head_dim, [&](auto d) { launch<d()>(p, cuda_stream); });
  portable_finish_columns(p, precision, cuda_stream);
}

}  // namespace sb::gpu
