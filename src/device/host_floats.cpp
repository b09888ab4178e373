#include "device/host_floats.h"

#include "core/errors.h"
#include "device/float16.h"

namespace sb {

HostFloats::HostFloats(TensorView tensor) : copy_(tensor) {
  const TensorView& view = copy_.view();
  if (view.dtype() == DType::f32) {
    data_ = view.f32();
    return;
  }
  SB_CHECK(view.dtype() == DType::bf16, "{} read as floats", dtype_name(view.dtype()));
  const auto* bits = static_cast<const uint16_t*>(view.raw());
  widened_.resize(static_cast<size_t>(view.elements()));
  for (size_t i = 0; i < widened_.size(); ++i) widened_[i] = f32_from_bf16(bits[i]);
  data_ = widened_.data();
}

}  // namespace sb
