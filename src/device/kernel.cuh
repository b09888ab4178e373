#pragma once

// How kernels are launched and name their shared memory. The software device (tests/softgpu) has the same names, so
// that the host's compiler reads the same kernels.

#include <cuda_runtime.h>

#include <type_traits>

#include "device/kernel_launch.cuh"

namespace sb {

// What goes wrong is found by cudaGetLastError().
template <typename... Parameters>
void launch_kernel(void (*kernel)(Parameters...), const KernelLaunch& how,
                   const std::type_identity_t<Parameters>&... arguments) {
  kernel<<<how.grid, how.block, how.shared, how.stream>>>(arguments...);
}

// The kernel may start while the one before it on the stream still runs, where `allowed` (programmatic dependent
// launch).
template <typename... Parameters>
cudaError_t launch_dependent_kernel(void (*kernel)(Parameters...), const KernelLaunch& how, bool allowed,
                                    const std::type_identity_t<Parameters>&... arguments) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = allowed ? 1 : 0;
  cudaLaunchConfig_t config{};
  config.gridDim = how.grid;
  config.blockDim = how.block;
  config.dynamicSmemBytes = how.shared;
  config.stream = how.stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace sb

// SB_SHARED(float, sums, [2][32]); as __shared__ float sums[2][32];
#define SB_SHARED(type, name, ...) __shared__ type name __VA_ARGS__
#define SB_SHARED_ALIGNED(alignment, type, name, ...) \
  __shared__ __align__(alignment)                     \
  type name __VA_ARGS__
// SB_DYNAMIC_SHARED(float, rows); as extern __shared__ float rows[];  A third argument is the alignment.
#define SB_DYNAMIC_SHARED(type, name, ...) extern __shared__ __VA_OPT__(__align__(__VA_ARGS__)) type name[]
