#include "core/files/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "core/errors.h"

namespace sb {

MappedFile::MappedFile(const std::string& path) : path_(path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  SB_USER_CHECK(file >= 0, "{}: cannot open it: {}", path, std::strerror(errno));
  struct stat info {};
  if (::fstat(file, &info) != 0 || !S_ISREG(info.st_mode)) {
    ::close(file);
    throw UserError("{}: not a regular file", path);
  }
  size_ = info.st_size;
  if (size_ > 0) {
    void* memory = ::mmap(nullptr, static_cast<size_t>(size_), PROT_READ, MAP_SHARED, file, 0);
    const int error = errno;
    ::close(file);
    SB_USER_CHECK(memory != MAP_FAILED, "{}: cannot map it into memory: {}", path, std::strerror(error));
    data_ = static_cast<const unsigned char*>(memory);
  } else {
    ::close(file);
  }
}

MappedFile::~MappedFile() {
  if (data_) ::munmap(const_cast<unsigned char*>(data_), static_cast<size_t>(size_));
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

}  // namespace sb
