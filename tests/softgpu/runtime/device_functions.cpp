// Devices and launches of the CUDA runtime.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <utility>

#include "softgpu/driver/encode_tensor_map.h"
#include "softgpu/interface/device.h"
#include "softgpu/interface/kernel.h"
#include "softgpu/runtime/device_model.h"
#include "softgpu/runtime/errors.h"
#include "softgpu/runtime/scheduler.h"

namespace softgpu {
namespace {

thread_local int device_of_thread = 0;

bool exists(int device) {
  return device >= 0 && device < device_model().devices;
}

}  // namespace

int current_device() {
  return device_of_thread;
}

cudaError_t enqueue_kernel(Kernel kernel) {
  const Scheduler::Turn turn;
  Scheduler& scheduler = Scheduler::get();
  Stream* stream = scheduler.of(kernel.stream);
  if (const cudaError_t error = result(cudaSuccess); error != cudaSuccess) return error;
  if (const cudaError_t error = refusal(kernel); error != cudaSuccess)
    return refused(error, "launch of %s: grid %u %u %u, block %u %u %u, %zu bytes of shared memory",
                   kernel.name().c_str(), kernel.grid.x, kernel.grid.y, kernel.grid.z, kernel.block.x, kernel.block.y,
                   kernel.block.z, kernel.dynamic_shared);
  if (stream->device != current_device())
    return refused(cudaErrorInvalidResourceHandle, "launch of %s on a stream of device %d, from device %d",
                   kernel.name().c_str(), stream->device, current_device());
  if (!stream->capturing && stream == scheduler.default_stream(stream->device) && scheduler.captures(stream->device))
    return result(cudaErrorStreamCaptureImplicit);
  scheduler.put(*stream, {.what = "a kernel", .kernel = std::move(kernel)});
  return result(cudaSuccess);
}

}  // namespace softgpu

using namespace softgpu;

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_model().devices;
  return result(cudaSuccess);
}

cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return result(cudaSuccess);
}

cudaError_t cudaSetDevice(int device) {
  if (!exists(device)) return result(cudaErrorInvalidDevice);
  device_of_thread = device;
  return result(cudaSuccess);
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int device) {
  if (!exists(device)) return result(cudaErrorInvalidDevice);
  std::snprintf(id, static_cast<size_t>(size), "0000:%02x:00.0", device + 1);
  return result(cudaSuccess);
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (!exists(device)) return result(cudaErrorInvalidDevice);
  const DeviceLimits& limits = device_limits();
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = limits.multiprocessors;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(limits.shared_per_block_most);
      break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = static_cast<int>(limits.shared_per_multiprocessor);
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = limits.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = limits.minor;
      break;
    default:
      fail("attribute %d of the device is not known here: add it in device_functions.cpp", attribute);
  }
  return result(cudaSuccess);
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (!exists(device)) return result(cudaErrorInvalidDevice);
  const DeviceModel& model = device_model();
  // What is not set here must not pass for an answer.
  std::memset(static_cast<void*>(properties), 0xFF, sizeof *properties);
  std::snprintf(properties->name, sizeof properties->name, "%s", model.name.c_str());
  std::memset(properties->uuid.bytes, 0x5F, sizeof properties->uuid.bytes);
  properties->uuid.bytes[15] = static_cast<char>(device);
  properties->totalGlobalMem = model.memory_bytes;
  properties->multiProcessorCount = model.limits.multiprocessors;
  properties->major = model.limits.major;
  properties->minor = model.limits.minor;
  return result(cudaSuccess);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const bool known = std::strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
  *function = known ? reinterpret_cast<void*>(&encode_tensor_map) : nullptr;
  *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return result(cudaSuccess);
}

}  // extern "C"
