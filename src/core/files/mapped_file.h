#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace sb {

// A file mapped into memory for reading. An empty file is an empty view. One that is cut short while it is mapped ends
// the program with a message that names it, and not with a signal.
class MappedFile {
 public:
  MappedFile() = default;
  // Throws UserError naming the file when it is not there, is no regular file or cannot be read.
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  const std::string& path() const { return path_; }
  int64_t size() const { return size_; }
  const unsigned char* data() const { return data_; }
  std::string_view text() const { return {reinterpret_cast<const char*>(data_), static_cast<size_t>(size_)}; }

 private:
  std::string path_;
  const unsigned char* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace sb
