#include "attention/gpu/portable/plain.cuh"

#include "attention/gpu/launch/check.cuh"
#include "attention/gpu/launch/head_dims.h"
#include "attention/gpu/portable/portable.cuh"
#include "device/kernel.cuh"

namespace sb::gpu {
namespace {

// fp32 with plain arithmetic, any head_dim up to 256: for exact comparison, not for speed. Every kernel keeps 64 rows
// (queries or keys) and passes 16 of the other kind at a time. Thread (y, x) of 16 × 16 looks after rows 4y … 4y+3 and
// item x, or columns x, x + 16, … of a result.

constexpr int kThreads = 256;
constexpr int kStill = 64, kMoving = 16;
constexpr int kMaxDim = kMaxFp32HeadDim;

struct Tiles {
  float *a, *b;  // [64][d + 1]: what stays
  float *c, *e;  // [16][d + 1]: what passes
  float *p, *s;  // [64][17]
  float* rows;   // [2][64]
  int stride;
  __device__ Tiles(float* memory, int d) : stride(d + 1) {
    a = memory;
    b = a + kStill * stride;
    c = b + kStill * stride;
    e = c + kMoving * stride;
    p = e + kMoving * stride;
    s = p + kStill * (kMoving + 1);
    rows = s + kStill * (kMoving + 1);
  }
  static size_t bytes(int d) {
    return sizeof(float) * (2 * (kStill + kMoving) * (d + 1) + 2 * kStill * (kMoving + 1) + 2 * kStill);
  }
};

template <typename Offset>
__device__ void load(float* to, const float* from, int rows, int d, Offset offset) {
  for (int i = threadIdx.x; i < rows * d; i += kThreads) {
    const int64_t at = offset(i / d);
    to[i / d * (d + 1) + i % d] = at < 0 ? 0.f : from[at + i % d];
  }
}

// Products of rows 4y … 4y+3 of what stays with row x of what passes.
__device__ void products(float (&out)[4], const float* still, const float* moving, int d) {
  const float* a = still + threadIdx.x / 16 * 4 * (d + 1);
  const float* b = moving + threadIdx.x % 16 * (d + 1);
  for (int r = 0; r < 4; ++r) out[r] = 0;
  for (int i = 0; i < d; ++i)
#pragma unroll
    for (int r = 0; r < 4; ++r) out[r] = fmaf(a[r * (d + 1) + i], b[i], out[r]);
}

// sum += weights [64][17] · moving [16][d + 1].
template <int kColumns>
__device__ void add_products(float (&sum)[4][kColumns], const float* weights, const float* moving, int d) {
  const float* w = weights + threadIdx.x / 16 * 4 * (kMoving + 1);
  for (int m = 0; m < kMoving; ++m)
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int column = threadIdx.x % 16 + 16 * j;
      if (column >= d) break;
#pragma unroll
      for (int r = 0; r < 4; ++r) sum[r][j] = fmaf(w[r * (kMoving + 1) + m], moving[m * (d + 1) + column], sum[r][j]);
    }
}

template <int kColumns, typename Offset>
__device__ void store(float* out, const float (&sum)[4][kColumns], int d, const float (&factor)[4], Offset offset,
                      bool adds = false) {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int64_t at = offset(threadIdx.x / 16 * 4 + r);
    if (at < 0) continue;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int column = threadIdx.x % 16 + 16 * j;
      if (column < d) out[at + column] = (adds ? out[at + column] : 0.f) + sum[r][j] * factor[r];
    }
  }
}

// Calls attend for every 16 keys that a tile looks at, blocks first, then gathered columns. `x`: this thread's key.
template <typename Attend>
__device__ void each_sixteen(const RowWalk& walk, const ForwardItem& item, int kv_head, int x, int d, Attend attend) {
  const int sequence = item.token - item.position + walk.first_query;
  const auto element = [&](int key) { return (static_cast<int64_t>(sequence + key) * walk.kv_heads + kv_head) * d; };
  walk.each_block(item, [&](int key_position, int first) {
    for (int part = 0; part < walk.tiling.block; part += kMoving) {
      const int position = key_position + part;
      if (position >= item.position + item.tokens) break;
      attend([&](int r) { return position + r < item.position + item.tokens ? element(position + r) : int64_t{-1}; },
             [&](int token) { return token >= first && position + x <= item.position + token; });
    }
  });
  walk.each_piece(item, [&](const int32_t* columns, uint64_t all) {
    for (int part = 0; part < kGatheredPiece; part += kMoving) {
      const uint64_t seen = all >> part & 0xFFFF;
      if (seen == 0) continue;
      attend([&](int r) { return seen >> r & 1 ? element(columns[part + r]) : int64_t{-1}; },
             [&](int token) { return (seen >> x & 1) != 0 && columns[part + x] <= item.position + token; });
    }
  });
}

