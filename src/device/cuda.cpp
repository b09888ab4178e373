#include "device/cuda.h"

#include <cuda_runtime_api.h>

#include <atomic>

#include "device/cuda_check.h"

namespace sb::cuda {
namespace {

std::atomic<int64_t> device_allocations = 0, host_allocations = 0;

cudaStream_t stream_of(void* stream) {
  return static_cast<cudaStream_t>(stream);
}
cudaEvent_t event_of(void* event) {
  return static_cast<cudaEvent_t>(event);
}

}  // namespace

std::string problem() {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess) {
    cudaGetLastError();  // what failed here must not be found by the next call
    return cudaGetErrorString(error);
  }
  return devices == 0 ? "no CUDA device in this machine" : "";
}

void require_device() {
  const std::string why = problem();
  SB_USER_CHECK(why.empty(), "device: cuda was requested, but there is no usable GPU ({}); use device: cpu", why);
}

DeviceInfo device_info() {
  require_device();
  int device = 0;
  SB_CUDA_CHECK(cudaGetDevice(&device));
  cudaDeviceProp properties;
  SB_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  size_t free = 0, total = 0;
  SB_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  std::string uuid;
  for (const char byte : properties.uuid.bytes) uuid += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  return {properties.name,
          static_cast<int64_t>(total),
          static_cast<int64_t>(free),
          properties.multiProcessorCount,
          properties.major,
          properties.minor,
          uuid};
}

int device_count() {
  require_device();
  int devices = 0;
  SB_CUDA_CHECK(cudaGetDeviceCount(&devices));
  return devices;
}

void use_device(int index) {
  SB_CUDA_CHECK(cudaSetDevice(index));
}

int current_device() {
  int device = 0;
  SB_CUDA_CHECK(cudaGetDevice(&device));
  return device;
}

Allocations allocations() {
  return {device_allocations, host_allocations};
}

std::shared_ptr<void> allocate(const std::string& name, int64_t bytes) {
  require_device();
  ++device_allocations;
  void* memory = nullptr;
  if (cudaMalloc(&memory, static_cast<size_t>(bytes)) != cudaSuccess) {
    cudaGetLastError();
    size_t free = 0, total = 0;
    SB_CUDA_CHECK(cudaMemGetInfo(&free, &total));
    throw OutOfMemory("arena {}: the GPU refused {} bytes; {} of {} are free", name, bytes, free, total);
  }
  return {memory, [](void* pointer) { cudaFree(pointer); }};
}

std::shared_ptr<void> allocate_host(int64_t bytes) {
  require_device();
  ++host_allocations;
  void* memory = nullptr;
  const cudaError_t error = cudaHostAlloc(&memory, static_cast<size_t>(bytes), cudaHostAllocDefault);
  if (error != cudaSuccess) {
    cudaGetLastError();
    // It may be what failed on the device before.
    throw OutOfMemory("the system refused {} bytes of page-locked memory: {}", bytes, cudaGetErrorString(error));
  }
  return {memory, [](void* pointer) { cudaFreeHost(pointer); }};
}

void copy(void* stream, const void* from, void* to, int64_t bytes) {
  SB_CUDA_CHECK(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, stream_of(stream)));
}

void zero(void* stream, void* to, int64_t bytes) {
  SB_CUDA_CHECK(cudaMemsetAsync(to, 0, static_cast<size_t>(bytes), stream_of(stream)));
}

void copy_and_wait(const void* from, void* to, int64_t bytes) {
  SB_CUDA_CHECK(cudaDeviceSynchronize());  // our streams do not wait for the one cudaMemcpy uses
  SB_CUDA_CHECK(cudaMemcpy(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault));
  SB_CUDA_CHECK(cudaDeviceSynchronize());
}

void zero_and_wait(void* to, int64_t bytes) {
  SB_CUDA_CHECK(cudaDeviceSynchronize());
  SB_CUDA_CHECK(cudaMemset(to, 0, static_cast<size_t>(bytes)));
  SB_CUDA_CHECK(cudaDeviceSynchronize());
}

std::shared_ptr<void> make_stream() {
  require_device();
  cudaStream_t stream = nullptr;
  SB_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return {stream, [](void* pointer) { cudaStreamDestroy(stream_of(pointer)); }};
}

void synchronize(void* stream) {
  SB_CUDA_CHECK(cudaStreamSynchronize(stream_of(stream)));
}

std::shared_ptr<void> make_event(bool measures_time) {
  require_device();
  cudaEvent_t event = nullptr;
  SB_CUDA_CHECK(cudaEventCreateWithFlags(&event, measures_time ? cudaEventDefault : cudaEventDisableTiming));
  return {event, [](void* pointer) { cudaEventDestroy(event_of(pointer)); }};
}

void record(void* event, void* stream) {
  SB_CUDA_CHECK(cudaEventRecord(event_of(event), stream_of(stream)));
}

void wait(void* event) {
  SB_CUDA_CHECK(cudaEventSynchronize(event_of(event)));
}

bool passed(void* event) {
  const cudaError_t state = cudaEventQuery(event_of(event));
  if (state == cudaErrorNotReady) {
    cudaGetLastError();  // what is no error must not be found by the next call
    return false;
  }
  SB_CHECK(state == cudaSuccess, "cudaEventQuery: {}", cudaGetErrorString(state));
  return true;
}

void wait_on_stream(void* event, void* stream) {
  SB_CUDA_CHECK(cudaStreamWaitEvent(stream_of(stream), event_of(event), 0));
}

double milliseconds_between(void* begin, void* end) {
  float milliseconds = 0;
  SB_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, event_of(begin), event_of(end)));
  return milliseconds;
}

}  // namespace sb::cuda
