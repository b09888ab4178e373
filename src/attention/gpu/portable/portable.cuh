#pragma once

// What the portable kernels share: the walks along row and column lists, the meaning of a subtile's rows, and the
// products of 16-bit tiles. CUDA files only.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>
#include <utility>

#include "attention/gpu/launch/check.cuh"
#include "attention/gpu/launch/head_dims.h"
#include "attention/gpu/launch/params.h"
#include "attention/gpu/portable/ptx.cuh"

namespace sb::gpu {

// Row r of a subtile is head r % heads of token r / heads.
struct SubtileRows {
  int token;        // first, in the packed tensors
  int tokens;       // of the subtile, padding included
  int valid;        // tokens that are no padding
  int head, heads;  // first query head; how many
  int query_heads;
  __device__ int token_of(int r) const { return r / heads; }
  __device__ bool exists(int r) const { return r / heads < valid; }
  // Of (token, head) in [tokens, query_heads].
  __device__ int64_t packed(int r) const {
    return static_cast<int64_t>(token + r / heads) * query_heads + head + r % heads;
  }
  // And in [query_heads, tokens].
  __device__ int64_t statistic(int r, int64_t all_tokens) const {
    return (head + r % heads) * all_tokens + token + r / heads;
  }
};

struct RowWalk {
  const ForwardItem* items;
  const uint32_t* entries;
  GatheredColumns gathered;
  Tiling tiling;
  int32_t query_heads, heads_per_kv, kv_heads;
  int32_t first_query;  // as in Shape

  __device__ SubtileRows rows(const ForwardItem& item, int sub) const {
    const int before = sub * tiling.tokens;
    return {item.token + before,      tiling.tokens, max(0, min(tiling.tokens, item.tokens - before)),
            item.head * tiling.heads, tiling.heads,  query_heads};
  }
  // Calls body(key position, first token of the tile that sees it) for every key block of a tile.
  template <typename Body>
  __device__ void each_block(const ForwardItem& item, Body body) const {
    const bool dense = item.list_begin < 0;
    const int visible = (item.position + item.tokens - 1) / tiling.block + 1;
    const int count = dense ? visible : item.list_count;
    for (int i = 0; i < count; ++i) {
      const uint32_t entry = dense ? static_cast<uint32_t>(i) : entries[item.list_begin + i];
      const int first = static_cast<int>(entry_first(entry)) - item.query_token;
      if (entry_id(entry) >= static_cast<uint32_t>(visible) || first >= item.tokens) continue;
      body(static_cast<int>(entry_id(entry)) * tiling.block, first);
    }
  }
  // Calls body(64 columns, which of them the query block sees) for every piece of gathered columns of a tile.
  template <typename Body>
  __device__ void each_piece(const ForwardItem& item, Body body) const {
    if (item.gathered < 0) return;
    const GatheredList& list = gathered.lists[item.gathered];
    const uint64_t* bits =
        gathered.bits + list.bits + static_cast<int64_t>(item.position / tiling.query_block) * list.pieces;
    const int32_t* columns = gathered.columns + list.columns;
    for (int p = 0; p < list.pieces; ++p)
      if (const uint64_t seen = bits[p]; seen != 0) body(columns + p * kGatheredPiece, seen);
  }
};

// Calls attend(key_row, sees) for every 64 keys that a tile looks at, blocks first, then gathered columns: key_row(r)
// is where one starts (negative: none), sees(h, r) whether this lane's row h, of token[h] of the tile, looks at it.
template <int D, typename Attend>
__device__ __forceinline__ void each_sixty_four(const RowWalk& walk, const ForwardItem& item, int kv_head,
                                                const int (&token)[2], Attend attend) {
  const int sequence = item.token - item.position + walk.first_query;
  const auto element = [&](int key) { return (static_cast<int64_t>(sequence + key) * walk.kv_heads + kv_head) * D; };
  walk.each_block(item, [&](int key_position, int first) {
    for (int part = 0; part < walk.tiling.block; part += 64) {
      const int position = key_position + part;
      if (position >= item.position + item.tokens) break;
      int limit[2];  // last key a row sees
#pragma unroll
      for (int h = 0; h < 2; ++h) limit[h] = token[h] < first ? -1 : item.position + token[h] - position;
      // Keys after the tile's last token are masked; zeros there keep what lies behind out of the products.
      attend([&](int r) { return position + r < item.position + item.tokens ? element(position + r) : int64_t{-1}; },
             [&](int h, int r) { return r <= limit[h]; });
    }
  });
  walk.each_piece(item, [&](const int32_t* columns, uint64_t seen) {
    attend([&](int r) { return seen >> r & 1 ? element(columns[r]) : int64_t{-1}; },
           [&](int h, int r) { return (seen >> r & 1) != 0 && columns[r] <= item.position + token[h]; });
  });
}

// Where the sums of a key's gradients as a gathered column are: row of [piece][64]; -1: it is none.
__device__ inline int64_t gathered_row(const GatheredColumns& gathered, int list, int position) {
  const GatheredList& found = gathered.lists[list];
  const int32_t* columns = gathered.columns + found.columns;
  int low = 0, high = found.pieces * kGatheredPiece;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (columns[middle] < position)
      low = middle + 1;
    else
      high = middle;
  }
  if (low == found.pieces * kGatheredPiece || columns[low] != position) return -1;
  return static_cast<int64_t>(found.slot) * kGatheredPiece + low;
}
// The place of that row's dK (which = 0) or dV (1) in the sums.
__device__ __forceinline__ int64_t gathered_place(int64_t row, int which, int d) {
  return ((row / kGatheredPiece * 2 + which) * kGatheredPiece + row % kGatheredPiece) * d;
}

