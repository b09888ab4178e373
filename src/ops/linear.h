#pragma once

#include "device/exec.h"

namespace sb {

// y[T, out] = x[T, in] · weightᵀ + bias, weight [out, in] as Hugging Face stores it; an empty bias is none.
// With accumulate, y += instead (the residual sum at no cost).
void linear_forward(const Exec& exec, TensorView x, TensorView weight, TensorView bias, TensorView y,
                    bool accumulate = false);

// dx = dy · weight (+= with accumulate).
void linear_backward_input(const Exec& exec, TensorView dy, TensorView weight, TensorView dx, bool accumulate = false);

// dweight += dyᵀ · x and, unless empty, dbias += column sums of dy. Always accumulates: gradients span micro-batches.
void linear_backward_weight(const Exec& exec, TensorView x, TensorView dy, TensorView dweight, TensorView dbias);

}  // namespace sb
