#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string_view>

namespace sb {

// Files that survive a crash. All throw UserError with the path and the system's reason.

// A file written front to back; close() syncs it to the disk. Without close() what is on the disk is not defined.
class DurableFile {
 public:
  explicit DurableFile(std::filesystem::path path);
  ~DurableFile();
  DurableFile(const DurableFile&) = delete;
  DurableFile& operator=(const DurableFile&) = delete;

  void write(const void* data, size_t bytes);
  void close();
  // CRC-32C of all that was written.
  uint32_t checksum() const { return checksum_; }

 private:
  std::filesystem::path path_;
  int descriptor_;
  uint32_t checksum_ = 0;
};

// Replaces the file's content: a reader sees the old or the new one, whatever happens meanwhile.
void replace_file(const std::filesystem::path& path, std::string_view content);
// The same with content that `write` gives piece by piece. The old file may be read meanwhile.
void replace_file(const std::filesystem::path& path, const std::function<void(DurableFile&)>& write);
void write_new_file(const std::filesystem::path& path, std::string_view content);
// Makes created, renamed and removed entries of a directory durable.
void sync_directory(const std::filesystem::path& directory);
// The same of one entry, which errors name.
void sync_entry(const std::filesystem::path& path);
void sync_file(const std::filesystem::path& path);

}  // namespace sb