struct ColumnWalk {
  const BackwardItem* items;
  const WorkCounts* counts;
  const int32_t* offsets;
  const uint32_t* entries;
  GatheredColumns gathered;
  Tiling tiling;
  int32_t columns, query_heads, heads_per_kv, kv_heads;
  int64_t all_tokens;
  int32_t first_query;  // as in Shape

  // Where an item's keys begin, counted from the first query.
  __device__ int behind_first(const BackwardItem& item) const { return item.position - first_query; }

  __device__ SubtileRows rows(const BackwardItem& item, int list_head, int subtile) const {
    return rows_of(item.token - item.position, list_head, subtile);
  }
  // `sequence`: its first token.
  __device__ SubtileRows rows_of(int sequence, int list_head, int subtile) const {
    const int token = sequence + subtile * tiling.tokens;
    // Rows past the end of the sequence have a log-sum-exp of +infinity; here only the tensor's end counts.
    return {token,
            tiling.tokens,
            static_cast<int>(max(int64_t{0}, min(static_cast<int64_t>(tiling.tokens), all_tokens - token))),
            list_head * tiling.heads,
            tiling.heads,
            query_heads};
  }
  // Calls body(list head, subtile of the sequence, first token of it that sees the keys) for all of an item.
  template <typename Body>
  __device__ void each_subtile(const BackwardItem& item, Body body) const {
    const int units = item.dense ? tiling.tile : tiling.query_block / tiling.tokens;  // subtiles of an entry, or a tile
    int before = 0;
    for (int head = item.head * heads_per_kv; head < (item.head + 1) * heads_per_kv; ++head) {
      int at = max(behind_first(item), 0) / (tiling.tile * tiling.tokens), count = item.subtiles / tiling.tile - at;
      if (!item.dense) {
        const int column = head / tiling.parts * columns + item.column;
        at = offsets[column];
        count = offsets[column + 1] - at;
      }
      const int begin = max(item.begin - before, 0), end = min(item.begin + item.count - before, count);
      before += count;
      for (int i = begin; i < end; ++i) {
        const uint32_t entry = item.dense ? static_cast<uint32_t>(at + i) : entries[at + i];
        for (int u = 0; u < units; ++u) {
          const int subtile = static_cast<int>(entry_id(entry)) * units + u;
          const int first = static_cast<int>(entry_first(entry)) - u * tiling.tokens;
          if (subtile < item.subtiles && first < tiling.tokens && (subtile + 1) * tiling.tokens > behind_first(item))
            body(head, subtile, first);
        }
      }
    }
  }
};

