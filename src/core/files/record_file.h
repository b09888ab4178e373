#pragma once

#include <filesystem>
#include <string_view>

namespace sb {

// A file that grows record by record, each of which goes to the system at once: a killed process has lost nothing but
// the one in progress. Errors (a full disk) are UserErrors with the file's name.
class RecordFile {
 public:
  enum class Start { append, anew };
  RecordFile(std::filesystem::path path, Start start);
  ~RecordFile();
  RecordFile(const RecordFile&) = delete;
  RecordFile& operator=(const RecordFile&) = delete;

  void write(std::string_view record);
  // Some file systems (NFS) say only here that what was written is not there.
  void close();
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  int descriptor_;
};

}  // namespace sb
