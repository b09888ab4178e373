#include "device/memory.h"

#include <cstdlib>
#include <cstring>

#include "device/cuda.h"

namespace sb {
namespace {

std::shared_ptr<void> plain_memory(int64_t bytes) {
  std::shared_ptr<void> memory(std::aligned_alloc(Arena::kAlignment, static_cast<size_t>(Arena::rounded(bytes))),
                               std::free);
  if (!memory) throw OutOfMemory("the system refused {} bytes", bytes);
  return memory;
}

void copy_on_host(const Exec& exec, const void* from, void* to, int64_t bytes) {
  const auto* source = static_cast<const char*>(from);
  auto* target = static_cast<char*>(to);
  exec.pool->parallel_slices(bytes, [&](int64_t begin, int64_t end, int) {
    std::memcpy(target + begin, source + begin, static_cast<size_t>(end - begin));
  });
}

}  // namespace

Arena make_arena(std::string name, int64_t capacity, DeviceKind device) {
  if (device == DeviceKind::cpu) return {std::move(name), capacity};
  const int64_t bytes = Arena::rounded(capacity);
  std::shared_ptr<void> memory = bytes > 0 ? cuda::allocate(name, bytes) : nullptr;
  return {std::move(name), std::move(memory), bytes, device};
}

HostMemory::HostMemory(int64_t bytes, DeviceKind device, bool zeroed) {
  if (bytes == 0) return;
  memory_ = device == DeviceKind::cuda ? cuda::allocate_host(bytes) : plain_memory(bytes);
  if (zeroed) std::memset(memory_.get(), 0, static_cast<size_t>(bytes));
}

void copy_tensor(const Exec& exec, TensorView from, TensorView to) {
  SB_CHECK(from.bytes() == to.bytes(), "copy of {} to {}", from.shape().to_string(), to.shape().to_string());
  SB_CHECK(from.device() == exec.device && to.device() == exec.device, "copy between devices");
  if (from.raw() == to.raw() || from.bytes() == 0) return;
  if (exec.device == DeviceKind::cuda) return cuda::copy(exec.stream, from.raw(), to.raw(), from.bytes());
  copy_on_host(exec, from.raw(), to.raw(), from.bytes());
}

void download(const Exec& exec, TensorView from, void* to) {
  SB_CHECK(from.device() == exec.device, "download from another device");
  if (from.bytes() == 0) return;
  if (exec.device == DeviceKind::cuda) return cuda::copy(exec.stream, from.raw(), to, from.bytes());
  copy_on_host(exec, from.raw(), to, from.bytes());
}

void upload(const Exec& exec, const void* from, TensorView to) {
  SB_CHECK(to.device() == exec.device, "upload to another device");
  if (to.bytes() == 0) return;
  if (exec.device == DeviceKind::cuda) return cuda::copy(exec.stream, from, to.raw(), to.bytes());
  copy_on_host(exec, from, to.raw(), to.bytes());
}

void zero_tensor(const Exec& exec, TensorView tensor) {
  SB_CHECK(tensor.device() == exec.device, "zeros for another device");
  if (tensor.bytes() == 0) return;
  if (exec.device == DeviceKind::cuda) return cuda::zero(exec.stream, tensor.raw(), tensor.bytes());
  std::memset(tensor.raw(), 0, static_cast<size_t>(tensor.bytes()));
}

void zero_now(TensorView tensor) {
  if (tensor.bytes() == 0) return;
  if (tensor.device() == DeviceKind::cuda) return cuda::zero_and_wait(tensor.raw(), tensor.bytes());
  std::memset(tensor.raw(), 0, static_cast<size_t>(tensor.bytes()));
}

HostCopy::HostCopy(TensorView tensor) : tensor_(tensor), view_(tensor) {
  if (tensor.device() == DeviceKind::cpu || tensor.bytes() == 0) return;
  memory_ = plain_memory(tensor.bytes());
  view_ = {memory_.get(), tensor.dtype(), tensor.shape()};
  cuda::copy_and_wait(tensor.raw(), memory_.get(), tensor.bytes());
}

HostCopy::HostCopy(DType dtype, const Shape& shape) {
  const int64_t bytes = shape.elements() * dtype_bytes(dtype);
  memory_ = plain_memory(bytes);
  std::memset(memory_.get(), 0, static_cast<size_t>(bytes));
  view_ = {memory_.get(), dtype, shape};
}

void HostCopy::store() const {
  if (memory_ && !tensor_.empty()) cuda::copy_and_wait(memory_.get(), tensor_.raw(), tensor_.bytes());
}

}  // namespace sb
