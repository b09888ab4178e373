#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/communicator.h"
#include "comm/device/device_communicator.h"
#include "device/event.h"

namespace sb {

// One operation on device memory.
struct DeviceOperation {
  enum class Kind { all_reduce, reduce_scatter, all_gather, broadcast, barrier, send, receive };

  explicit DeviceOperation(DeviceEventPool& events) : ready(events.take()), over(events.take()) {}

  Kind kind = Kind::barrier;
  void* data = nullptr;
  int64_t count = 0;  // elements: of all, or of one piece; bytes of a message
  CommType type = CommType::u8;
  ReduceOp op = ReduceOp::sum;
  int peer = 0;  // root of a broadcast; the other side of a message
  int tag = 0;
  std::string text;   // "all_reduce #812 of group dp"
  DeviceEvent ready;  // what the stream had to do before the call

  bool message() const { return kind == Kind::send || kind == Kind::receive; }
  int64_t bytes() const;

  // Since when somebody waits for it, as ticks of the steady clock; 0: nobody does yet.
  std::atomic<int64_t> awaited{0};

  // Guarded by the engine's lock.
  bool queued = false;  // `over` stands in a queue of the device
  DeviceEvent over;
};

// What a group does with its operations; the engine's thread alone calls it, and all of it returns at once. A failure
// of the group is thrown: CommTimeout, CommAborted or another Error.
class DeviceGroup {
 public:
  using Clock = std::chrono::steady_clock;
  // To be called with an operation whose `over` is recorded.
  using Queued = std::function<void(DeviceOperation&)>;

  virtual ~DeviceGroup() = default;
  virtual void begin(std::shared_ptr<DeviceOperation> operation) = 0;
  // Moves on what can be; true: something was.
  virtual bool advance(const Queued& queued) = 0;
  virtual bool idle() const = 0;
  // Lets go of everything that is under way.
  virtual void drop() = 0;

 private:
  friend class DeviceEngine;
  // Guarded by the engine's lock.
  std::string failed_;
  bool timed_out_ = false;
  // The engine's thread's own.
  bool dropped_ = false;
};

// How long an operation has kept somebody waiting: since it was begun and since somebody waits, whichever is later.
// Zero while nobody does: data that is asked for early may come late.
std::chrono::nanoseconds waited_for(const DeviceOperation& operation, DeviceGroup::Clock::time_point begun);
[[noreturn]] void throw_timeout(int rank, std::chrono::milliseconds timeout, const DeviceOperation& operation);

// Moves the operations of all device groups of a rank on, on a thread of its own, while the rank queues its
// computations.
class DeviceEngine {
 public:
  explicit DeviceEngine(const DeviceCommOptions& options);
  ~DeviceEngine();

  const DeviceCommOptions& options() const { return options_; }
  Exec exec() const { return {.device = options_.device, .stream = options_.stream}; }
  DeviceEventPool& events() { return events_; }

  void add(std::shared_ptr<DeviceGroup> group);
  // Waits for what the device still works on.
  void remove(const std::shared_ptr<DeviceGroup>& group);

  // Throws where begin() would.
  void check_usable(const DeviceGroup& group);
  void begin(const std::shared_ptr<DeviceGroup>& group, std::shared_ptr<DeviceOperation> operation);
  void wait(const std::shared_ptr<DeviceGroup>& group, DeviceOperation& operation);
  bool done(const std::shared_ptr<DeviceGroup>& group, const DeviceOperation& operation);
  void abandon(const std::shared_ptr<DeviceGroup>& group, const DeviceOperation& operation, int rank);

 private:
  struct Asked {
    std::shared_ptr<DeviceGroup> group;
    std::shared_ptr<DeviceOperation> operation;
  };
  void run();
  bool work_round(std::vector<Asked> asked);
  void fail(DeviceGroup& group, const std::string& why, bool timed_out);
  [[noreturn]] static void refuse(const DeviceGroup& group, const std::string& what);

  const DeviceCommOptions options_;
  const int device_index_;
  DeviceEventPool events_;

  std::mutex mutex_;
  std::condition_variable changed_;  // for the thread
  std::condition_variable over_;     // for those who wait
  std::vector<Asked> asked_;
  std::vector<std::shared_ptr<DeviceGroup>> groups_, leaving_;
  int waiting_ = 0;
  bool stop_ = false;

  std::thread thread_;
};

}  // namespace sb
