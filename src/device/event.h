#pragma once

#include <chrono>
#include <memory>

#include "device/exec.h"

namespace sb {

// A point in the work queued on a device. On the CPU, where nothing is queued, the moment itself.
class DeviceEvent {
 public:
  explicit DeviceEvent(DeviceKind device);
  void record(const Exec& exec);
  // Until the device has come there; at once when nothing was recorded.
  void wait() const;
  // Whether the device has come there; true when nothing was recorded.
  bool passed() const;
  // What `exec` queues from now on comes after it.
  void hold(const Exec& exec) const;
  // Both recorded and passed.
  static double milliseconds_between(const DeviceEvent& begin, const DeviceEvent& end);

 private:
  std::shared_ptr<void> event_;  // CUDA
  bool recorded_ = false;
  std::chrono::steady_clock::time_point moment_;
};

}  // namespace sb