struct ForwardArguments {
  RowWalk walk;
  const float *q, *k, *v;
  float *o, *lse;
  int64_t tokens;
  int32_t d;
  float scale;
};

template <int kColumns>
__global__ void __launch_bounds__(kThreads) forward_kernel(const __grid_constant__ ForwardArguments args) {
  SB_DYNAMIC_SHARED(float, memory);
  const int d = args.d, y = threadIdx.x / 16, x = threadIdx.x % 16;
  const Tiles tiles(memory, d);
  const ForwardItem item = args.walk.items[blockIdx.x / 2];
  const int sub = blockIdx.x % 2;
  const SubtileRows rows = args.walk.rows(item, sub);
  if (rows.valid == 0) return;
  const int kv_head = item.head / args.walk.heads_per_kv;
  const auto packed = [&](int r) { return rows.exists(r) ? rows.packed(r) * d : int64_t{-1}; };
  load(tiles.a, args.q, kStill, d, packed);
  float o[4][kColumns] = {}, top[4], sum[4] = {0, 0, 0, 0};
  for (float& t : top) t = -INFINITY;
  // 16 keys: key_row(r) is where one starts (negative: none), sees(token of the tile) whether that token looks at key
  // x.
  const auto attend = [&](auto key_row, auto sees) {
    __syncthreads();
    load(tiles.c, args.k, kMoving, d, key_row);
    load(tiles.e, args.v, kMoving, d, key_row);
    __syncthreads();
    float s[4];
    products(s, tiles.a, tiles.c, d);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      s[r] = sees(sub * rows.tokens + rows.token_of(4 * y + r)) ? s[r] * args.scale : -INFINITY;
      float m = fmaxf(top[r], s[r]);
#pragma unroll
      for (int step = 1; step < 16; step *= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, step));
      const float base = m == -INFINITY ? 0.f : m;
      const float shrink = expf(top[r] - base), p = expf(s[r] - base);
      tiles.p[(4 * y + r) * (kMoving + 1) + x] = p;
      sum[r] = sum[r] * shrink + p;  // of this thread's keys
      top[r] = m;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) o[r][j] *= shrink;
    }
    __syncwarp();  // a row's weights come from the half-warp that uses them
    add_products(o, tiles.p, tiles.e, d);
  };
  each_sixteen(args.walk, item, kv_head, x, d, attend);
  float inverse[4];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    float all = sum[r];
#pragma unroll
    for (int step = 1; step < 16; step *= 2) all += __shfl_xor_sync(~0u, all, step);
    inverse[r] = all > 0 ? 1.f / all : 0.f;
    if (x == 0 && rows.exists(4 * y + r))
      args.lse[rows.statistic(4 * y + r, args.tokens)] = all > 0 ? top[r] + logf(all) : -INFINITY;
  }
  store(args.o, o, d, inverse, packed);
}

struct BackwardArguments {
  ColumnWalk columns;
  RowWalk rows;
  const float *q, *k, *v, *d_o;
  const float* statistics;
  float *dq, *dk, *dv, *partials, *gathered_sums;
  int32_t d;
  float scale;
  bool adds;  // to dk and dv
};

// What keys got as gathered columns; the rows of this thread are keys half + 4y … of the item.
template <int kColumns>
__device__ void add_gathered(const BackwardArguments& args, const BackwardItem& item, int half, int which,
                             float (&sum)[4][kColumns]) {
  const int list_heads = args.columns.heads_per_kv / args.columns.tiling.parts;
#pragma unroll
  for (int r = 0; r < 4; ++r)
    for (int list = 0; list < list_heads; ++list) {
      const int64_t row = gathered_row(args.columns.gathered, item.gathered + item.head * list_heads + list,
                                       item.position + half + static_cast<int>(threadIdx.x) / 16 * 4 + r);
      if (row < 0) continue;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int column = threadIdx.x % 16 + 16 * j;
        if (column < args.d) sum[r][j] += args.gathered_sums[gathered_place(row, which, args.d) + column];
      }
    }
}

