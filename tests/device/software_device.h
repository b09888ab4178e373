#pragma once

#include <utility>

#include "device/cuda.h"

namespace sb::test {

// Whether what seems to be a GPU is the tests' own software device (tests/softgpu), on which sizes have to be smaller.
inline bool on_software_device() {
  return cuda::problem().empty() && cuda::device_info().name.starts_with("software device");
}

// A size of a test, on a GPU and on the software device.
template <typename T>
T sized(T on_gpu, T on_software_device) {
  return test::on_software_device() ? std::move(on_software_device) : std::move(on_gpu);
}

}  // namespace sb::test
