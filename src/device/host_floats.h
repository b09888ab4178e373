#pragma once

#include <span>
#include <vector>

#include "device/memory.h"

namespace sb {

// A tensor in fp32 where the host can work on it: the tensor itself where it is that already, else a copy, taken when
// everything queued on the device is done.
class HostFloats {
 public:
  explicit HostFloats(TensorView tensor);
  std::span<const float> values() const { return {data_, static_cast<size_t>(copy_.view().elements())}; }

 private:
  HostCopy copy_;
  std::vector<float> widened_;  // of a bf16 tensor
  const float* data_;
};

}  // namespace sb
