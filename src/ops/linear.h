#pragma once

#include "device/exec.h"

namespace sb {

// y[T, out] = x[T, in] · weightᵀ + bias + residual, weight [out, in] as Hugging Face stores it; an empty bias or
// residual is none. The residual may be y itself.
void linear_forward(const Exec& exec, TensorView x, TensorView weight, TensorView bias, TensorView y,
                    TensorView residual = {});

// y = a + b; y may be one of them. The residual of a product whose parts were summed over ranks first.
void add(const Exec& exec, TensorView a, TensorView b, TensorView y);

// dx = dy · weight (+= with accumulate).
void linear_backward_input(const Exec& exec, TensorView dy, TensorView weight, TensorView dx, bool accumulate = false);

// dweight += dyᵀ · x (= without accumulate, whatever was there) and, unless empty, dbias += column sums of dy:
// gradients span micro-batches.
void linear_backward_weight(const Exec& exec, TensorView x, TensorView dy, TensorView dweight, TensorView dbias,
                            bool accumulate = true);

// dbias += column sums of dy.
void linear_backward_bias(const Exec& exec, TensorView dy, TensorView dbias);

// Bytes of exec.scratch that the gradient needs for a bias of `out` columns.
int64_t linear_scratch_bytes(DeviceKind device, int64_t out);

}  // namespace sb
