// Memory and copies of the CUDA runtime.
#include <cuda_runtime_api.h>

#include <cstring>
#include <vector>

#include "softgpu/runtime/device_memory.h"
#include "softgpu/runtime/device_model.h"
#include "softgpu/runtime/errors.h"
#include "softgpu/runtime/scheduler.h"

namespace softgpu {
namespace {

// What a process takes of a GPU's memory before it allocates any.
constexpr size_t kContextBytes = size_t{512} << 20;

using Kind = Allocation::Kind;
enum class Side { device, page_locked, pageable, nowhere };

// Where memory lies; nowhere: at addresses of the device, but not within one allocation.
Side side_of(const void* memory, size_t bytes) {
  const DeviceMemory& all = DeviceMemory::get();
  if (!all.has(memory)) return Side::pageable;
  const Allocation* allocation = all.holding(memory, bytes);
  if (allocation == nullptr) return Side::nowhere;
  return allocation->kind == Kind::device ? Side::device : Side::page_locked;
}

bool fits(cudaMemcpyKind kind, Side from, Side to) {
  const bool from_device = from == Side::device, to_device = to == Side::device;
  switch (kind) {
    case cudaMemcpyHostToHost:
      return !from_device && !to_device;
    case cudaMemcpyHostToDevice:
      return !from_device && to_device;
    case cudaMemcpyDeviceToHost:
      return from_device && !to_device;
    case cudaMemcpyDeviceToDevice:
      return from_device && to_device;
    default:
      return kind == cudaMemcpyDefault;
  }
}

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
  Side from_side, to_side;
};

cudaError_t describe(Copy& copy, cudaMemcpyKind kind) {
  copy.from_side = side_of(copy.from, copy.bytes);
  copy.to_side = side_of(copy.to, copy.bytes);
  for (const auto& [side, memory, word] :
       {std::tuple(copy.from_side, copy.from, "from"), {copy.to_side, static_cast<const void*>(copy.to), "to"}})
    if (side == Side::nowhere)
      return refused(cudaErrorInvalidValue, "a copy of %zu bytes %s %p: %s", copy.bytes, word, memory,
                     DeviceMemory::get().describe(memory).c_str());
  if (!fits(kind, copy.from_side, copy.to_side))
    return refused(cudaErrorInvalidMemcpyDirection, "a copy from %s to %s under kind %d",
                   copy.from_side == Side::device ? "the device" : "the host",
                   copy.to_side == Side::device ? "the device" : "the host", kind);
  return cudaSuccess;
}

// As the runtime's documentation has it ("API synchronization behavior"): a pageable source has been read when the call
// returns, a pageable target been written; page-locked memory is touched when the stream comes to it.
void enqueue_copy(Scheduler::Turn& turn, Stream& stream, const Copy& copy) {
  Scheduler& scheduler = Scheduler::get();
  if (copy.from_side == Side::pageable && copy.to_side == Side::device) {
    const auto* bytes = static_cast<const char*>(copy.from);
    scheduler.put(stream, {.what = "copy from pageable memory",
                           .run = [to = copy.to, staged = std::vector<char>(bytes, bytes + copy.bytes)] {
                             std::memcpy(to, staged.data(), staged.size());
                           }});
    return;
  }
  scheduler.put(stream, {.what = "copy", .run = [copy] { std::memcpy(copy.to, copy.from, copy.bytes); }});
  const bool within_host = copy.from_side != Side::device && copy.to_side != Side::device;
  if (copy.to_side == Side::pageable || within_host) scheduler.wait_for(turn, scheduler.mark(stream));
}

cudaError_t set(void* to, int value, size_t bytes, cudaStream_t handle) {
  const Scheduler::Turn turn;
  if (bytes == 0) return result(cudaSuccess);
  const Side side = side_of(to, bytes);
  if (side != Side::device && side != Side::page_locked)
    return refused(cudaErrorInvalidValue, "%zu bytes to be set at %p, which is not within memory of the device", bytes,
                   to);
  Scheduler::get().put(*Scheduler::get().of(handle), {.what = "set", .run = [=] { std::memset(to, value, bytes); }});
  return result(cudaSuccess);
}

cudaError_t allocate(void** memory, size_t bytes, Kind kind) {
  const Scheduler::Turn turn;
  const int device = current_device();
  *memory = nullptr;
  if (Scheduler::get().forbids_waits()) return result(cudaErrorStreamCaptureUnsupported);
  if (const cudaError_t error = result(cudaSuccess); error != cudaSuccess || bytes == 0) return error;
  DeviceMemory& all = DeviceMemory::get();
  if (kind == Kind::device && all.used(device) + kContextBytes + bytes > device_model().memory_bytes)
    return result(cudaErrorMemoryAllocation);
  *memory = all.allocate(bytes, kind, device);
  return result(*memory != nullptr ? cudaSuccess : cudaErrorMemoryAllocation);
}

// Waits for the device, as CUDA does: what is queued may still use the memory.
cudaError_t release(void* memory, Kind kind) {
  Scheduler::Turn turn;
  if (memory == nullptr) return result(cudaSuccess);
  if (Scheduler::get().forbids_waits()) return result(cudaErrorStreamCaptureUnsupported);
  const Allocation* allocation = DeviceMemory::get().holding(memory, 1);
  if (allocation == nullptr || allocation->begin != memory || allocation->kind != kind)
    return refused(cudaErrorInvalidValue, "%p is freed, where no %s begins", memory,
                   kind == Kind::device ? "device memory" : "page-locked memory");
  Scheduler::get().wait_for_device(turn, allocation->device);
  DeviceMemory::get().release(memory, kind);
  return result(cudaSuccess);
}

}  // namespace

