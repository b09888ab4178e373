#include "core/files/file_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "core/errors.h"
#include "core/log.h"

namespace sb {

FileLock::FileLock(const std::filesystem::path& file, const std::string& busy) {
  descriptor_ = ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  SB_USER_CHECK(descriptor_ >= 0, "{}: cannot be created: {}", file.string(), std::strerror(errno));
  int result = 0;
  do result = ::flock(descriptor_, LOCK_EX | LOCK_NB);
  while (result != 0 && errno == EINTR);
  if (result == 0) return;
  const int reason = errno;
  if (reason == EWOULDBLOCK) {
    ::close(descriptor_);
    throw UserError("{}", busy);
  }
  log::warning("{}: cannot be locked ({}); make sure that no other process writes there", file.string(),
               std::strerror(reason));
}

FileLock::~FileLock() {
  ::close(descriptor_);
}

}  // namespace sb
