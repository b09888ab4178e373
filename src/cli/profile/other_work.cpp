#include "cli/profile/other_work.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <sstream>

#include "core/thread_pool.h"

namespace sb {
namespace {

// Less than this is what an idle machine has anyway.
constexpr double kNoise = 0.2;

double seconds(const timeval& time) {
  return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
}

}  // namespace

std::optional<double> busy_seconds(const std::string& stat, const std::vector<int>& usable, double ticks) {
  std::istringstream lines(stat);
  int64_t busy = 0;
  size_t found = 0;
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with("cpu") || line.starts_with("cpu ")) continue;
    std::istringstream fields(line.substr(3));
    // What guests take is in `user` already. Stolen time is somebody else's work, too.
    int64_t core = -1, user = 0, nice = 0, system = 0, idle = 0, waiting = 0, hard = 0, soft = 0, stolen = 0;
    if (!(fields >> core >> user >> nice >> system >> idle >> waiting >> hard >> soft >> stolen)) continue;
    if (std::find(usable.begin(), usable.end(), core) == usable.end()) continue;
    busy += user + nice + system + hard + soft + stolen;
    ++found;
  }
  if (found < usable.size() || busy == 0 || ticks <= 0) return std::nullopt;
  return static_cast<double>(busy) / ticks;
}

std::optional<ProcessorTimes> read_processor_times() {
  std::ifstream file("/proc/stat");
  std::stringstream text;
  text << file.rdbuf();
  const auto busy = busy_seconds(text.str(), usable_cores(), static_cast<double>(sysconf(_SC_CLK_TCK)));
  rusage usage = {};
  if (!busy || getrusage(RUSAGE_SELF, &usage) != 0) return std::nullopt;
  const std::chrono::duration<double> now = std::chrono::steady_clock::now().time_since_epoch();
  return ProcessorTimes{seconds(usage.ru_utime) + seconds(usage.ru_stime), *busy, now.count()};
}

std::string disturbed_by_processes(double others, int usable, int threads) {
  if (others + threads <= usable + kNoise || others <= kNoise) return {};
  return fmt::format(
      "other processes keep {:.1f} of the {} cores busy while {} are being measured: the figures may be off; measure "
      "again when the machine is idle",
      others, usable, threads);
}

std::string disturbed_on_gpu(int processes) {
  if (processes <= 1) return {};
  return fmt::format(
      "{} other process{} on this GPU: the figures may be off; measure again when it is free (nvidia-smi names them)",
      processes - 1, processes == 2 ? " is" : "es are");
}

std::string OtherWork::disturbance() const {
  const std::optional<ProcessorTimes> now = read_processor_times();
  if (!begin_ || !now || now->elapsed <= begin_->elapsed) return {};
  const double others = (now->busy - begin_->busy - (now->own - begin_->own)) / (now->elapsed - begin_->elapsed);
  return disturbed_by_processes(std::max(0.0, others), available_cores(), threads_);
}

}  // namespace sb