bool device_may_touch(const void* memory, size_t bytes) {
  return DeviceMemory::get().holding(memory, bytes) != nullptr;
}

}  // namespace softgpu

using namespace softgpu;

extern "C" {

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  return allocate(memory, bytes, Kind::device);
}

cudaError_t cudaFree(void* memory) {
  return release(memory, Kind::device);
}

cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned flags) {
  if (flags != cudaHostAllocDefault) return refused(cudaErrorNotSupported, "cudaHostAlloc with flags %x", flags);
  return allocate(memory, bytes, Kind::page_locked);
}

cudaError_t cudaFreeHost(void* memory) {
  return release(memory, Kind::page_locked);
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const Scheduler::Turn turn;
  *total = device_model().memory_bytes;
  *free = *total - kContextBytes - DeviceMemory::get().used(current_device());
  return result(cudaSuccess);
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t handle) {
  Scheduler::Turn turn;
  Stream* stream = Scheduler::get().of(handle);
  Copy copy{to, from, bytes, Side::nowhere, Side::nowhere};
  if (bytes == 0) return result(cudaSuccess);
  if (const cudaError_t error = describe(copy, kind); error != cudaSuccess) return error;
  // (CUDA captures copies of pageable memory, too, and reads it at every launch: nobody can mean that.)
  if (stream->capturing && (copy.from_side == Side::pageable || copy.to_side == Side::pageable))
    return refused(cudaErrorStreamCaptureUnsupported, "a copy of pageable memory is captured");
  enqueue_copy(turn, *stream, copy);
  return result(cudaSuccess);
}

// Within the device it does not wait; from pageable memory only until it is read.
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  Scheduler::Turn turn;
  Scheduler& scheduler = Scheduler::get();
  Stream* stream = scheduler.default_stream(current_device());
  Copy copy{to, from, bytes, Side::nowhere, Side::nowhere};
  if (scheduler.captures(current_device())) return result(cudaErrorStreamCaptureImplicit);
  if (bytes == 0) return result(cudaSuccess);
  if (const cudaError_t error = describe(copy, kind); error != cudaSuccess) return error;
  enqueue_copy(turn, *stream, copy);
  const bool within_device = copy.from_side == Side::device && copy.to_side == Side::device;
  if (copy.from_side != Side::pageable && !within_device) scheduler.wait_for(turn, scheduler.mark(*stream));
  return result(cudaSuccess);
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  return set(to, value, bytes, stream);
}

cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return set(to, value, bytes, nullptr);
}

}  // extern "C"
