#pragma once

#include <memory>

#include "device/exec.h"

namespace sb {

// What a rank runs its operations with: on CUDA a stream of its own and the matrix products on it, on the CPU the pool
// alone. UserError when the device cannot be used.
class DeviceContext {
 public:
  // `scratch_bytes`: for operations outside the model, which has its own.
  DeviceContext(DeviceKind device, ThreadPool& pool, int64_t scratch_bytes = 0);
  ~DeviceContext();
  DeviceContext(const DeviceContext&) = delete;
  DeviceContext& operator=(const DeviceContext&) = delete;

  const Exec& exec() const { return exec_; }
  // Until everything queued is done.
  void synchronize() const;

 private:
  std::shared_ptr<void> stream_;
  std::unique_ptr<CudaProducts> products_;
  Arena scratch_;
  Exec exec_;
};

}  // namespace sb
