#include "attention/cpu/tile_kernels.h"

#include "attention/cpu/microkernel.h"

namespace sb::SB_ISA {
namespace {

static_assert(kMaxRows * kScoreStride <= kScoreFloats);
static_assert(kPanel <= kPanelSlack && kKeyTile % kPanel == 0 && kScoreStride >= kKeyTile);
static_assert(kDepthUnit % kLanes == 0 && kPanel % 4 == 0);

int smaller(int a, int b) {
  return a < b ? a : b;
}

// Four columns of four rows, as four rows of a panel.
void transpose_four(const float* rows, int64_t stride, float* panel) {
  using Four = float __attribute__((vector_size(16)));
  Four row[4];
  for (int i = 0; i < 4; ++i) __builtin_memcpy(&row[i], rows + i * stride, sizeof(Four));
  const Four low01 = __builtin_shufflevector(row[0], row[1], 0, 4, 1, 5),
             low23 = __builtin_shufflevector(row[2], row[3], 0, 4, 1, 5),
             high01 = __builtin_shufflevector(row[0], row[1], 2, 6, 3, 7),
             high23 = __builtin_shufflevector(row[2], row[3], 2, 6, 3, 7);
  const Four columns[4] = {
      __builtin_shufflevector(low01, low23, 0, 1, 4, 5), __builtin_shufflevector(low01, low23, 2, 3, 6, 7),
      __builtin_shufflevector(high01, high23, 0, 1, 4, 5), __builtin_shufflevector(high01, high23, 2, 3, 6, 7)};
  for (int c = 0; c < 4; ++c) __builtin_memcpy(panel + c * kPanel, &columns[c], sizeof(Four));
}

void pack_panels(const float* rows, int64_t stride, int64_t count, int depth, int padded, float* panels) {
  for (int64_t begin = 0; begin < count; begin += kPanel, rows += kPanel * stride) {
    const int width = static_cast<int>(count - begin < kPanel ? count - begin : kPanel);
    const int by_four = width == kPanel ? depth / 4 * 4 : 0;
    for (int c = 0; c < by_four; c += 4)
      for (int i = 0; i < kPanel; i += 4) transpose_four(rows + i * stride + c, stride, panels + c * kPanel + i);
    for (int i = 0; i < width; ++i)
      for (int c = by_four; c < depth; ++c) panels[c * width + i] = rows[i * stride + c];
    for (int64_t i = int64_t{depth} * width; i < int64_t{padded} * width; ++i) panels[i] = 0.0f;
    panels += int64_t{padded} * width;
  }
}

void pack_rows(const float* rows, int64_t stride, int64_t count, int depth, int padded, float* out) {
  for (int64_t i = 0; i < count; ++i, out += padded, rows += stride) {
    for (int c = 0; c < depth; ++c) out[c] = rows[c];
    for (int c = depth; c < padded; ++c) out[c] = 0.0f;
  }
}

void pack_slab_row(const float* row, int depth, int padded, float factor, float* slab_row, int64_t slab_stride) {
  const int stride = row_stride(padded);
  for (int begin = 0; begin < padded; begin += stride, slab_row += slab_stride) {
    const int end = smaller(padded - begin, stride), filled = smaller(depth - begin, end);
    for (int c = 0; c < filled; ++c) slab_row[c] = row[begin + c] * factor;
    for (int c = filled > 0 ? filled : 0; c < end; ++c) slab_row[c] = 0.0f;
  }
}

// scores[rows][kScoreStride] = rows of `a` (slabs) times the first `keys` keys of the panels. Columns behind the last
// key of a panel that is not full hold garbage.
template <int Stride>
void score_rows(const TilePair& pair, const float* a, const float* panels, int row, int rows, int keys, float* scores) {
  Piece pieces[kMaxHeadDim / 64];
  const ProductFn multiply = product_for<RowMajor<Stride>, kVectors>(rows);
  const int count = (pair.padded + Stride - 1) / Stride;
  for (int begin = 0; begin < keys; begin += kPanel) {
    const int width = smaller(pair.keys - begin, kPanel);
    for (int s = 0; s < count; ++s) {
      pieces[s] = {a + s * pair.q_slab_stride + int64_t{row} * Stride, panels + int64_t{s} * Stride * width,
                   smaller(pair.padded - s * Stride, Stride)};
    }
    multiply(pieces, count, width, scores + begin, kScoreStride, false);
    panels += int64_t{pair.padded} * width;
  }
}

void score_rows(const TilePair& pair, const float* a, const float* panels, int row, int rows, int keys, float* scores) {
  if (pair.padded <= 64) {
    score_rows<64>(pair, a, panels, row, rows, keys, scores);
  } else {
    score_rows<128>(pair, a, panels, row, rows, keys, scores);
  }
}

// c[rows][columns] += A · b, A given by `a` and its map, b [depth][ldb].
template <class A>
void add_product(int rows, const float* a, const float* b, int64_t ldb, int depth, int columns, float* c, int64_t ldc) {
  const ProductFn wide = product_for<A, kVectors>(rows);
  int begin = 0;
  for (; begin + kPanel <= columns; begin += kPanel) {
    const Piece piece = {a, b + begin, depth};
    wide(&piece, 1, ldb, c + begin, ldc, true);
  }
  if (begin < columns) {
    const Piece piece = {a, b + begin, depth};
    product_for<A, 1>(rows)(&piece, 1, ldb, c + begin, ldc, true);
  }
}

// Keys that the rows up to and including `row` see at most.
int visible_keys(const TilePair& pair, int row) {
  return pair.visible ? pair.visible[row] : pair.keys;
}

void zero_from(float* row, int begin, int end) {
  for (int i = begin; i < end; ++i) row[i] = 0.0f;
}

float row_maximum(const float* row, int count) {
  Vf a = splat(-__builtin_inff()), b = a;
  int i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    a = max(a, load(row + i));
    b = max(b, load(row + i + kLanes));
  }
  for (; i < count; i += kLanes) {
    const Mask mask = first_lanes(smaller(count - i, kLanes));
    b = max(b, select(mask, load(row + i, mask), b));
  }
  return reduce_max(max(a, b));
}

// row = exp(row - shift) in place, zeros from `count` to `end`; returns the sum.
float exponentiate(float* row, int count, int end, float shift) {
  const Vf offset = splat(shift);
  Vf a = zero(), b = zero();
  int i = 0;
  for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
    const Vf x = exp_nonpositive(load(row + i) - offset), y = exp_nonpositive(load(row + i + kLanes) - offset);
    store(row + i, x);
    store(row + i + kLanes, y);
    a = a + x;
    b = b + y;
  }
  for (; i < count; i += kLanes) {
    const Mask mask = first_lanes(smaller(count - i, kLanes));
    const Vf x = select(mask, exp_nonpositive(load(row + i, mask) - offset), zero());
    store(row + i, x);
    a = a + x;
  }
  zero_from(row, i, end);
  return reduce_add(a + b);
}

