#pragma once

#include <filesystem>
#include <string>

namespace sb {

// Holds a file against other processes while it lives; the kernel lets go of it when the process dies.
class FileLock {
 public:
  // Creates the file. UserError: `busy` when another process holds it, the system's reason when it cannot be created.
  // Some file systems have no locks: then a warning, and nothing is held.
  FileLock(const std::filesystem::path& file, const std::string& busy);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  int descriptor_ = -1;
};

}  // namespace sb
