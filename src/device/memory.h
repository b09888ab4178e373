#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "device/exec.h"

namespace sb {

// An arena on the device: one block, taken at once.
Arena make_arena(std::string name, int64_t capacity, DeviceKind device);

// Host memory beside work on `device`: page-locked for CUDA, so that copies run on the stream while the host goes on
// and kernels may write results straight into it.
class HostMemory {
 public:
  HostMemory() = default;
  HostMemory(int64_t bytes, DeviceKind device, bool zeroed = true);
  void* data() const { return memory_.get(); }

 private:
  std::shared_ptr<void> memory_;
};

// to = from in the order of the stream; nothing when they are the same memory. On the CPU over the threads of the pool.
void copy_tensor(const Exec& exec, TensorView from, TensorView to);
// Host memory (HostMemory) to the device and back. On CUDA the host may not touch it until the stream has come that
// far.
void download(const Exec& exec, TensorView from, void* to);
void upload(const Exec& exec, const void* from, TensorView to);
// Zeros, in the order of the stream.
void zero_tensor(const Exec& exec, TensorView tensor);

// Zeros at once, for memory just taken; waits for the device.
void zero_now(TensorView tensor);

// A tensor as the host sees it, for what is not done every step (loading, saving, tests): the tensor itself on the CPU;
// a copy on CUDA, taken when everything queued so far is done.
class HostCopy {
 public:
  explicit HostCopy(TensorView tensor);
  // Zeros that are no tensor's copy: store() does nothing.
  HostCopy(DType dtype, const Shape& shape);
  const TensorView& view() const { return view_; }
  // Brings a changed copy back and waits for it.
  void store() const;

 private:
  TensorView tensor_, view_;
  std::shared_ptr<void> memory_;
};

}  // namespace sb
