#pragma once

// What the current software device is like. Given by the runtime; the engine refuses launches and keeps blocks waiting
// by it.

#include <cstddef>

namespace softgpu {

struct DeviceLimits {
  int major = 9, minor = 0;
  int multiprocessors = 4;
  size_t shared_per_block = 48 << 10;        // without cudaFuncAttributeMaxDynamicSharedMemorySize
  size_t shared_per_block_most = 227 << 10;  // with it
  size_t shared_per_multiprocessor = 228 << 10;
  size_t shared_of_system_per_block = 1 << 10;  // what a block takes beside what it asks for
  int threads_per_block = 1024;
  int threads_per_multiprocessor = 2048;
  int blocks_per_multiprocessor = 32;
};

const DeviceLimits& device_limits();  // of the calling thread's current device

}  // namespace softgpu
