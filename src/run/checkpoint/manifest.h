#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>

namespace sb {

// manifest.json of a checkpoint: the size and CRC-32C of every other file of it. Format 2 says that weights or moments
// are in several files, which versions that know format 1 alone cannot read.

// What a file was when it was written.
struct WrittenFile {
  int64_t bytes = 0;
  uint32_t checksum = 0;
};
// `known`: files as they were written, some of them by other ranks. All others in the directory are small and read
// again.
void write_manifest(const std::filesystem::path& directory, const std::map<std::string, WrittenFile>& known,
                    int format);

// One of several equal parts of a checkpoint's files.
struct FileShare {
  int part = 0, parts = 1;
};

// What of a checkpoint, or of a share of it, is not as its manifest says: sizes, and checksums too when asked (which
// reads every byte). What cannot be read is not known to be damaged, and thrown as UnreadableFile.
std::optional<std::string> compare_with_manifest(const std::filesystem::path& checkpoint, bool checksums,
                                                 FileShare share = {});

}  // namespace sb
