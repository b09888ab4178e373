#pragma once

#include <chrono>
#include <string>

namespace sb {

// How far a long command is, on standard error: a bar that is redrawn on a terminal, a line every ten seconds
// elsewhere, so that a log says it, too. Short commands show nothing.
class Progress {
 public:
  Progress();
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // This share was done by an earlier run of the command: it says nothing about the time that the rest takes.
  void begin_at(double share) { first_share_ = share; }
  // `share` of the work is done, from 0 to 1; `what` of it, in words. The time left is told unless the rest is known to
  // go at another pace.
  void show(double share, const std::string& what, bool even_pace = true);
  // Leaves the terminal's line free again.
  void clear();
  double seconds() const;

 private:
  using Clock = std::chrono::steady_clock;

  double first_share_ = 0.0;
  bool terminal_, drawn_ = false;
  Clock::time_point begin_ = Clock::now(), shown_ = begin_;
};

// "1m30s left" after `seconds` in which the share grew from `first`; empty while nothing is known.
std::string time_left(double first, double share, double seconds);

}  // namespace sb
