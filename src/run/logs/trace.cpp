#include "run/logs/trace.h"

#include <fmt/format.h>

#include <exception>
#include <iterator>
#include <utility>

#include "core/log.h"

namespace sb {

TraceWriter::TraceWriter(bool enabled, const std::filesystem::path& file, int rank, const std::string& label)
    : enabled_(enabled), path_(file), rank_(rank) {
  if (!enabled_) return;
  const auto describe = [&](const char* what, const char* key, const std::string& value) {
    events_ += fmt::format(",\n{{\"ph\":\"M\",\"pid\":{},\"tid\":0,\"name\":\"{}\",\"args\":{{\"{}\":{}}}}}", rank,
                           what, key, value);
  };
  describe("process_name", "name", fmt::format("\"rank {}\"", rank));
  describe("process_sort_index", "sort_index", fmt::format("{}", rank));
  describe("thread_name", "name", fmt::format("\"{}\"", label));
}

TraceWriter::~TraceWriter() {
  try {
    finish();
  } catch (const std::exception& error) {
    log::warning("{}", error.what());  // the run has failed for another reason, which is said elsewhere
  }
}

void TraceWriter::finish() {
  if (finished_ || path_.empty() || (!file_ && !measured_)) return;
  finished_ = true;
  const std::string rest = take();
  write({&rest, 1});
  file_->write("\n]\n");
  file_->close();
}

void TraceWriter::complete(const char* name, int64_t argument, std::chrono::steady_clock::time_point begin,
                           std::chrono::steady_clock::time_point end) {
  if (!enabled_) return;
  measured_ = true;
  using Microseconds = std::chrono::duration<double, std::micro>;
  fmt::format_to(
      std::back_inserter(events_),
      ",\n{{\"ph\":\"X\",\"pid\":{},\"tid\":0,\"name\":\"{}\",\"ts\":{:.3f},\"dur\":{:.3f},\"args\":{{\"n\":{}}}}}",
      rank_, name, Microseconds(begin - start_).count(), Microseconds(end - begin).count(), argument);
}

std::string TraceWriter::take() {
  return std::exchange(events_, {});
}

void TraceWriter::write(std::span<const std::string> events) {
  if (!enabled_ || path_.empty()) return;
  if (!file_) file_.emplace(path_, RecordFile::Start::anew);
  std::string text;
  for (const std::string& more : events) text += more;
  if (text.empty()) return;
  if (!begun_) text[0] = '[';  // the first event has no comma before it
  begun_ = true;
  file_->write(text);
}

}  // namespace sb
