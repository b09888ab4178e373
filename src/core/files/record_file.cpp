#include "core/files/record_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "core/errors.h"

namespace sb {

RecordFile::RecordFile(std::filesystem::path path, Start start)
    : path_(std::move(path)),
      descriptor_(
          ::open(path_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | (start == Start::append ? O_APPEND : O_TRUNC), 0644)) {
  SB_USER_CHECK(descriptor_ >= 0, "{}: cannot be {}: {}", path_.string(), start == Start::anew ? "created" : "opened",
                std::strerror(errno));
}

RecordFile::~RecordFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void RecordFile::write(std::string_view record) {
  while (!record.empty()) {
    const ssize_t written = ::write(descriptor_, record.data(), record.size());
    if (written < 0 && errno == EINTR) continue;
    SB_USER_CHECK(written >= 0, "{}: cannot write: {}", path_.string(), std::strerror(errno));
    record.remove_prefix(static_cast<size_t>(written));
  }
}

void RecordFile::close() {
  if (descriptor_ < 0) return;
  SB_USER_CHECK(::close(std::exchange(descriptor_, -1)) == 0, "{}: cannot write: {}", path_.string(),
                std::strerror(errno));
}

}  // namespace sb
