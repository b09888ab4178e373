#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace sb {

// Processor time of this process and of the whole machine, in seconds.
struct ProcessorTimes {
  double own = 0;
  double busy = 0;     // of the cores that this process may use, whoever used them
  double elapsed = 0;  // by the clock
};
// Since some moment in the past. Nothing where the system does not tell.
std::optional<ProcessorTimes> read_processor_times();
// The seconds that the cores `usable` of a /proc/stat were busy, at `ticks` a second; nothing: they are not in there.
std::optional<double> busy_seconds(const std::string& stat, const std::vector<int>& usable, double ticks);

// What to say of a measurement that other processes disturbed; empty: nothing. `others`: how many of the `usable` cores
// they kept busy on average while `threads` threads were measured.
std::string disturbed_by_processes(double others, int usable, int threads);
// `processes`: those on the GPU, this one included; negative: not known.
std::string disturbed_on_gpu(int processes);

// Watches what others do on the machine from its construction on.
class OtherWork {
 public:
  explicit OtherWork(int threads) : threads_(threads), begin_(read_processor_times()) {}
  // What to say of measurements since then; empty: nothing.
  std::string disturbance() const;

 private:
  int threads_;
  std::optional<ProcessorTimes> begin_;
};

}  // namespace sb
