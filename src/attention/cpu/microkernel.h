#pragma once

// Register-blocked products for files compiled once per instruction set: C[MR][NV vectors] (+)= A · B. A is read one
// number at a time and broadcast, B in vectors; the accumulators stay in registers over the whole depth, which may be
// spread over several pieces.

#include <cstdint>

#include "ops/cpu/simd.h"

namespace sb::SB_ISA {

#if defined(SB_ISA_avx512)
constexpr int kMaxRows = 14;  // 28 accumulators, 2 vectors of B, 1 broadcast: 31 of 32 registers
#else
constexpr int kMaxRows = 6;  // 12 + 2 + 1 of 16
#endif
constexpr int kVectors = 2;
constexpr int kPanel = kVectors * kLanes;

// Element (i, k) of A; the stride is a constant, so that all rows are reached from one pointer.
template <int Stride>
struct RowMajor {
  static constexpr int64_t at(int i, int64_t k) { return i * Stride + k; }
};
template <int Stride>
struct ColumnMajor {
  static constexpr int64_t at(int i, int64_t k) { return k * Stride + i; }
};

struct Piece {
  const float *a, *b;
  int64_t depth;
};

template <class A, int MR, int NV>
[[gnu::noinline]] void product(const Piece* pieces, int count, int64_t ldb, float* c, int64_t ldc, bool accumulate) {
  Vf acc[MR][NV];
  if (accumulate) {
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
      for (int n = 0; n < NV; ++n) acc[i][n] = load(c + i * ldc + n * kLanes);
    }
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
      for (int n = 0; n < NV; ++n) acc[i][n] = zero();
    }
  }
  for (int piece = 0; piece < count; ++piece) {
    const float* a = pieces[piece].a;
    const float* b = pieces[piece].b;
    for (int64_t k = 0; k < pieces[piece].depth; ++k) {
      Vf bv[NV];
#pragma GCC unroll 4
      for (int n = 0; n < NV; ++n) bv[n] = load(b + n * kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < MR; ++i) {
        const Vf av = splat(a[A::at(i, 0)]);
#pragma GCC unroll 4
        for (int n = 0; n < NV; ++n) acc[i][n] = fma(av, bv[n], acc[i][n]);
      }
      a += A::at(0, 1);
      b += ldb;
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) store(c + i * ldc + n * kLanes, acc[i][n]);
  }
}

using ProductFn = void (*)(const Piece*, int, int64_t, float*, int64_t, bool);

// The product for `rows` (1 … kMaxRows) rows of C.
template <class A, int NV, int MR = kMaxRows>
ProductFn product_for(int rows) {
  if constexpr (MR > 1) {
    if (rows < MR) return product_for<A, NV, MR - 1>(rows);
  }
  return &product<A, MR, NV>;
}

// Rows of the next chunk when `remaining` are left: chunks of nearly equal size.
inline int chunk_of(int remaining) {
  const int chunks = (remaining + kMaxRows - 1) / kMaxRows;
  return (remaining + chunks - 1) / chunks;
}

}  // namespace sb::SB_ISA
