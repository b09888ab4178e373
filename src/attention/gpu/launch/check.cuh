#pragma once

// Errors of the CUDA runtime as exceptions. CUDA files only.

#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

namespace sb::gpu {

[[noreturn]] void throw_cuda(const char* what, const char* error);
[[noreturn]] void throw_unsupported(const char* what, int64_t value);

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw_cuda(what, cudaGetErrorString(error));
}

// What a thread block of the current device can have.
inline int most_shared_memory() {
  int device = 0, bytes = 0;
  check(cudaGetDevice(&device), "the device");
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "shared memory of the device");
  return bytes;
}

// Lets a kernel have at least so much shared memory. Never less than somebody asked for before: the limit is the
// process's, and the launch of another thread (ranks that share a GPU) may be about to come.
template <typename Kernel>
void allow_shared_memory(Kernel* kernel, int bytes, const char* what) {
  static std::mutex mutex;
  static std::map<std::pair<Kernel*, int>, int> allowed;  // by kernel and device
  int device = 0;
  check(cudaGetDevice(&device), what);
  const std::lock_guard lock(mutex);
  int& most = allowed[{kernel, device}];
  if (bytes <= most) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), what);
  most = bytes;
}

}  // namespace sb::gpu