// One subtile of queries against the 64 keys that stay. sees(token of the subtile, r) says whether that token looks at
// this thread's key r.
template <int kColumns, typename Sees>
__device__ void add_subtile(const BackwardArguments& args, const Tiles& tiles, const SubtileRows& rows,
                            int64_t statistics_at, float (&dk)[4][kColumns], float (&dv)[4][kColumns], Sees sees) {
  const int d = args.d, y = threadIdx.x / 16, x = threadIdx.x % 16;
  const float* statistics = args.statistics + statistics_at * 128;
  for (int part = 0; part < kSubtileRows; part += kMoving) {
    const auto query_row = [&](int r) { return rows.exists(part + r) ? rows.packed(part + r) * d : int64_t{-1}; };
    __syncthreads();
    load(tiles.c, args.q, kMoving, d, query_row);
    load(tiles.e, args.d_o, kMoving, d, query_row);
    __syncthreads();
    float s[4], dp[4];
    products(s, tiles.a, tiles.c, d);
    products(dp, tiles.b, tiles.e, d);
    const int token = rows.token_of(part + x);
    const float lse = statistics[part + x], delta = statistics[kSubtileRows + part + x];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float p = sees(token, r) ? expf(s[r] * args.scale - lse) : 0.f;
      tiles.p[(4 * y + r) * (kMoving + 1) + x] = p;
      tiles.s[(4 * y + r) * (kMoving + 1) + x] = p * (dp[r] - delta);
    }
    __syncwarp();
    add_products(dv, tiles.p, tiles.e, d);
    add_products(dk, tiles.s, tiles.c, d);
  }
}

template <int kColumns>
__global__ void __launch_bounds__(kThreads) keys_kernel(const __grid_constant__ BackwardArguments args) {
  SB_DYNAMIC_SHARED(float, memory);
  const int d = args.d, y = threadIdx.x / 16;
  const Tiles tiles(memory, d);
  if (static_cast<int>(blockIdx.x) >= args.columns.counts->items) return;
  const BackwardItem item = args.columns.items[blockIdx.x];
  const int half = blockIdx.y * kStill;
  if (half >= item.keys) return;
  const auto key_row = [&](int r) {
    return half + r < item.keys ? (static_cast<int64_t>(item.token + half + r) * args.columns.kv_heads + item.head) * d
                                : int64_t{-1};
  };
  load(tiles.a, args.k, kStill, d, key_row);
  load(tiles.b, args.v, kStill, d, key_row);
  float dk[4][kColumns] = {}, dv[4][kColumns] = {};
  args.columns.each_subtile(item, [&](int head, int subtile, int first) {
    const SubtileRows rows = args.columns.rows(item, head, subtile);
    const int key = args.columns.behind_first(item) + half + 4 * y - subtile * rows.tokens;
    add_subtile(args, tiles, rows, static_cast<int64_t>(head) * args.columns.tiling.subtiles + item.subtile + subtile,
                dk, dv, [&](int token, int r) { return token >= first && key + r <= token; });
  });
  const float one[4] = {1, 1, 1, 1}, scale[4] = {args.scale, args.scale, args.scale, args.scale};
  if (item.partial < 0) {
    if (item.gathered >= 0) {
      add_gathered(args, item, half, 0, dk);
      add_gathered(args, item, half, 1, dv);
    }
    store(args.dk, dk, d, scale, key_row, args.adds);
    store(args.dv, dv, d, one, key_row, args.adds);
    return;
  }
  const auto slot_row = [&](int r) {
    return half + r < item.keys ? (static_cast<int64_t>(item.partial) * 2 * kBlock + half + r) * d : int64_t{-1};
  };
  store(args.partials, dk, d, one, slot_row);
  store(args.partials + kBlock * d, dv, d, one, slot_row);
}

template <int kColumns>
__global__ void __launch_bounds__(kThreads) pieces_kernel(const __grid_constant__ BackwardArguments args) {
  SB_DYNAMIC_SHARED(float, memory);
  const int d = args.d, y = threadIdx.x / 16;
  const Tiles tiles(memory, d);
  const PieceWalk walk(args.columns);
  const auto key_row = [&](int r) { return walk.key_row(r, d); };
  load(tiles.a, args.k, kStill, d, key_row);
  load(tiles.b, args.v, kStill, d, key_row);
  float dk[4][kColumns] = {}, dv[4][kColumns] = {};
  walk.each_subtile([&](int head, int subtile, uint64_t seen) {
    const SubtileRows rows = args.columns.rows_of(walk.list.token, head, subtile);
    const int before = subtile * rows.tokens;
    add_subtile(
        args, tiles, rows, static_cast<int64_t>(head) * args.columns.tiling.subtiles + walk.list.subtile + subtile, dk,
        dv,
        [&](int token, int r) { return (seen >> (4 * y + r) & 1) != 0 && walk.column(4 * y + r) <= before + token; });
  });
  const float one[4] = {1, 1, 1, 1};
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kGatheredPiece;
  store(args.gathered_sums, dk, d, one, [&](int r) { return gathered_place(first + r, 0, d); });
  store(args.gathered_sums, dv, d, one, [&](int r) { return gathered_place(first + r, 1, d); });
}

