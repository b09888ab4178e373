#include "device/blas.h"
#include "ops/backends.h"

namespace sb::cpu {
namespace {

float* begin_of(const Columns& columns) {
  return columns.matrix.f32() + columns.first;
}

// y has the rank's few columns.
void scale_columns(float scale, const Columns& y) {
  if (scale == 1.0f) return;
  for (int64_t row = 0; row < y.rows(); ++row) {
    float* values = begin_of(y) + row * y.width();
    for (int64_t c = 0; c < y.count; ++c) values[c] *= scale;
  }
}

}  // namespace

void multiply_transposed(const Exec& exec, const Columns& x, TensorView weight, float scale, const Columns& y,
                         bool accumulate) {
  parallel_sgemm(*exec.pool, {.transpose_b = true,
                              .m = x.rows(),
                              .n = y.count,
                              .k = x.count,
                              .a = begin_of(x),
                              .lda = x.width(),
                              .b = weight.f32(),
                              .ldb = x.count,
                              .beta = accumulate ? 1.0f : 0.0f,
                              .c = begin_of(y),
                              .ldc = y.width()});
  scale_columns(scale, y);
}

void multiply(const Exec& exec, const Columns& x, TensorView weight, float scale, const Columns& y, bool accumulate) {
  parallel_sgemm(*exec.pool, {.m = x.rows(),
                              .n = y.count,
                              .k = x.count,
                              .a = begin_of(x),
                              .lda = x.width(),
                              .b = weight.f32(),
                              .ldb = y.count,
                              .beta = accumulate ? 1.0f : 0.0f,
                              .c = begin_of(y),
                              .ldc = y.width()});
  scale_columns(scale, y);
}

void add_outer_products(const Exec& exec, const Columns& dy, const Columns& x, TensorView gradient, bool accumulate) {
  parallel_sgemm(*exec.pool, {.transpose_a = true,
                              .m = dy.count,
                              .n = x.count,
                              .k = x.rows(),
                              .a = begin_of(dy),
                              .lda = dy.width(),
                              .b = begin_of(x),
                              .ldb = x.width(),
                              .beta = accumulate ? 1.0f : 0.0f,
                              .c = gradient.f32(),
                              .ldc = x.count});
}

}  // namespace sb::cpu
