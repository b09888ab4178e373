#pragma once

// Kernels that start while the one before them on the stream still ends (programmatic dependent launch, SM90). What
// they do before wait_for_dependencies() may not write anything that kernel reads, nor touch what it writes. CUDA files
// only.

#include <cuda_runtime.h>

#include "attention/gpu/launch/check.cuh"

namespace sb::gpu {

// Everything that the kernels before this one wrote is there.
__device__ __forceinline__ void wait_for_dependencies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel may be brought to multiprocessors that have room.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

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
template <typename... Parameters, typename... Arguments>
void launch_early(void (*kernel)(Parameters...), dim3 blocks, int threads, int shared, cudaStream_t stream,
                  const Arguments&... arguments) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = built_to_wait() ? 1 : 0;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  if (const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...); error != cudaSuccess) {
    const char* name = "launch of a kernel";
    cudaFuncGetName(&name, reinterpret_cast<const void*>(kernel));
    check(error, name);
  }
}

// The same where the device can, else when the kernel before it has ended.
template <typename... Parameters, typename... Arguments>
void launch_after(void (*kernel)(Parameters...), dim3 blocks, int threads, int shared, cudaStream_t stream,
                  const Arguments&... arguments) {
  if (kernels_start_early()) return launch_early(kernel, blocks, threads, shared, stream, arguments...);
  kernel<<<blocks, threads, shared, stream>>>(arguments...);
}

}  // namespace sb::gpu
