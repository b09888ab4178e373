#pragma once

#include <array>
#include <csignal>
#include <string_view>

namespace sb {

// While it lives, SIGTERM, SIGINT and SIGUSR1 ask the training loop to save and stop instead of ending the process. The
// second of a kind ends it at once. SIGUSR1 is what mpirun passes on to its ranks: it ends them soon after any other.
// One at a time.
class StopSignal {
 public:
  // `notice` is written to standard error when the first one comes; empty: nothing. It must live as long as this.
  explicit StopSignal(std::string_view notice = {});
  ~StopSignal();
  StopSignal(const StopSignal&) = delete;
  StopSignal& operator=(const StopSignal&) = delete;

  static bool requested();

 private:
  static constexpr std::array kSignals = {SIGTERM, SIGINT, SIGUSR1};
  std::array<struct sigaction, kSignals.size()> previous_;
};

}  // namespace sb