template <typename Params>
RowWalk row_walk(const Params& p, const ForwardItem* items) {
  const Shape& shape = p.shape;
  return {items,          p.row_entries,     p.gathered,
          p.tiling,       shape.query_heads, shape.query_heads / shape.kv_heads / p.tiling.heads,
          shape.kv_heads, shape.first_query};
}
inline ColumnWalk column_walk(const BackwardParams& p) {
  const Shape& shape = p.shape;
  return {p.items,          p.counts,          p.column_offsets,
          p.column_entries, p.gathered,        p.tiling,
          p.columns,        shape.query_heads, shape.query_heads / shape.kv_heads / p.tiling.heads,
          shape.kv_heads,   shape.tokens,      shape.first_query};
}

// A piece of gathered columns and everything that sees it; a thread block each.
struct PieceWalk {
  ColumnWalk walk;
  GatheredList list;
  int piece;
  __device__ explicit PieceWalk(const ColumnWalk& columns)
      : walk(columns),
        list(columns.gathered.lists[columns.gathered.pieces[blockIdx.x]]),
        piece(blockIdx.x - list.slot) {}

  __device__ int column(int i) const { return walk.gathered.columns[list.columns + piece * kGatheredPiece + i]; }
  __device__ int kv_head() const { return list.head * walk.tiling.parts / walk.heads_per_kv; }
  // Element where a column's key starts, negative for what pads the list.
  __device__ int64_t key_row(int i, int d) const {
    const int key = column(i);
    return key == kNoColumn ? -1 : (static_cast<int64_t>(list.token + key) * walk.kv_heads + kv_head()) * d;
  }
  // Calls body(list head, subtile of the sequence, which columns it sees).
  template <typename Body>
  __device__ void each_subtile(Body body) const {
    const Tiling& tiling = walk.tiling;
    const int units = tiling.query_block / tiling.tokens;
    for (int row = 0; row < list.rows; ++row) {
      const uint64_t seen = walk.gathered.bits[list.bits + static_cast<int64_t>(row) * list.pieces + piece];
      if (seen == 0) continue;
      for (int part = 0; part < tiling.parts; ++part)
        for (int u = 0; u < units; ++u)
          if ((row * units + u) * tiling.tokens < list.tokens)
            body(list.head * tiling.parts + part, row * units + u, seen);
    }
  }
};

// Calls launch(std::integral_constant<int, D>) for the head dimensions that tiles of bf16 are compiled for.
template <typename Launch>
void for_head_dim(int d, Launch launch) {
  const bool launched = [&]<size_t... I>(std::index_sequence<I...>) {
    return ((d == kBf16HeadDims[I] && (launch(std::integral_constant<int, kBf16HeadDims[I]>{}), true)) || ...);
  }
  (std::make_index_sequence<kBf16HeadDims.size()>{});
  if (!launched) throw_unsupported("head_dim in bf16", d);
}

// --- tiles of bf16 in shared memory: rows of D and 8 more, so that neighbouring rows lie in different banks
// -----------
template <int D>
constexpr int kTileStride = D + 8;

// 64 rows by 128 threads; offset(row) is the element where a row starts, negative for rows that are to be zero.
template <int D, typename Offset>
__device__ __forceinline__ void load_tile(__nv_bfloat16* to, const __nv_bfloat16* from, Offset offset) {
  constexpr int kPieces = D / 8;
  for (int i = threadIdx.x; i < 64 * kPieces; i += 128) {
    const int row = i / kPieces, piece = i % kPieces;
    const int64_t at = offset(row);
    copy_async(to + row * kTileStride<D> + piece * 8, from + (at < 0 ? 0 : at) + piece * 8, at >= 0);
  }
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&two);
}

