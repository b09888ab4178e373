// Which launches a GPU refuses, and the runtime's functions about kernels themselves.

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <set>

#include "softgpu/interface/device.h"
#include "softgpu/interface/kernel.h"

namespace softgpu {
namespace {

std::mutex mutex;
std::map<const void*, size_t>& allowed_shared() {
  static std::map<const void*, size_t> bytes;
  return bytes;
}

}  // namespace

cudaError_t refusal(const Kernel& kernel) {
  constexpr unsigned kMostX = 0x7FFFFFFF, kMostYZ = 65535;
  const DeviceLimits& limits = device_limits();
  const dim3 &grid = kernel.grid, &block = kernel.block;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > kMostX || grid.y > kMostYZ || grid.z > kMostYZ)
    return cudaErrorInvalidConfiguration;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > static_cast<uint64_t>(limits.threads_per_block) || block.z > 64)
    return cudaErrorInvalidConfiguration;
  size_t most = limits.shared_per_block;
  const std::lock_guard lock(mutex);
  if (const auto found = allowed_shared().find(kernel.function); found != allowed_shared().end())
    most = std::max(most, found->second);
  return kernel.dynamic_shared > most ? cudaErrorInvalidValue : cudaSuccess;
}

}  // namespace softgpu

extern "C" {

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize)
    softgpu::fail("cudaFuncSetAttribute: attribute %d", attribute);
  if (value < 0 || static_cast<size_t>(value) > softgpu::device_limits().shared_per_block_most)
    return softgpu::set_last_error(cudaErrorInvalidValue);
  const std::lock_guard lock(softgpu::mutex);
  softgpu::allowed_shared()[function] = static_cast<size_t>(value);
  return cudaSuccess;
}

cudaError_t cudaFuncGetName(const char** name, const void* function) {
  static std::set<std::string> names;
  const std::lock_guard lock(softgpu::mutex);
  *name = names.insert(softgpu::function_name(function)).first->c_str();
  return cudaSuccess;
}

}  // extern "C"
