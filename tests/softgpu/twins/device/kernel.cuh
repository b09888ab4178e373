#pragma once

// src/device/kernel.cuh on the software device.

#include <cuda_runtime_api.h>

#include <type_traits>

#include "device/kernel_launch.cuh"
#include "softgpu/cuda/engine.h"
#include "softgpu/interface/kernel.h"

namespace sb {

template <typename... Parameters>
cudaError_t launch_dependent_kernel(void (*kernel)(Parameters...), const KernelLaunch& how, bool allowed,
                                    const std::type_identity_t<Parameters>&... arguments) {
  return softgpu::enqueue_kernel({.body = [=] { kernel(arguments...); },
                                  .function = reinterpret_cast<const void*>(kernel),
                                  .library_name = {},
                                  .grid = how.grid,
                                  .block = how.block,
                                  .dynamic_shared = how.shared,
                                  .stream = how.stream,
                                  .early = allowed});
}

template <typename... Parameters>
void launch_kernel(void (*kernel)(Parameters...), const KernelLaunch& how,
                   const std::type_identity_t<Parameters>&... arguments) {
  launch_dependent_kernel(kernel, how, false, arguments...);
}

}  // namespace sb

// A struct of the kernel's own that holds the variable tells one variable from another.
#define SB_SHARED(type, name, ...) \
  struct name##_in_shared {        \
    type name __VA_ARGS__;         \
  };                               \
  auto& name = ::softgpu::shared<name##_in_shared>().name
#define SB_SHARED_ALIGNED(alignment, type, name, ...) \
  struct name##_in_shared {                           \
    alignas(alignment) type name __VA_ARGS__;         \
  };                                                  \
  auto& name = ::softgpu::shared<name##_in_shared>().name
#define SB_DYNAMIC_SHARED(type, name, ...) type* const name = ::softgpu::dynamic_shared<type>(__VA_ARGS__)
