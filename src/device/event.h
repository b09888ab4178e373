#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

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
  friend class DeviceEventPool;
  std::shared_ptr<void> event_;  // CUDA
  bool recorded_ = false;
  std::chrono::steady_clock::time_point moment_;
};

// Events for what is done often: they are made once and used again. They measure no time. An event goes back when its
// last copy does, from any thread, also after the pool.
class DeviceEventPool {
 public:
  // `made`: there from the start.
  DeviceEventPool(DeviceKind device, int made);
  DeviceEvent take();

 private:
  struct Free {
    std::mutex mutex;
    std::vector<std::shared_ptr<void>> events;
  };
  const DeviceKind device_;
  const std::shared_ptr<Free> free_ = std::make_shared<Free>();
};

}  // namespace sb
