#pragma once

#include "device/exec.h"

namespace sb {

// Columns of a row-major matrix [T, width].
struct Columns {
  TensorView matrix;
  int64_t first = 0, count = 0;

  // All of them.
  explicit Columns(const TensorView& all) : matrix(all), count(all.dim(1)) {}
  Columns(const TensorView& of, int64_t first_column, int64_t columns)
      : matrix(of), first(first_column), count(columns) {}
  int64_t rows() const { return matrix.dim(0); }
  int64_t width() const { return matrix.dim(1); }
};

// Products with narrow matrices, as low-rank adapters need them; their operands may lie in wider ones.

// y = scale · x · weightᵀ, weight [y.count, x.count]; with accumulate y += x · weightᵀ, where scale must be 1.
void multiply_transposed(const Exec& exec, const Columns& x, TensorView weight, float scale, const Columns& y,
                         bool accumulate);
// y = scale · x · weight, weight [x.count, y.count]; with accumulate y += x · weight, where scale must be 1.
void multiply(const Exec& exec, const Columns& x, TensorView weight, float scale, const Columns& y, bool accumulate);
// gradient [dy.count, x.count] (fp32) += dyᵀ · x; without accumulate it is written.
void add_outer_products(const Exec& exec, const Columns& dy, const Columns& x, TensorView gradient, bool accumulate);

}  // namespace sb
