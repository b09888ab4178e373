#include "core/files/regular_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace sb {
namespace {

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "it is a directory";
  if (S_ISFIFO(mode)) return "it is a pipe";
  if (S_ISSOCK(mode)) return "it is a socket";
  return "it is a device";
}

}  // namespace

UnreadableFile::UnreadableFile(const std::filesystem::path& file, const std::string& what, int reason)
    : UserError("{}: {}{}{}", file.string(), what, reason != 0 ? ": " : "", reason != 0 ? std::strerror(reason) : ""),
      reason_(reason) {}

RegularFile::RegularFile(std::filesystem::path path) : path_(std::move(path)) {
  // Opening a pipe would wait for a writer.
  do descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  while (descriptor_ < 0 && errno == EINTR);
  if (descriptor_ < 0 && errno != ENXIO) throw UnreadableFile(path_, "cannot be opened", errno);
  struct stat status {};
  const int result = descriptor_ >= 0 ? ::fstat(descriptor_, &status) : ::stat(path_.c_str(), &status);
  const int reason = errno;
  if (result == 0 && S_ISREG(status.st_mode)) {
    size_ = status.st_size;
    return;
  }
  if (descriptor_ >= 0) ::close(descriptor_);
  if (result != 0) throw UnreadableFile(path_, "cannot be inspected", reason);
  throw UnreadableFile(path_, fmt::format("not a regular file: {}", kind_of(status.st_mode)), 0);
}

RegularFile::~RegularFile() {
  ::close(descriptor_);
}

size_t RegularFile::read(void* to, size_t bytes) {
  constexpr size_t kMostAtOnce = size_t{1} << 30;
  size_t done = 0;
  while (done < bytes) {
    const ssize_t got = ::read(descriptor_, static_cast<char*>(to) + done, std::min<size_t>(bytes - done, kMostAtOnce));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw UnreadableFile(path_, "cannot be read", errno);
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  return done;
}

void RegularFile::seek(int64_t place) {
  if (::lseek(descriptor_, place, SEEK_SET) < 0) throw UnreadableFile(path_, "cannot be read", errno);
}

std::string read_regular_file(const std::filesystem::path& path, int64_t most) {
  RegularFile file(path);
  SB_USER_CHECK(file.size() <= most, "{}: larger than {} bytes; is this the right file?", path.string(), most);
  std::string text;
  // One more than it states, to see its end; it may have grown meanwhile.
  for (size_t piece = static_cast<size_t>(file.size()) + 1;; piece = size_t{1} << 16) {
    const size_t before = text.size();
    text.resize(before + piece);
    const size_t got = file.read(text.data() + before, piece);
    text.resize(before + got);
    SB_USER_CHECK(std::ssize(text) <= most, "{}: larger than {} bytes; is this the right file?", path.string(), most);
    if (got < piece) return text;
  }
}

void check_regular_file(const std::filesystem::path& path) {
  const RegularFile file(path);
}

}  // namespace sb
