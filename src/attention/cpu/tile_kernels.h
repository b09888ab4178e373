#pragma once

#include <cstdint>

#include "core/cpu_isa.h"

namespace sb {

// The arithmetic of CPU attention, one query tile against one key tile at a time; dense and sparse attention are both
// walks that call it. Compiled once per instruction set.
//
// Rows of a query tile are (token, head of the group), token-major. The operands of a tile are packed copies:
//   row-major   [rows][padded] with padded = head_dim rounded up to kDepthUnit, zeros behind head_dim (V, K, O, dQ …);
//   slabs       the same columns cut into slabs of row_stride(padded) columns, each [rows][row_stride] (Q, dO: their
//               row stride must be a compile-time constant of the inner loop);
//   panels      transposed: [key / panel][padded][panel] (Kᵀ, Vᵀ); a last panel of w < panel keys is [padded][w].
// A row sees a prefix of the keys of a tile: that one number expresses causality, the staircase and the end of a
// sequence.

constexpr int kKeyTile = 128;      // most keys of a tile
constexpr int kScoreStride = 144;  // row stride of score tiles: a multiple of 512 bytes would fall into few cache sets
constexpr int kDepthUnit = 16;     // head_dim is padded to a multiple of it
constexpr int kPanelSlack = 32;    // floats behind the last panel that may be read (never used)
constexpr int kDenseTileRows = 112;  // rows of a tile that is free to choose: a multiple of 14 and of 8

constexpr int kMaxHeadDim = 1024;  // slabs are gathered in small arrays
constexpr int kMaxSegments = 16;

constexpr int padded_depth(int head_dim) {
  return (head_dim + kDepthUnit - 1) / kDepthUnit * kDepthUnit;
}
constexpr int row_stride(int padded) {
  return padded <= 64 ? 64 : 128;
}
constexpr int slabs(int padded) {
  return (padded + row_stride(padded) - 1) / row_stride(padded);
}
// Floats of `rows` rows in slabs.
constexpr int64_t slab_floats(int64_t rows, int padded) {
  return rows * row_stride(padded) * slabs(padded);
}

// What the rows [row_begin, rows) of a query tile and the keys of a key tile have in common.
struct TilePair {
  int padded;
  int rows, row_begin;
  int keys;                // of the tile, 1 … kKeyTile
  const int32_t* visible;  // [rows] keys that a row sees, not falling from row to row; null: all of them
  const float* q;          // slabs, scaled
  int64_t q_slab_stride;   // floats from one slab to the next
  const float* k_panels;
};

constexpr int kScoreFloats = 16 * kScoreStride;

struct ForwardTile {
  TilePair pair;
  const float* v;  // [keys][padded]
  // Running state of the online softmax, [rows]: the output is out / sum.
  float *maximum, *sum;
  float* out;     // [rows][padded]
  float* scores;  // scratch of kScoreFloats
};

struct BackwardTile {
  TilePair pair;
  const float* dout;  // slabs, slab stride as q
  const float* v_panels;
  const float* k;               // [keys][padded]
  const float *lse, *delta;     // [rows]; delta = rowsum(dout · out)
  float* dq;                    // [rows][padded], += (without the scale)
  float *probability, *dscore;  // [rows][kScoreStride]: written in the rows [row_begin, rows), zeros where not visible
};

// One piece of the sum over rows in dV = Pᵀ dO and dK = dSᵀ Q.
struct RowSegment {
  const float *probability, *dscore;  // first row of the piece
  const float *dout, *q;              // slabs
  int rows;
};

struct KeyGradients {
  int padded, keys;
  const RowSegment* segments;
  int segment_count;
  int64_t slab_stride;
  float *dk, *dv;  // [keys][padded], +=
};

struct TileKernels {
  int panel;  // keys of a panel
  // Row i is rows[i·stride …+depth); the result in panels of one tile or of a whole sequence.
  void (*pack_panels)(const float* rows, int64_t stride, int64_t count, int depth, int padded, float* panels);
  void (*pack_rows)(const float* rows, int64_t stride, int64_t count, int depth, int padded, float* out);
  // One row, times `factor`, into slabs.
  void (*pack_slab_row)(const float* row, int depth, int padded, float factor, float* slab_row, int64_t slab_stride);
  void (*forward)(const ForwardTile& tile);
  void (*backward)(const BackwardTile& tile);
  void (*key_gradients)(const KeyGradients& keys);
  // target[i·stride …+depth) += source[i·padded …), `count` rows.
  void (*add_rows)(const float* source, int padded, int64_t count, int depth, float* target, int64_t stride);
  // out[0…depth) = factor · source.
  void (*scale_row)(const float* source, int depth, float factor, float* out);
  float (*dot)(const float* a, const float* b, int depth);
};

const TileKernels& tile_kernels(CpuIsa isa);

}  // namespace sb
