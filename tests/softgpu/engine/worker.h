#pragma once

// Who works beside the threads of a kernel: the copy engine, tensor cores. To the thread sanitizer each is a thread of
// its own, which begins when an instruction was issued and which others know of when they wait for it. Without that
// sanitizer nothing.

#include <cstddef>

#include "softgpu/interface/sanitizers.h"

namespace softgpu {

// What the calling thread has done so far, for whoever begins after it.
const void* issue();

class Worker {
 public:
  Worker() = default;
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // From here on the calling thread works in this one's name; back where it was at the end.
  class Turn {
   public:
    explicit Turn(Worker& worker);
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    [[maybe_unused]] void* before_ = nullptr;
  };

 private:
  [[maybe_unused]] void* context_ = nullptr;
};

// One after the other of a few: two operations that follow each other have no order among them.
Worker& next_worker();

}  // namespace softgpu
