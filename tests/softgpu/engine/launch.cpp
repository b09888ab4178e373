// Which launches a GPU refuses.

#include "softgpu/interface/device.h"
#include "softgpu/interface/kernel.h"

namespace softgpu {

cudaError_t refusal(const Kernel& kernel) {
  constexpr unsigned kMostX = 0x7FFFFFFF, kMostYZ = 65535, kMostBlockZ = 64;
  const DeviceLimits& limits = device_limits();
  const dim3 &grid = kernel.grid, &block = kernel.block;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > kMostX || grid.y > kMostYZ || grid.z > kMostYZ)
    return cudaErrorInvalidConfiguration;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > static_cast<uint64_t>(limits.threads_per_block) || block.z > kMostBlockZ)
    return cudaErrorInvalidConfiguration;
  return kernel.dynamic_shared > limits.shared_per_block_most ? cudaErrorInvalidValue : cudaSuccess;
}

}  // namespace softgpu
