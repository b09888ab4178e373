#pragma once

// Kernels that start while the one before them on the stream still ends (programmatic dependent launch, SM90). What
// they do before wait_for_dependencies() may not write anything that kernel reads, nor touch what it writes. CUDA files
// only.

#include <cuda_runtime.h>

#include <type_traits>

#include "attention/gpu/launch/check.cuh"
#include "attention/gpu/launch/early_ptx.cuh"
#include "device/kernel.cuh"

namespace sb::gpu {

// Kernels that were built for earlier GPUs alone have no instruction to wait with, whatever runs them.
constexpr bool built_to_wait() {
  for (const int architecture : {__CUDA_ARCH_LIST__})
    if (architecture == 900) return true;
  return false;
}

inline bool kernels_start_early() {
  int device = 0, major = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "compute capability");
  return built_to_wait() && major == 9;
}

// The kernel before it must have waited for its own dependencies. SM90.
template <typename... Parameters>
void launch_early(void (*kernel)(Parameters...), const KernelLaunch& how,
                  const std::type_identity_t<Parameters>&... arguments) {
  const cudaError_t error = launch_dependent_kernel(kernel, how, built_to_wait(), arguments...);
  if (error == cudaSuccess) return;
  const char* name = "launch of a kernel";
  cudaFuncGetName(&name, reinterpret_cast<const void*>(kernel));
  check(error, name);
}

// The same where the device can, else when the kernel before it has ended.
template <typename... Parameters>
void launch_after(void (*kernel)(Parameters...), const KernelLaunch& how,
                  const std::type_identity_t<Parameters>&... arguments) {
  if (kernels_start_early()) return launch_early(kernel, how, arguments...);
  launch_kernel(kernel, how, arguments...);
}

}  // namespace sb::gpu
