// Which launches a GPU refuses, and the runtime's functions about kernels themselves.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "softgpu/interface/device.h"
#include "softgpu/interface/kernel.h"
#include "softgpu/runtime/errors.h"

namespace softgpu {
namespace {

std::mutex mutex;
// Bytes of dynamic shared memory that a kernel was allowed, where that is more than any may have.
std::map<const void*, size_t> allowed;
std::map<const void*, std::string> names;

}  // namespace

cudaError_t refusal(const Kernel& kernel) {
  constexpr unsigned kMostX = 0x7FFFFFFF, kMostYZ = 65535, kMostBlockZ = 64;
  const DeviceLimits& limits = device_limits();
  const dim3 &grid = kernel.grid, &block = kernel.block;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > kMostX || grid.y > kMostYZ || grid.z > kMostYZ)
    return cudaErrorInvalidConfiguration;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > static_cast<uint64_t>(limits.threads_per_block) || block.z > kMostBlockZ)
    return cudaErrorInvalidConfiguration;
  const std::lock_guard lock(mutex);
  const auto found = allowed.find(kernel.function);
  const size_t most = std::max(limits.shared_per_block, found == allowed.end() ? 0 : found->second);
  return kernel.dynamic_shared > most ? cudaErrorInvalidValue : cudaSuccess;
}

}  // namespace softgpu

using namespace softgpu;

extern "C" {

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize)
    fail("attribute %d of kernels is not known here: add it in engine/launch.cpp", attribute);
  if (value < 0 || static_cast<size_t>(value) > device_limits().shared_per_block_most)
    return refused(cudaErrorInvalidValue, "%s is to have %d bytes of shared memory", function_name(function).c_str(),
                   value);
  const std::lock_guard lock(mutex);
  allowed[function] = static_cast<size_t>(value);
  return result(cudaSuccess);
}

cudaError_t cudaFuncGetName(const char** name, const void* function) {
  const std::lock_guard lock(mutex);
  *name = names.try_emplace(function, function_name(function)).first->second.c_str();
  return result(cudaSuccess);
}

}  // extern "C"
