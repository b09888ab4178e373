#pragma once

// Errors of the CUDA runtime as exceptions. CUDA files only.

#include <cuda_runtime.h>

#include <cstdint>

namespace sb::gpu {

[[noreturn]] void throw_cuda(const char* what, const char* error);
[[noreturn]] void throw_unsupported(const char* what, int64_t value);

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw_cuda(what, cudaGetErrorString(error));
}

}  // namespace sb::gpu
