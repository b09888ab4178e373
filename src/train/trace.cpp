#include "train/trace.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/errors.h"

namespace sb {

TraceWriter::TraceWriter(const std::filesystem::path& file) {
  if (file.empty()) return;
  stream_.reset(std::fopen(file.c_str(), "wb"));
  SB_USER_CHECK(stream_ != nullptr, "{}: cannot be created: {}", file.string(), std::strerror(errno));
  fmt::print(stream_.get(),
             "[\n{{\"ph\":\"M\",\"pid\":0,\"tid\":0,\"name\":\"process_name\",\"args\":{{\"name\":\"rank 0\"}}}},\n"
             "{{\"ph\":\"M\",\"pid\":0,\"tid\":0,\"name\":\"thread_name\",\"args\":{{\"name\":\"training loop\"}}}}");
}

TraceWriter::~TraceWriter() {
  if (stream_) fmt::print(stream_.get(), "\n]\n");
}

void TraceWriter::complete(const char* name, int64_t argument, std::chrono::steady_clock::time_point begin) {
  using Microseconds = std::chrono::duration<double, std::micro>;
  const auto now = std::chrono::steady_clock::now();
  fmt::print(
      stream_.get(),
      ",\n{{\"ph\":\"X\",\"pid\":0,\"tid\":0,\"name\":\"{}\",\"ts\":{:.3f},\"dur\":{:.3f},\"args\":{{\"n\":{}}}}}",
      name, Microseconds(begin - start_).count(), Microseconds(now - begin).count(), argument);
}

void TraceWriter::flush() {
  if (stream_) std::fflush(stream_.get());
}

}  // namespace sb
