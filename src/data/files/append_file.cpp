#include "data/files/append_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/errors.h"

namespace sb {
namespace {

constexpr size_t kBuffer = size_t{1} << 20;

}  // namespace

AppendFile::AppendFile(const std::string& path, int64_t keep) : path_(path), size_(keep) {
  file_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
  SB_USER_CHECK(file_ >= 0, "{}: cannot be created: {}", path, std::strerror(errno));
  struct stat info {};
  if (::fstat(file_, &info) != 0 || info.st_size < keep || ::ftruncate(file_, keep) != 0 ||
      ::lseek(file_, keep, SEEK_SET) != keep) {
    ::close(file_);
    throw UserError("{}: shorter than the {} bytes that an earlier run recorded; delete the directory and start again",
                    path, keep);
  }
  buffer_.reserve(kBuffer);
}

AppendFile::~AppendFile() {
  // Unsynced bytes are lost here by design: the state on disk does not count on them.
  if (file_ >= 0) ::close(file_);
}

void AppendFile::append(const void* data, size_t bytes) {
  buffer_.append(static_cast<const char*>(data), bytes);
  size_ += static_cast<int64_t>(bytes);
  if (buffer_.size() >= kBuffer) flush();
}

void AppendFile::flush() {
  size_t done = 0;
  while (done < buffer_.size()) {
    const ssize_t written = ::write(file_, buffer_.data() + done, buffer_.size() - done);
    if (written < 0 && errno == EINTR) continue;
    SB_USER_CHECK(written >= 0, "{}: cannot write: {}", path_, std::strerror(errno));
    done += static_cast<size_t>(written);
  }
  buffer_.clear();
}

void AppendFile::sync() {
  flush();
  SB_USER_CHECK(::fsync(file_) == 0, "{}: cannot write to disk: {}", path_, std::strerror(errno));
}

}  // namespace sb
