#pragma once

#include <csignal>

namespace sb {

// While it lives, SIGTERM and SIGINT ask the training loop to save and stop instead of ending the process. The second
// one ends it at once. One at a time.
class StopSignal {
 public:
  StopSignal();
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  static bool requested();

 private:
  struct sigaction previous_term_, previous_int_;
};

}  // namespace sb
