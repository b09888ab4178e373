#pragma once

// The streams of the software device: what was asked for stands in queues, and is done when somebody waits for it (or
// at other moments, see SOFTGPU_STREAMS), one operation at a time, in the thread that waits. A real device is free to
// do it then; what comes out differently lacks an order that the program did not ask for.

#include <cuda_runtime_api.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "softgpu/interface/kernel.h"

namespace softgpu {

class Stream;

// A place in a stream, as an event's record leaves one.
struct Marker {
  Stream* stream = nullptr;
  bool done = false;
  std::chrono::steady_clock::time_point when;
};

// One operation of several streams: it happens once all of them have come to it (NCCL's).
struct Meeting {
  struct Part {
    Stream* stream = nullptr;  // none: not called yet
    bool reached = false;
  };
  std::string what;
  std::vector<Part> parts;
  std::function<void()> perform;
  bool done = false;
  bool given_up = false;  // the streams go on without it
};

struct Operation {
  std::string what;  // for the report of a deadlock
  // One of these.
  std::function<void()> run = nullptr;
  std::optional<Kernel> kernel = std::nullopt;
  std::shared_ptr<Marker> waits = nullptr, marks = nullptr;
  std::shared_ptr<Meeting> meets = nullptr;
  size_t part = 0;  // of the meeting
};

class Stream {
 public:
  Stream(int its_number, int its_device, bool blocks) : number(its_number), device(its_device), blocking(blocks) {}

  const int number;
  const int device;
  const bool blocking;  // in the order of the device's default stream
  bool capturing = false;
  cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
  std::thread::id captured_by;
  std::vector<Operation> captured;

 private:
  friend class Scheduler;
  std::deque<Operation> queue_;
  bool going_ = false;      // its first operation is being brought on
  bool destroyed_ = false;  // goes when it is empty
};

class Scheduler {
 public:
  static Scheduler& get();

  // The device, for one function of the runtime: all other functions wait. Closes the device's memory at its end.
  class Turn {
   public:
    explicit Turn(Scheduler& scheduler = Scheduler::get());
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    friend class Scheduler;
    std::unique_lock<std::mutex> lock_;
  };

  // Whether the calling thread has its turn, in which it may be running a kernel.
  static bool is_in_turn();

  // All of these in a turn.
  Stream* make_stream(int device, bool blocking);
  void destroy(Stream* stream);
  Stream* default_stream(int device);
  // Of the current device, where it is the default one. Ends the program at what is no stream.
  Stream* of(cudaStream_t handle);
  // Whether a stream of the device is being captured that work in the default stream would become a part of.
  bool captures(int device) const;
  // Whether any stream of it is: nobody may wait for all of the device then.
  bool captures_any(int device) const;
  // Whether a capture forbids the calling thread what may wait for the device without saying so (allocations).
  bool forbids_waits() const;

  void put(Stream& stream, Operation operation);
  std::shared_ptr<Marker> mark(Stream& stream);  // behind all that is in it

  // The host waits; other threads may have their turn.
  void wait_for(Turn& turn, const std::shared_ptr<Marker>& marker);
  void wait_for_device(Turn& turn, int device);
  // The host asks, and does not wait: true: it is done. Asking moves the stream on, so that who asks again gets there.
  bool ask(const std::shared_ptr<Marker>& marker);
  // Something changed that a waiting thread may have waited for.
  void changed();

 private:
  Scheduler();
  bool step(Stream& stream);
  bool reach(const std::shared_ptr<Marker>& marker);
  bool meet(Operation& operation);
  void run_kernels_of(Stream& stream);
  void wander();
  [[noreturn]] void stuck(const char* why) const;
  std::string heads() const;

  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t changes_ = 0;
  std::vector<std::unique_ptr<Stream>> streams_;  // the default ones first
  int made_ = 0;
  std::mt19937 random_;
  // Of the attempt under way: it came to a stream whose turn it already was; somebody has not called yet.
  bool circle_ = false, missing_ = false;
};

// The calling thread's current device.
int current_device();

}  // namespace softgpu
