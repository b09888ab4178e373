#include "run/logs/trace.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

#include "core/errors.h"
#include "core/log.h"

namespace sb {

TraceWriter::TraceWriter(bool enabled, const std::filesystem::path& file, int rank, const std::string& label)
    : enabled_(enabled), file_(file), rank_(rank) {
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
  if (file_.empty() || (!stream_ && !measured_)) return;
  const std::string rest = take();
  try {
    write({&rest, 1});
  } catch (const UserError& error) {
    log::warning("{}", error.what());
    return;
  }
  std::fputs("\n]\n", stream_.get());
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
  if (!enabled_ || file_.empty()) return;
  if (!stream_) {
    stream_.reset(std::fopen(file_.c_str(), "wb"));
    SB_USER_CHECK(stream_ != nullptr, "{}: cannot be created: {}", file_.string(), std::strerror(errno));
  }
  for (const std::string& text : events) {
    if (text.empty()) continue;
    if (!begun_) std::fputc('[', stream_.get());
    std::fputs(text.c_str() + (begun_ ? 0 : 1), stream_.get());  // the first event has no comma before it
    begun_ = true;
  }
  std::fflush(stream_.get());
}

}  // namespace sb
