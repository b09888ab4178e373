#include "run/logs/console.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <vector>

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

// "[####      ] "
std::string bar(double share) {
  constexpr size_t kWidth = 12;
  const auto filled = static_cast<size_t>(kWidth * std::clamp(share, 0.0, 1.0));
  return fmt::format("[{}{}] ", std::string(filled, '#'), std::string(kWidth - filled, ' '));
}

}  // namespace

std::string format_duration(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return "n/a";
  const auto total = static_cast<int64_t>(std::llround(seconds));
  if (total < 60) return fmt::format("{}s", total);
  if (total < 3600) return fmt::format("{}m{:02}s", total / 60, total % 60);
  return fmt::format("{}h{:02}m", total / 3600, total / 60 % 60);
}

std::string format_step(const StepReport& report, size_t width) {
  struct Field {
    int rank;  // the higher, the sooner it is left out
    std::string text;
  };
  std::vector<Field> fields = {{0, fmt::format("step {}/{}", report.step, report.max_steps)}};
  const auto add = [&](int rank, std::string text) { fields.push_back({rank, std::move(text)}); };
  if (report.skipped) add(0, fmt::format("SKIPPED: gradient not finite ({} so far)", report.skipped_total));
  add(0, fmt::format("loss {:.4f}", report.loss));
  add(6, fmt::format("grad norm {:.3f}", report.grad_norm));
  add(7, fmt::format("lr {:.2e}", report.learning_rate));
  add(1, format_count(report.tokens_per_second()) + " tok/s");
  const double rate = report.flops / report.seconds;
  add(report.peak_flops > 0 ? 4 : 8, report.peak_flops > 0
                                         ? fmt::format("MFU {:.1f}%", 100.0 * rate / report.peak_flops)
                                         : fmt::format("{:.1f} GFLOP/s", rate / 1e9));
  if (report.coverage) add(5, fmt::format("coverage {:.3f}", *report.coverage));
  if (report.density) add(9, fmt::format("density {:.3f}", *report.density));
  if (report.rank_imbalance) add(3, fmt::format("imbalance {:.2f}", *report.rank_imbalance));
  if (report.bubble_percent) add(3, fmt::format("bubbles {:.0f}%", *report.bubble_percent));
  if (report.cluster_seconds) add(2, fmt::format("cluster {:.1f} ms", 1e3 * *report.cluster_seconds));
  if (report.in_order_seconds)
    add(2, fmt::format("gain {:.2f}x measured", *report.in_order_seconds / *report.balanced_seconds));
  else if (report.gain)
    add(2, fmt::format("gain {:.2f}x", *report.gain));
  const auto line = [&] {
    std::string text;
    for (const Field& field : fields) text += (text.empty() ? "" : "  ") + field.text;
    return text;
  };
  const auto by_rank = [](const Field& a, const Field& b) { return a.rank < b.rank; };
  while (line().size() > width) {
    const auto last = std::max_element(fields.begin(), fields.end(), by_rank);
    if (last->rank == 0) break;
    fields.erase(last);
  }
  return line();
}

std::string format_validation(const ValidationReport& report) {
  std::string line = fmt::format("validation at step {}: loss {:.4f}, perplexity {:.2f}, accuracy {:.1f}%", report.step,
                                 report.loss, std::exp(report.loss), 100.0 * report.accuracy);
  if (report.recall) line += fmt::format(", recall {:.1f}% (from the 3rd token of a chunk on)", 100.0 * *report.recall);
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
  constexpr size_t kColumns = 120;  // of a log that people read
  const std::string eta = "  ETA " + format_duration(report.seconds_left);
  const bool last = report.step == report.max_steps;
  if (terminal_) {
    // What a narrow terminal has no room for is the rest of the measurements, not the time left.
    const size_t width = terminal_width(out_) - 1, room = width - std::min(width, eta.size());
    std::string line = bar(static_cast<double>(report.step) / static_cast<double>(report.max_steps));
    line += format_step(report, room - std::min(room, line.size()));
    line.resize(std::min(line.size(), room));
    write(fmt::format("\r{}{}\033[K", line, eta));
    line_open_ = true;
    if (last || report.skipped) finish();
  } else if (report.step % log_steps_ == 0 || last || report.skipped) {
    write(format_step(report, kColumns - eta.size()) + eta + "\n");
  }
  std::fflush(out_);
}

void Console::within_step(const std::string& line) {
  if (!terminal_) return text(line);
  const size_t width = terminal_width(out_) - 1;
  write(fmt::format("\r{}\033[K", line.substr(0, width)));
  line_open_ = true;
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
