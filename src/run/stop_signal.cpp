#include "run/stop_signal.h"

#include <unistd.h>

#include <cerrno>

namespace sb {
namespace {

volatile std::sig_atomic_t stop_requested = 0;

std::string_view answer;

void on_signal(int) {
  if (stop_requested == 0 && !answer.empty()) {
    const int kept = errno;
    (void)!write(STDERR_FILENO, answer.data(), answer.size());
    errno = kept;
  }
  stop_requested = 1;
}

}  // namespace

StopSignal::StopSignal(std::string_view notice) {
  stop_requested = 0;
  answer = notice;
  struct sigaction action = {};
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  for (size_t i = 0; i < kSignals.size(); ++i) {
    // The default action returns with the first signal: the next one kills. Not with SIGUSR1, which comes from
    // schedulers and launchers, often from several of them at once. Interrupted system calls go on.
    action.sa_flags = static_cast<int>(kSignals[i] == SIGUSR1 ? SA_RESTART : SA_RESETHAND | SA_RESTART);
    sigaction(kSignals[i], &action, &previous_[i]);
  }
}

StopSignal::~StopSignal() {
  for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &previous_[i], nullptr);
}

bool StopSignal::requested() {
  return stop_requested != 0;
}

}  // namespace sb
