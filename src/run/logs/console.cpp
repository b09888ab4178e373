#include "run/logs/console.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>

namespace sb {
namespace {

size_t terminal_width(std::FILE* out) {
  struct winsize size = {};
  if (ioctl(fileno(out), TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

std::string format_count(double value) {
  if (value >= 1e6) return fmt::format("{:.2f}M", value / 1e6);
  if (value >= 1e4) return fmt::format("{:.1f}k", value / 1e3);
  return fmt::format("{:.0f}", value);
}

}  // namespace

std::string format_duration(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return "n/a";
  const auto total = static_cast<int64_t>(std::llround(seconds));
  if (total < 60) return fmt::format("{}s", total);
  if (total < 3600) return fmt::format("{}m{:02}s", total / 60, total % 60);
  return fmt::format("{}h{:02}m", total / 3600, total / 60 % 60);
}

std::string format_step(const StepReport& report) {
  std::string line = fmt::format("step {}/{}", report.step, report.max_steps);
  // First of all: a narrow terminal cuts the end.
  if (report.skipped) line += fmt::format("  SKIPPED: gradient not finite ({} so far)", report.skipped_total);
  line += fmt::format("  loss {:.4f}  grad norm {:.3f}  lr {:.2e}  {} tok/s", report.loss, report.grad_norm,
                      report.learning_rate, format_count(report.tokens_per_second()));
  const auto speed = [&](double flops) {
    const double rate = flops / report.seconds;
    return report.peak_flops > 0 ? fmt::format("{:.1f} %", 100.0 * rate / report.peak_flops)
                                 : fmt::format("{:.1f} GFLOP/s", rate / 1e9);
  };
  line += (report.peak_flops > 0 ? "  MFU " : "  ") + speed(report.flops);
  if (report.executed_flops) line += " (executed " + speed(*report.executed_flops) + ")";
  if (report.coverage) line += fmt::format("  coverage {:.3f}", *report.coverage);
  if (report.density) line += fmt::format("  density {:.3f}", *report.density);
  // Without sparse attention a sequence's budget is its length.
  if (report.budget && report.density) line += fmt::format("  budget {:.0f}", *report.budget);
  if (report.imbalance) line += fmt::format("  imbalance {:.2f}", *report.imbalance);
  if (report.bubble_percent) line += fmt::format("  bubbles {:.0f} %", *report.bubble_percent);
  if (report.predicted_ms)
    line += fmt::format("  {:.0f} ms (predicted {:.0f})", 1e3 * report.seconds, *report.predicted_ms);
  if (report.planning_percent) line += fmt::format("  planning {:.2f} %", *report.planning_percent);
  return line;
}

std::string format_validation(const ValidationReport& report) {
  std::string line = fmt::format("validation at step {}: loss {:.4f}, perplexity {:.2f}, accuracy {:.1f} %",
                                 report.step, report.loss, std::exp(report.loss), 100.0 * report.accuracy);
  if (report.recall) line += fmt::format(", recall {:.1f} % (3rd and later tokens of a chunk)", 100.0 * *report.recall);
  return line + fmt::format(" over {} sequences", report.sequences);
}

Console::Console(std::FILE* out, bool terminal, int64_t log_steps)
    : out_(out), terminal_(terminal), log_steps_(std::max<int64_t>(1, log_steps)) {}

// Not fmt::print, which throws: a run does not end because its console cannot be written.
void Console::write(const std::string& text) {
  std::fputs(text.c_str(), out_);
}

void Console::text(const std::string& block) {
  if (line_open_) write("\r\033[K");
  line_open_ = false;
  write(block.ends_with('\n') ? block : block + "\n");
  std::fflush(out_);
}

void Console::step(const StepReport& report) {
  // What a narrow terminal has no room for is the rest of the measurements, not the time left.
  const std::string eta = "  ETA " + format_duration(report.seconds_left);
  const bool last = report.step == report.max_steps;
  if (terminal_) {
    std::string line = format_step(report);
    const size_t width = terminal_width(out_) - 1;
    line.resize(std::min(line.size(), width - std::min(width, eta.size())));
    write(fmt::format("\r{}{}\033[K", line, eta));
    line_open_ = true;
    if (last || report.skipped) finish();
  } else if (report.step % log_steps_ == 0 || last || report.skipped) {
    write(format_step(report) + eta + "\n");
  }
  std::fflush(out_);
}

void Console::validation(const ValidationReport& report) {
  text(format_validation(report));
}

void Console::finish() {
  if (line_open_) write("\n");
  line_open_ = false;
  std::fflush(out_);
}

}  // namespace sb
