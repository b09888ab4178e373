#pragma once

#include "device/exec.h"

namespace sb {

// Every operand is checked against what the operation expects before a kernel sees a raw pointer.
inline void check_operand(const Exec& exec, const char* operation, const char* name, const TensorView& tensor,
                          DType dtype, const Shape& shape) {
  SB_CHECK(tensor.shape() == shape && tensor.dtype() == dtype, "{}: {} is {} {}, expected {} {}", operation, name,
           dtype_name(tensor.dtype()), tensor.shape().to_string(), dtype_name(dtype), shape.to_string());
  SB_CHECK(tensor.device() == exec.device, "{}: {} is not on the device of the operation", operation, name);
  SB_CHECK(!tensor.empty() || shape.elements() == 0, "{}: {} has no memory", operation, name);
}

inline int64_t last_dim(const TensorView& tensor) {
  return tensor.shape().rank() == 0 ? 0 : tensor.dim(tensor.shape().rank() - 1);
}

}  // namespace sb
