#pragma once

#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>

namespace sb {

// What one step did, for people and for the logs.
struct StepReport {
  int64_t step = 0;
  int64_t max_steps = 0;
  double loss = 0;
  double grad_norm = 0;
  double learning_rate = 0;
  int64_t tokens = 0;
  int64_t targets = 0;
  double accuracy = 0;  // share of the counted targets predicted right
  double seconds = 0;
  double seconds_left = 0;               // until the end of the run, see run/time_left.h
  double flops = 0;                      // dense-equivalent, see model/flops.h
  std::optional<double> executed_flops;  // sparse attention only: without the pairs that it left out
  double peak_flops = 0;                 // of the device; 0: unknown
  bool skipped = false;                  // a non-finite gradient: no update
  int64_t skipped_total = 0;
  std::optional<double> coverage, density;  // sparse attention only: mass kept, share of the pairs computed
  // Balanced runs only. Measured: the busiest rank's work over the mean, and the share of the ranks' time in which
  // nothing was computed. Predicted: how many times longer the same sequences would have taken in order.
  std::optional<double> rank_imbalance, bubble_percent, gain;
  std::optional<double> cluster_seconds;  // parallel.rehearse: predicted time of the step on the cluster
  // balance.compare_steps: forward, backward and reduction of this batch in order, and as planned.
  std::optional<double> in_order_seconds, balanced_seconds;

  double tokens_per_second() const { return static_cast<double>(tokens) / seconds; }
};

struct ValidationReport {
  int64_t step = 0;
  double loss = 0;
  double accuracy = 0;
  int64_t sequences = 0;
  std::optional<double> recall;  // chunk recall: accuracy on the third and later tokens of a chunk
};

// "1h02m", "3m05s", "12s"
std::string format_duration(double seconds);
// The progress line without the time left. What does not fit into `width` columns is left out, the least important
// first: metrics.jsonl has all of it.
std::string format_step(const StepReport& report, size_t width = 1000);
std::string format_validation(const ValidationReport& report);

// What the user sees: on a terminal one line that is redrawn a step, elsewhere a plain line every `log_steps`.
class Console {
 public:
  Console(std::FILE* out, bool terminal, int64_t log_steps);

  // A block of text on lines of its own; the progress line is kept below.
  void text(const std::string& block);
  void step(const StepReport& report);
  // How far a long step is: redrawn on a terminal.
  void within_step(const std::string& line);
  void validation(const ValidationReport& report);
  // Ends the progress line.
  void finish();
  bool terminal() const { return terminal_; }

 private:
  void write(const std::string& text);
  std::FILE* out_;
  bool terminal_;
  int64_t log_steps_;
  bool line_open_ = false;
};

}  // namespace sb
