#include "core/files/durable_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "core/errors.h"
#include "core/files/crc32c.h"

namespace sb {
namespace {

[[noreturn]] void fail(const std::filesystem::path& path, const char* what) {
  throw UserError("{}: {}: {}", path.string(), what, std::strerror(errno));
}

// `name` is what it is done for.
void sync_path(const std::filesystem::path& path, int flags, const std::filesystem::path& name) {
  const int descriptor = ::open(path.c_str(), flags | O_CLOEXEC);
  if (descriptor < 0) fail(name, path == name ? "cannot open" : "cannot open its directory");
  const int result = ::fsync(descriptor);
  const int reason = errno;
  ::close(descriptor);
  errno = reason;
  if (result != 0) fail(name, "cannot write to the disk");
}

}  // namespace

DurableFile::DurableFile(std::filesystem::path path)
    : path_(std::move(path)), descriptor_(::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644)) {
  if (descriptor_ < 0) fail(path_, "cannot create");
}

DurableFile::~DurableFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void DurableFile::write(const void* data, size_t bytes) {
  checksum_ = crc32c(checksum_, data, bytes);
  const char* next = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(descriptor_, next, std::min<size_t>(bytes, size_t{1} << 30));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail(path_, "cannot write");
    next += written;
    bytes -= static_cast<size_t>(written);
  }
}

void DurableFile::close() {
  if (::fsync(descriptor_) != 0) fail(path_, "cannot write to the disk");
  const int result = ::close(std::exchange(descriptor_, -1));
  if (result != 0) fail(path_, "cannot write to the disk");
}

void write_new_file(const std::filesystem::path& path, std::string_view content) {
  DurableFile file(path);
  file.write(content.data(), content.size());
  file.close();
}

void replace_file(const std::filesystem::path& path, std::string_view content) {
  replace_file(path, [&](DurableFile& file) { file.write(content.data(), content.size()); });
}

void replace_file(const std::filesystem::path& path, const std::function<void(DurableFile&)>& write) {
  const std::filesystem::path temporary = path.string() + ".new";
  DurableFile file(temporary);
  try {
    write(file);
    file.close();
    if (::rename(temporary.c_str(), path.c_str()) != 0) fail(path, "cannot be replaced");
  } catch (...) {
    // A full disk needs the room more than anybody the half of a file.
    std::error_code ignored;
    std::filesystem::remove(temporary, ignored);
    throw;
  }
  sync_entry(path);
}

void sync_directory(const std::filesystem::path& directory) {
  sync_path(directory, O_RDONLY | O_DIRECTORY, directory);
}

void sync_entry(const std::filesystem::path& path) {
  const std::filesystem::path folder = path.parent_path();
  sync_path(folder.empty() ? "." : folder, O_RDONLY | O_DIRECTORY, path);
}

void sync_file(const std::filesystem::path& path) {
  sync_path(path, O_RDONLY, path);
}

}  // namespace sb
