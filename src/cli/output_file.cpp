#include "cli/output_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "core/errors.h"
#include "core/files/durable_file.h"
#include "core/files/record_file.h"

namespace sb {

namespace fs = std::filesystem;

namespace {

// What a link points to, also where nothing is there yet.
fs::path followed(fs::path path) {
  constexpr int kMostLinks = 40;  // as many as Linux follows
  std::error_code unknown;
  for (int i = 0; i < kMostLinks && fs::is_symlink(path, unknown); ++i)
    path = path.parent_path() / fs::read_symlink(path, unknown);
  return path;
}

}  // namespace

void check_output(const std::string& path) {
  if (path.empty()) return;
  std::error_code unknown;
  const bool existed = fs::exists(path, unknown);
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_NONBLOCK | O_CLOEXEC, 0644);
  SB_USER_CHECK(file >= 0, "{}: cannot be written: {}", path, std::strerror(errno));
  ::close(file);
  if (!existed) fs::remove(followed(path), unknown);
}

void write_output(const std::string& path, const std::string& text) {
  std::error_code unknown;
  if (fs::exists(path, unknown) && !fs::is_regular_file(path, unknown)) {  // a pipe or a device
    RecordFile file(path, RecordFile::Start::append);
    file.write(text);
    return file.close();
  }
  replace_file(followed(path), text);
}

std::string names_files(const std::string& prefix) {
  if (!prefix.ends_with('/')) return {};
  return prefix + ": is a directory; add the first part of the file names, for example " + prefix + "train";
}

void occupy_closed_descriptors() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(descriptor, F_GETFD) >= 0) continue;
    // Takes the lowest number that is free. Standard output still cannot be written, which is said at the end.
    SB_USER_CHECK(::open("/dev/null", descriptor == STDOUT_FILENO ? O_RDONLY : O_RDWR) == descriptor,
                  "/dev/null: cannot be opened as a replacement for a closed standard stream: {}",
                  std::strerror(errno));
  }
}

void check_standard_output(int reason) {
  errno = reason;
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return;
  SB_USER_CHECK(errno != 0, "standard output: could not be written completely; is the disk full?");  // earlier
  throw UserError("standard output: cannot be written: {}", std::strerror(errno));
}

}  // namespace sb
