#include <algorithm>
#include <utility>

#include "device/blas.h"
#include "device/memory.h"
#include "ops/backends.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/pieces.h"

namespace sb::cpu {

void linear_forward(const Exec& exec, TensorView x, TensorView weight, TensorView bias, TensorView y,
                    TensorView residual) {
  if (!residual.empty()) copy_tensor(exec, residual, y);
  const int64_t tokens = x.dim(0), in = x.dim(1), out = weight.dim(0);
  parallel_sgemm(*exec.pool, {.transpose_b = true,
                              .m = tokens,
                              .n = out,
                              .k = in,
                              .a = x.f32(),
                              .lda = in,
                              .b = weight.f32(),
                              .ldb = in,
                              .beta = residual.empty() ? 0.0f : 1.0f,
                              .c = y.f32(),
                              .ldc = out,
                              .bias = bias.empty() ? nullptr : bias.f32()});
}

void add(const Exec& exec, TensorView a, TensorView b, TensorView y) {
  // The sum is the same either way round.
  if (b.raw() == y.raw()) std::swap(a, b);
  exec.pool->parallel_for(y.elements(), rows_per_piece(1), [&](int64_t begin, int64_t end, int) {
    if (a.raw() != y.raw()) std::copy(a.f32() + begin, a.f32() + end, y.f32() + begin);
    cpu_kernels().add(b.f32() + begin, end - begin, y.f32() + begin);
  });
}

void linear_backward_input(const Exec& exec, TensorView dy, TensorView weight, TensorView dx, bool accumulate) {
  const int64_t tokens = dy.dim(0), in = weight.dim(1), out = weight.dim(0);
  parallel_sgemm(*exec.pool, {.m = tokens,
                              .n = in,
                              .k = out,
                              .a = dy.f32(),
                              .lda = out,
                              .b = weight.f32(),
                              .ldb = in,
                              .beta = accumulate ? 1.0f : 0.0f,
                              .c = dx.f32(),
                              .ldc = in});
}

void linear_backward_weight(const Exec& exec, TensorView x, TensorView dy, TensorView dweight, bool accumulate) {
  const int64_t tokens = x.dim(0), in = x.dim(1), out = dy.dim(1);
  parallel_sgemm(*exec.pool, {.transpose_a = true,
                              .m = out,
                              .n = in,
                              .k = tokens,
                              .a = dy.f32(),
                              .lda = out,
                              .b = x.f32(),
                              .ldb = in,
                              .beta = accumulate ? 1.0f : 0.0f,
                              .c = dweight.f32(),
                              .ldc = in});
}

void linear_backward_bias(const Exec& exec, TensorView dy, TensorView dbias) {
  const int64_t tokens = dy.dim(0), out = dy.dim(1);
  // Columns, not rows, over the threads: no partial sums to combine.
  constexpr int64_t kColumns = 64;
  exec.pool->parallel_slices((out + kColumns - 1) / kColumns, [&](int64_t begin, int64_t end, int) {
    const int64_t first = begin * kColumns, last = std::min(out, end * kColumns);
    cpu_kernels().column_sums(dy.f32() + first, tokens, last - first, out, dbias.f32() + first);
  });
}

}  // namespace sb::cpu
