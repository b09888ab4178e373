#pragma once

#include <bit>
#include <cstdint>
#include <vector>

#include "core/random.h"
#include "device/cuda.h"
#include "device/memory.h"

namespace sb {

// A tensor on the GPU whose bits are those of normal numbers in bf16.
class DeviceTensor {
 public:
  DeviceTensor(Shape shape, DType dtype, uint64_t seed)
      : arena_(make_arena("bench", shape.elements() * dtype_bytes(dtype), DeviceKind::cuda)),
        view_(arena_.allocate(dtype, shape)) {
    // A long run of draws, again and again: the values do not matter for the time, their spread does.
    std::vector<uint16_t> host(view_.bytes() / 2);
    Random random(seed);
    std::vector<uint16_t> draws(65521);
    for (uint16_t& draw : draws) {
      const float x = static_cast<float>(random.normal());
      draw = static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16);
    }
    for (size_t i = 0; i < host.size(); ++i) host[i] = draws[i % draws.size()];
    cuda::copy_and_wait(host.data(), view_.raw(), view_.bytes());
  }
  const TensorView& view() const { return view_; }

 private:
  Arena arena_;
  TensorView view_;
};

}  // namespace sb