// c[16 × 8·kTiles] = A·Bᵀ over D: A the 16 rows of tile `a` from `row`, B rows of tile `b` from `first`. The
// accumulator of a lane: c[4j], c[4j+1] of row lane/4, c[4j+2], c[4j+3] of the row 8 below; columns 8j + 2·(lane % 4)
// and the next.
template <int D, int kTiles>
__device__ __forceinline__ void product(float (&c)[4 * kTiles], const __nv_bfloat16* a, int row, const __nv_bfloat16* b,
                                        int first) {
  const int lane = threadIdx.x % 32;
  const uint32_t from_a = window(a + (row + lane % 16) * kTileStride<D> + lane / 16 * 8);
  const uint32_t from_b = window(b + (first + (lane & 7) + (lane >> 4) * 8) * kTileStride<D> + ((lane >> 3) & 1) * 8);
#pragma unroll
  for (int i = 0; i < 4 * kTiles; ++i) c[i] = 0;
#pragma unroll
  for (int kk = 0; kk < D / 16; ++kk) {
    uint32_t x[4];
    matrix_load(x, from_a + kk * 32);
#pragma unroll
    for (int j = 0; j < kTiles; j += 2) {
      uint32_t y[4];
      matrix_load(y, from_b + j * 8 * kTileStride<D> * 2 + kk * 32);
      multiply(c + 4 * j, x, y[0], y[1]);
      multiply(c + 4 * j + 4, x, y[2], y[3]);
    }
  }
}

// c[16 × D] += A·B: A an accumulator of 16 × 8·kTiles rounded to bf16, B rows of tile `b` from `first`.
template <int D, int kTiles>
__device__ __forceinline__ void add_product(float (&c)[D / 2], const float (&a)[4 * kTiles], const __nv_bfloat16* b,
                                            int first) {
  const int lane = threadIdx.x % 32;
  const uint32_t from_b = window(b + (first + lane % 16) * kTileStride<D> + lane / 16 * 8);
#pragma unroll
  for (int k = 0; k < kTiles / 2; ++k) {
    const uint32_t x[4] = {pack(a[8 * k], a[8 * k + 1]), pack(a[8 * k + 2], a[8 * k + 3]),
                           pack(a[8 * k + 4], a[8 * k + 5]), pack(a[8 * k + 6], a[8 * k + 7])};
#pragma unroll
    for (int j = 0; j < D / 8; j += 2) {
      uint32_t y[4];
      matrix_load_transposed(y, from_b + k * 16 * kTileStride<D> * 2 + j * 16);
      multiply(c + 4 * j, x, y[0], y[1]);
      multiply(c + 4 * j + 4, x, y[2], y[3]);
    }
  }
}

// Takes 64 more scores of row h of an accumulator of product() into its running softmax: they are scaled, or left out
// where sees(h, column) is false, and become exponentials over the new `top`, which are added to this lane's part of
// `sum`. Returns what has been added up before has to be multiplied with.
template <typename Sees>
__device__ __forceinline__ float softmax_step(float (&s)[32], int h, float scale, float& top, float& sum, Sees sees) {
  const int lane = threadIdx.x % 32;
  float m = top;
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float& x = s[4 * j + 2 * h + e];
      x = sees(h, 8 * j + 2 * (lane % 4) + e) ? x * scale : -INFINITY;
      m = fmaxf(m, x);
    }
  m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
  m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
  const float base = m == -INFINITY ? 0.f : m;
  const float shrink = __expf(top - base);
  float added = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float& x = s[4 * j + 2 * h + e];
      x = __expf(x - base);
      added += x;
    }
  sum = sum * shrink + added;
  top = m;
  return shrink;
}
// The four lanes' parts of a row's sum.
__device__ __forceinline__ float softmax_sum(float part) {
  part += __shfl_xor_sync(~0u, part, 1);
  return part + __shfl_xor_sync(~0u, part, 2);
}

}  // namespace sb::gpu