void forward(const ForwardTile& tile) {
  const TilePair& pair = tile.pair;
  for (int row = pair.row_begin, rows; row < pair.rows; row += rows) {
    rows = chunk_of(pair.rows - row);
    const int keys = visible_keys(pair, row + rows - 1);
    if (keys == 0) continue;
    score_rows(pair, pair.q, pair.k_panels, row, rows, keys, tile.scores);

    float shift[16], correction[16];
    for (int i = 0; i < 16; ++i) shift[i] = correction[i] = 0.0f;
    for (int i = 0; i < rows; ++i) {
      const float maximum = row_maximum(tile.scores + i * kScoreStride, visible_keys(pair, row + i));
      shift[i] = tile.maximum[row + i] > maximum ? tile.maximum[row + i] : maximum;
      correction[i] = tile.maximum[row + i] - shift[i];  // NaN for a row that has seen nothing yet: not used
    }
    for (int i = 0; i < rows; i += kLanes) store(correction + i, exp_nonpositive(load(correction + i)));
    for (int i = 0; i < rows; ++i) {
      const int count = visible_keys(pair, row + i);
      float* scores = tile.scores + i * kScoreStride;
      if (count == 0) {
        zero_from(scores, 0, keys);
        continue;
      }
      const float sum = exponentiate(scores, count, keys, shift[i]);
      tile.sum[row + i] = tile.sum[row + i] * correction[i] + sum;
      if (shift[i] > tile.maximum[row + i]) {
        tile.maximum[row + i] = shift[i];
        float* out = tile.out + int64_t{row + i} * pair.padded;
        const Vf factor = splat(correction[i]);
        for (int c = 0; c < pair.padded; c += kLanes) store(out + c, load(out + c) * factor);
      }
    }
    add_product<RowMajor<kScoreStride>>(rows, tile.scores, tile.v, pair.padded, keys, pair.padded,
                                        tile.out + int64_t{row} * pair.padded, pair.padded);
  }
}

