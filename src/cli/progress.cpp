#include "cli/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "core/log.h"
#include "run/logs/console.h"

namespace sb {

std::string time_left(double first, double share, double seconds) {
  if (share <= first) return {};
  return format_duration(seconds * (1.0 - share) / (share - first)) + " left";
}

Progress::Progress() : terminal_(::isatty(STDERR_FILENO) != 0) {}

void Progress::show(double share, const std::string& what, bool even_pace) {
  const Clock::time_point now = Clock::now();
  if (share >= 1.0 || std::chrono::duration<double>(now - shown_).count() < (terminal_ ? 0.2 : 10.0)) return;
  shown_ = now;
  share = std::clamp(share, 0.0, 1.0);
  const std::string text =
      fmt::format("{:5.1f}%  {}  {}", 100.0 * share, what,
                  even_pace ? time_left(first_share_, share, seconds()) : format_duration(seconds()) + " so far");
  if (!terminal_) {
    log::info("{}", text);
    return;
  }
  const auto filled = static_cast<size_t>(30.0 * share);
  fmt::print(stderr, "\r[{}{}] {}\033[K", std::string(filled, '#'), std::string(30 - filled, ' '), text);
  std::fflush(stderr);
  drawn_ = true;
}

void Progress::clear() {
  if (drawn_) fmt::print(stderr, "\r\033[K");
  drawn_ = false;
}

double Progress::seconds() const {
  return std::chrono::duration<double>(Clock::now() - begin_).count();
}

}  // namespace sb
