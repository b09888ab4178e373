#include "cli/output_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "core/errors.h"

namespace sb {

void check_output(const std::string& path) {
  if (path.empty()) return;
  std::error_code unknown;
  const bool existed = std::filesystem::exists(path, unknown);
  errno = 0;
  const bool writable = std::ofstream(path, std::ios::binary | std::ios::app).good();
  SB_USER_CHECK(writable, "{}: cannot be written: {}", path, std::strerror(errno));
  if (!existed) std::filesystem::remove(path, unknown);
}

void write_output(const std::string& path, const std::string& text) {
  errno = 0;
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  SB_USER_CHECK(file.good(), "{}: cannot be written: {}", path, std::strerror(errno));
}

std::string names_files(const std::string& prefix) {
  if (!prefix.ends_with('/')) return {};
  return prefix + ": a folder; add the beginning of the files' names, for example " + prefix + "train";
}

void occupy_closed_descriptors() {
  for (const int descriptor : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(descriptor, F_GETFD) >= 0) continue;
    // Takes the lowest number that is free. Standard output still cannot be written, which is said at the end.
    SB_USER_CHECK(::open("/dev/null", descriptor == STDOUT_FILENO ? O_RDONLY : O_RDWR) == descriptor,
                  "/dev/null: cannot be opened in place of a standard stream that is closed: {}", std::strerror(errno));
  }
}

void check_standard_output(int reason) {
  errno = reason;
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return;
  SB_USER_CHECK(errno != 0, "standard output: some of it could not be written; is the disk full?");  // earlier
  throw UserError("standard output: cannot be written: {}", std::strerror(errno));
}

}  // namespace sb
