#pragma once

#include <cstdint>

#include "device/exec.h"

namespace sb::cuda {

// Sums over many rows go in two steps without atomics: at most this many blocks each leave a row of partial sums, then
// those are added in order. The number is fixed, so that a result does not depend on the GPU.
constexpr int kPartialRows = 264;

// Of scratch memory, for sums of `width` columns.
inline int64_t partial_sums_bytes(int64_t width) {
  return Arena::rounded(kPartialRows * width * static_cast<int64_t>(sizeof(float)));
}

// sums [width] += Σ over the `rows` rows of partial [rows, width].
void add_partial_sums(const Exec& exec, const float* partial, int rows, int64_t width, float* sums);

// sums [width] += Σ_t dy[t, ·] · factor, where factor is 1, or x[t, ·] · rstd[t] when x is given. Uses exec.scratch.
void add_column_sums(const Exec& exec, TensorView dy, int64_t rows, int64_t width, TensorView x, TensorView rstd,
                     float* sums);

}  // namespace sb::cuda
