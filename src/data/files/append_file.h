#pragma once

#include <cstdint>
#include <string>

namespace sb {

// A file that is only appended to, through a buffer. Errors (a full disk) are UserErrors that name it.
class AppendFile {
 public:
  // Creates it, or opens it and cuts it back to `keep` bytes; one that is shorter is damaged.
  AppendFile(const std::string& path, int64_t keep);
  ~AppendFile();
  AppendFile(const AppendFile&) = delete;
  AppendFile& operator=(const AppendFile&) = delete;

  void append(const void* data, size_t bytes);
  template <typename T>
  void append_value(T value) {
    append(&value, sizeof(value));
  }
  int64_t size() const { return size_; }
  // Everything appended so far is on the disk when this returns.
  void sync();
  const std::string& path() const { return path_; }

 private:
  void flush();

  std::string path_, buffer_;
  int file_ = -1;
  int64_t size_ = 0;
};

}  // namespace sb
