#pragma once

// For files compiled with CUDA only.

#include <cuda_runtime_api.h>

#include "core/errors.h"

#define SB_CUDA_CHECK(call)                                                           \
  do {                                                                                \
    const cudaError_t sb_error = (call);                                              \
    SB_CHECK(sb_error == cudaSuccess, "{}: {}", #call, cudaGetErrorString(sb_error)); \
  } while (false)

// After a kernel launch.
#define SB_CUDA_LAUNCHED() SB_CUDA_CHECK(cudaGetLastError())
