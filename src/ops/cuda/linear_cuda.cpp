#include "device/cuda_products.h"
#include "device/memory.h"
#include "ops/backends.h"
#include "ops/cuda_partial_sums.h"

namespace sb::cuda {

void linear_forward(const Exec& exec, TensorView x, TensorView weight, TensorView bias, TensorView y,
                    TensorView residual) {
  const int64_t tokens = x.dim(0), in = x.dim(1), out = weight.dim(0);
  if (tokens == 0 || out == 0) return;
  exec.products->run(exec.stream, {.transpose_b = true,
                                   .m = tokens,
                                   .n = out,
                                   .k = in,
                                   .input = x.dtype(),
                                   .output = y.dtype(),
                                   .a = x.raw(),
                                   .b = weight.raw(),
                                   .c = residual.raw(),
                                   .d = y.raw(),
                                   .bias = bias.raw()});
}

void linear_backward_input(const Exec& exec, TensorView dy, TensorView weight, TensorView dx, bool accumulate) {
  const int64_t tokens = dy.dim(0), in = weight.dim(1), out = weight.dim(0);
  if (tokens == 0 || in == 0) return;
  exec.products->run(exec.stream, {.m = tokens,
                                   .n = in,
                                   .k = out,
                                   .input = dy.dtype(),
                                   .output = dx.dtype(),
                                   .a = dy.raw(),
                                   .b = weight.raw(),
                                   .c = accumulate ? dx.raw() : nullptr,
                                   .d = dx.raw()});
}

void linear_backward_weight(const Exec& exec, TensorView x, TensorView dy, TensorView dweight, bool accumulate) {
  const int64_t tokens = x.dim(0), in = x.dim(1), out = dy.dim(1);
  if (tokens == 0) {
    if (!accumulate) zero_tensor(exec, dweight);
    return;
  }
  exec.products->run(exec.stream, {.transpose_a = true,
                                   .m = out,
                                   .n = in,
                                   .k = tokens,
                                   .input = x.dtype(),
                                   .output = DType::f32,
                                   .a = dy.raw(),
                                   .b = x.raw(),
                                   .c = accumulate ? dweight.raw() : nullptr,
                                   .d = dweight.raw()});
}

void linear_backward_bias(const Exec& exec, TensorView dy, TensorView dbias) {
  add_column_sums(exec, dy, dy.dim(0), dy.dim(1), {}, {}, dbias.f32());
}

}  // namespace sb::cuda
