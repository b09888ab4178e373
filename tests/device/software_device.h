#pragma once

#include <cuda_runtime_api.h>

#include <string_view>

namespace sb::testing {

// Whether what seems to be a GPU is the tests' own software device (tests/softgpu), on which sizes have to be smaller.
inline bool on_software_device() {
  cudaDeviceProp properties;
  return cudaGetDeviceProperties(&properties, 0) == cudaSuccess &&
         std::string_view(properties.name).starts_with("software device");
}

}  // namespace sb::testing