// P = exp(S - lse) and dS = P · (dP - delta), in place, zeros from `count` to `end`.
void score_gradients(float* scores, float* dscore, int count, int end, float lse, float delta) {
  const Vf shift = splat(lse), offset = splat(delta);
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Vf p = exp_nonpositive(load(scores + i) - shift);
    store(dscore + i, p * (load(dscore + i) - offset));
    store(scores + i, p);
  }
  if (i < count) {
    const Mask mask = first_lanes(count - i);
    const Vf p = select(mask, exp_nonpositive(load(scores + i, mask) - shift), zero());
    store(dscore + i, p * (load(dscore + i, mask) - offset));
    store(scores + i, p);
    i += kLanes;
  }
  zero_from(scores, i, end);
  zero_from(dscore, i, end);
}

void backward(const BackwardTile& tile) {
  const TilePair& pair = tile.pair;
  const int most = visible_keys(pair, pair.rows - 1);
  for (int row = pair.row_begin, rows; row < pair.rows; row += rows) {
    rows = chunk_of(pair.rows - row);
    const int keys = visible_keys(pair, row + rows - 1);
    float* scores = tile.probability + int64_t{row} * kScoreStride;
    float* dscore = tile.dscore + int64_t{row} * kScoreStride;
    if (keys > 0) {
      score_rows(pair, pair.q, pair.k_panels, row, rows, keys, scores);
      score_rows(pair, tile.dout, tile.v_panels, row, rows, keys, dscore);
    }
    for (int i = 0; i < rows; ++i) {
      score_gradients(scores + i * kScoreStride, dscore + i * kScoreStride, visible_keys(pair, row + i), most,
                      tile.lse[row + i], tile.delta[row + i]);
    }
    if (keys > 0) {
      add_product<RowMajor<kScoreStride>>(rows, dscore, tile.k, pair.padded, keys, pair.padded,
                                          tile.dq + int64_t{row} * pair.padded, pair.padded);
    }
  }
}

template <int NV>
void key_gradient_columns(const KeyGradients& t, int key, int keys, int column, int64_t ldb, int64_t slab_offset) {
  Piece value[kMaxSegments], score[kMaxSegments];
  for (int s = 0; s < t.segment_count; ++s) {
    const RowSegment& segment = t.segments[s];
    value[s] = {segment.probability + key, segment.dout + slab_offset, segment.rows};
    score[s] = {segment.dscore + key, segment.q + slab_offset, segment.rows};
  }
  const ProductFn multiply = product_for<ColumnMajor<kScoreStride>, NV>(keys);
  const int64_t target = int64_t{key} * t.padded + column;
  multiply(value, t.segment_count, ldb, t.dv + target, t.padded, true);
  multiply(score, t.segment_count, ldb, t.dk + target, t.padded, true);
}

void key_gradients(const KeyGradients& t) {
  const int stride = row_stride(t.padded);
  for (int key = 0, keys; key < t.keys; key += keys) {
    keys = chunk_of(t.keys - key);
    for (int slab = 0; slab * stride < t.padded; ++slab) {
      const int width = smaller(t.padded - slab * stride, stride);
      int column = 0;
      for (; column + kPanel <= width; column += kPanel) {
        key_gradient_columns<kVectors>(t, key, keys, slab * stride + column, stride, slab * t.slab_stride + column);
      }
      if (column < width) {
        key_gradient_columns<1>(t, key, keys, slab * stride + column, stride, slab * t.slab_stride + column);
      }
    }
  }
}

void add_rows(const float* source, int padded, int64_t count, int depth, float* target, int64_t stride) {
  for (int64_t i = 0; i < count; ++i, source += padded, target += stride) {
    for (int c = 0; c < depth; ++c) target[c] += source[c];
  }
}

void scale_row(const float* source, int depth, float factor, float* out) {
  for (int c = 0; c < depth; ++c) out[c] = source[c] * factor;
}

float dot(const float* a, const float* b, int depth) {
  Vf sum = zero();
  for (int c = 0; c < depth; c += kLanes) {
    const Mask mask = first_lanes(smaller(depth - c, kLanes));
    sum = fma(load(a + c, mask), load(b + c, mask), sum);
  }
  return reduce_add(sum);
}

}  // namespace

extern const TileKernels kTileKernels;
const TileKernels kTileKernels = {kPanel,   pack_panels,   pack_rows, pack_slab_row, forward,
                                  backward, key_gradients, add_rows,  scale_row,     dot};

}  // namespace sb::SB_ISA
