#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "run/logs/console.h"

namespace sb {

// Says how far a step is that takes long: after ten seconds, then every ten on a terminal and every minute elsewhere. A
// thread of its own, since one micro-batch may take minutes. Nothing else may write to the console during a step.
class StepTicker {
 public:
  using Seconds = std::chrono::duration<double>;
  StepTicker(Console& console, Seconds first = std::chrono::seconds(10));
  ~StepTicker();
  StepTicker(const StepTicker&) = delete;
  StepTicker& operator=(const StepTicker&) = delete;

  void begin(int64_t step, int64_t micro_batches);
  // One more has begun.
  void micro_batch();
  // After this nothing is said until the next begin().
  void end();

 private:
  void watch();

  Console& console_;
  Seconds first_, every_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::chrono::steady_clock::time_point begin_, next_;
  int64_t step_ = 0, micro_batches_ = 0, begun_ = 0;
  bool running_ = false, leaving_ = false;
  std::thread thread_;
};

}  // namespace sb
