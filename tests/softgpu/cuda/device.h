#pragma once

// What nvcc gives a .cu file before its first line, for the host's compiler: put before every one of them (-include,
// cmake/softgpu.cmake). The toolkit's own headers in host mode have the types and most of the arithmetic.

#define __host__
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#include <cuda_runtime.h>
// The toolkit's headers define these for the host's compiler again.
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __forceinline__
#define __forceinline__ inline
#define __CUDA_ARCH_LIST__ 900

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "softgpu/cuda/arithmetic.h"
#include "softgpu/cuda/atomics.h"
#include "softgpu/cuda/engine.h"
#include "softgpu/cuda/warp.h"

inline void __syncthreads() {
  softgpu::sync_block();
}
inline size_t __cvta_generic_to_shared(const void* p) {
  return softgpu::window(p);
}

// The runtime's header has this for nvcc alone.
template <typename Result, typename... Parameters>
cudaError_t cudaFuncSetAttribute(Result (*kernel)(Parameters...), cudaFuncAttribute attribute, int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}
