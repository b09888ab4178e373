#include "device/cuda_products.h"
#include "ops/backends.h"

namespace sb::cuda {
namespace {

void* begin_of(const Columns& columns) {
  return static_cast<char*>(columns.matrix.raw()) + columns.first * dtype_bytes(columns.matrix.dtype());
}

void multiply_by(const Exec& exec, const Columns& x, TensorView weight, bool transposed, float scale, const Columns& y,
                 bool accumulate) {
  exec.products->run(exec.stream, {.transpose_b = transposed,
                                   .m = x.rows(),
                                   .n = y.count,
                                   .k = x.count,
                                   .input = x.matrix.dtype(),
                                   .output = y.matrix.dtype(),
                                   .a = begin_of(x),
                                   .b = weight.raw(),
                                   .c = accumulate ? begin_of(y) : nullptr,
                                   .d = begin_of(y),
                                   .lda = x.width(),
                                   .ldd = y.width(),
                                   .scale = scale});
}

}  // namespace

void multiply_transposed(const Exec& exec, const Columns& x, TensorView weight, float scale, const Columns& y,
                         bool accumulate) {
  multiply_by(exec, x, weight, /*transposed=*/true, scale, y, accumulate);
}

void multiply(const Exec& exec, const Columns& x, TensorView weight, float scale, const Columns& y, bool accumulate) {
  multiply_by(exec, x, weight, /*transposed=*/false, scale, y, accumulate);
}

void add_outer_products(const Exec& exec, const Columns& dy, const Columns& x, TensorView gradient, bool accumulate) {
  exec.products->run(exec.stream, {.transpose_a = true,
                                   .m = dy.count,
                                   .n = x.count,
                                   .k = x.rows(),
                                   .input = x.matrix.dtype(),
                                   .output = DType::f32,
                                   .a = begin_of(dy),
                                   .b = begin_of(x),
                                   .c = accumulate ? gradient.raw() : nullptr,
                                   .d = gradient.raw(),
                                   .lda = dy.width(),
                                   .ldb = x.width()});
}

}  // namespace sb::cuda
