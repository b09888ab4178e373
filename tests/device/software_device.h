#pragma once

#include <cuda_runtime_api.h>

#include <string_view>
#include <utility>

namespace sb::testing {

// Whether what seems to be a GPU is the tests' own software device (tests/softgpu), on which sizes have to be smaller.
inline bool on_software_device() {
  cudaDeviceProp properties;
  return cudaGetDeviceProperties(&properties, 0) == cudaSuccess &&
         std::string_view(properties.name).starts_with("software device");
}

// A size of a test, on a GPU and on the software device.
template <typename T>
T sized(T on_gpu, T on_software_device) {
  return testing::on_software_device() ? std::move(on_software_device) : std::move(on_gpu);
}

}  // namespace sb::testing
