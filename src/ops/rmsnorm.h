#pragma once

#include "device/exec.h"

namespace sb {

// y = x / sqrt(mean(x²) + eps) · weight over the last dimension; rstd [rows] is kept for backward.
void rmsnorm_forward(const Exec& exec, TensorView x, TensorView weight, float eps, TensorView y, TensorView rstd);

// dx = (+= with accumulate) and, unless empty, dweight +=. dx may alias dy.
void rmsnorm_backward(const Exec& exec, TensorView x, TensorView weight, TensorView rstd, TensorView dy, TensorView dx,
                      bool accumulate, TensorView dweight);

// Bytes of exec.scratch that backward needs.
int64_t rmsnorm_scratch_bytes(DeviceKind device, int64_t width);

}  // namespace sb
