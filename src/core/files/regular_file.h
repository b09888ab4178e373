#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

#include "core/errors.h"

namespace sb {

// A file that is there and cannot be read, or is no regular file: what is in it is not known. Not the same as damaged.
class UnreadableFile : public UserError {
 public:
  UnreadableFile(const std::filesystem::path& file, const std::string& what, int reason);
  // The system's error number; 0 when the file is of another kind.
  int reason() const { return reason_; }

 private:
  int reason_;
};

// A regular file opened for reading, which is how every input of the program is opened: a folder, a pipe or a device is
// refused instead of waited for, and errors are UnreadableFile with the file's name and the system's reason.
class RegularFile {
 public:
  explicit RegularFile(std::filesystem::path path);
  ~RegularFile();
  RegularFile(const RegularFile&) = delete;
  RegularFile& operator=(const RegularFile&) = delete;

  // When it was opened.
  int64_t size() const { return size_; }
  int descriptor() const { return descriptor_; }
  // Bytes from where the last call ended; fewer than asked for at the end of the file alone.
  size_t read(void* to, size_t bytes);
  // The next read begins there.
  void seek(int64_t place);

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
  int64_t size_ = 0;
};

// Everything in it. More than `most` bytes are a UserError.
std::string read_regular_file(const std::filesystem::path& path, int64_t most = INT64_MAX);
// Refuses what RegularFile refuses, for readers that open the file themselves.
void check_regular_file(const std::filesystem::path& path);

}  // namespace sb