template <int kColumns>
__global__ void __launch_bounds__(kThreads) rows_kernel(const __grid_constant__ BackwardArguments args) {
  SB_DYNAMIC_SHARED(float, memory);
  const int d = args.d, y = threadIdx.x / 16, x = threadIdx.x % 16;
  const Tiles tiles(memory, d);
  const ForwardItem item = args.rows.items[blockIdx.x / 2];
  const int sub = blockIdx.x % 2;
  const SubtileRows rows = args.rows.rows(item, sub);
  if (rows.valid == 0) return;
  const int kv_head = item.head / args.rows.heads_per_kv;
  const auto packed = [&](int r) { return rows.exists(r) ? rows.packed(r) * d : int64_t{-1}; };
  load(tiles.a, args.q, kStill, d, packed);
  load(tiles.b, args.d_o, kStill, d, packed);
  const float* statistics = args.statistics + static_cast<int64_t>(item.subtile + sub) * 128;
  float dq[4][kColumns] = {};
  const auto attend = [&](auto key_row, auto sees) {
    __syncthreads();
    load(tiles.c, args.k, kMoving, d, key_row);
    load(tiles.e, args.v, kMoving, d, key_row);
    __syncthreads();
    float s[4], dp[4];
    products(s, tiles.a, tiles.c, d);
    products(dp, tiles.b, tiles.e, d);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const bool seen = sees(sub * rows.tokens + rows.token_of(4 * y + r));
      const float p = seen ? expf(s[r] * args.scale - statistics[4 * y + r]) : 0.f;
      tiles.s[(4 * y + r) * (kMoving + 1) + x] = p * (dp[r] - statistics[kSubtileRows + 4 * y + r]);
    }
    __syncwarp();
    add_products(dq, tiles.s, tiles.c, d);
  };
  each_sixteen(args.rows, item, kv_head, x, d, attend);
  const float scale[4] = {args.scale, args.scale, args.scale, args.scale};
  store(args.dq, dq, d, scale, packed);
}

template <int kColumns>
void launch_backward(const BackwardParams& p, const BackwardArguments& args, cudaStream_t stream) {
  const size_t bytes = Tiles::bytes(p.shape.head_dim);
  const auto pieces = pieces_kernel<kColumns>, keys = keys_kernel<kColumns>, rows = rows_kernel<kColumns>;
  for (const auto kernel : {pieces, keys, rows})
    allow_shared_memory(kernel, static_cast<int>(bytes), "shared memory of the fp32 backward");
  if (p.gathered.piece_count > 0) launch_kernel(pieces, {p.gathered.piece_count, kThreads, bytes, stream}, args);
  check(cudaGetLastError(), "attention backward in fp32: gathered columns");
  launch_kernel(keys, {dim3(p.limits.items, p.tiling.block / kStill), kThreads, bytes, stream}, args);
  check(cudaGetLastError(), "attention backward in fp32: keys");
  launch_kernel(rows, {2 * p.row_item_count, kThreads, bytes, stream}, args);
  check(cudaGetLastError(), "attention backward in fp32: rows");
}

// Some GPUs have too little shared memory for the largest.
void check_dim(int d) {
  int device = 0, most = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "shared memory");
  if (d > kMaxDim || Tiles::bytes(d) > static_cast<size_t>(most)) throw_unsupported("head_dim in fp32", d);
}

}  // namespace

void plain_forward(const ForwardParams& p, cudaStream_t stream) {
  check_dim(p.shape.head_dim);
  const ForwardArguments args{row_walk(p, p.items),
                              static_cast<const float*>(p.q),
                              static_cast<const float*>(p.k),
                              static_cast<const float*>(p.v),
                              static_cast<float*>(p.o),
                              p.lse,
                              p.shape.tokens,
                              p.shape.head_dim,
                              p.shape.scale};
  const size_t bytes = Tiles::bytes(p.shape.head_dim);
  const auto kernel = p.shape.head_dim <= kMaxDim / 2 ? forward_kernel<kMaxDim / 32> : forward_kernel<kMaxDim / 16>;
  allow_shared_memory(kernel, static_cast<int>(bytes), "shared memory of the fp32 forward");
  launch_kernel(kernel, {2 * p.item_count, kThreads, bytes, stream}, args);
  check(cudaGetLastError(), "attention forward in fp32");
}

void plain_backward(const BackwardParams& p, cudaStream_t stream) {
  check_dim(p.shape.head_dim);
  const BackwardArguments args{column_walk(p),
                               row_walk(p, p.row_items),
                               static_cast<const float*>(p.q),
                               static_cast<const float*>(p.k),
                               static_cast<const float*>(p.v),
                               static_cast<const float*>(p.d_o),
                               p.statistics,
                               static_cast<float*>(p.dq),
                               static_cast<float*>(p.dk),
                               static_cast<float*>(p.dv),
                               p.partials,
                               p.gathered_sums,
                               p.shape.head_dim,
                               p.shape.scale,
                               p.adds};
  if (p.shape.head_dim <= kMaxDim / 2)
    launch_backward<kMaxDim / 32>(p, args, stream);
  else
    launch_backward<kMaxDim / 16>(p, args, stream);
}

}  // namespace sb::gpu
