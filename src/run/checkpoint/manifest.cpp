#include "run/checkpoint/manifest.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <future>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "core/errors.h"
#include "core/files/crc32c.h"
#include "core/files/durable_file.h"
#include "core/files/regular_file.h"
#include "core/utf8.h"

namespace sb {
namespace {

namespace fs = std::filesystem;

constexpr const char* kName = "manifest.json";
constexpr int kNewestFormat = 2;

uint32_t piece_checksum(const fs::path& file, int64_t begin, int64_t end) {
  RegularFile in(file);
  in.seek(begin);
  std::vector<char> buffer(1 << 20);
  uint32_t crc = 0;
  while (begin < end) {
    const size_t got = in.read(buffer.data(), static_cast<size_t>(std::min<int64_t>(end - begin, std::ssize(buffer))));
    SB_USER_CHECK(got > 0, "{}: was truncated while it was being read", file.string());
    crc = crc32c(crc, buffer.data(), got);
    begin += static_cast<int64_t>(got);
  }
  return crc;
}

// Large files in pieces at the same time: one reader does not keep a disk busy.
uint32_t file_checksum(const fs::path& file) {
  constexpr int64_t kLeastPiece = int64_t{64} << 20, kMostPieces = 8;
  const int64_t size = RegularFile(file).size();
  const int64_t pieces = std::clamp<int64_t>(size / kLeastPiece, 1, kMostPieces);
  const auto border = [&](int64_t piece) { return size / pieces * piece + std::min(piece, size % pieces); };
  std::vector<std::future<uint32_t>> others;
  for (int64_t p = 1; p < pieces; ++p)
    others.push_back(std::async(std::launch::async, piece_checksum, file, border(p), border(p + 1)));
  uint32_t crc = piece_checksum(file, 0, border(1));
  for (int64_t p = 1; p < pieces; ++p)
    crc =
        crc32c_joined(crc, others[static_cast<size_t>(p - 1)].get(), static_cast<uint64_t>(border(p + 1) - border(p)));
  return crc;
}

std::string checksum_text(uint32_t checksum) {
  return fmt::format("{:08x}", checksum);
}

nlohmann::json read_manifest(const fs::path& file) {
  nlohmann::json object = nlohmann::json::parse(read_regular_file(file), nullptr, /*allow_exceptions=*/false);
  SB_USER_CHECK(object.is_object(), "{}: not a JSON object", file.string());
  return object;
}

struct ListedFile {
  std::string name, checksum;
  uint64_t bytes;
};

// Each file goes to the part that has least to read so far, the largest first.
std::vector<ListedFile> files_of(const nlohmann::json& manifest, FileShare share) {
  std::vector<ListedFile> files;
  for (const auto& [name, entry] : manifest.at("files").items())
    files.push_back({name, entry.at("crc32c"), entry.at("bytes")});
  std::ranges::stable_sort(files, std::ranges::greater(), &ListedFile::bytes);
  std::vector<uint64_t> bytes(static_cast<size_t>(share.parts));
  std::vector<ListedFile> own;
  for (const ListedFile& file : files) {
    const auto least = std::ranges::min_element(bytes);
    *least += file.bytes;
    if (least - bytes.begin() == share.part) own.push_back(file);
  }
  return own;
}

}  // namespace

void write_manifest(const fs::path& directory, const std::map<std::string, WrittenFile>& known, int format) {
  std::set<std::string> names;
  for (const auto& [name, file] : known) {
    names.insert(name);
    // By its name: what another host wrote may not be listed here for a while.
    std::error_code missing;
    const uintmax_t bytes = fs::file_size(directory / name, missing);
    SB_USER_CHECK(!missing && bytes == static_cast<uintmax_t>(file.bytes),
                  "{}: {} bytes were written, {} are there; do all ranks see the same directory?",
                  (directory / name).string(), file.bytes, missing ? missing.message() : fmt::format("{}", bytes));
  }
  for (const auto& entry : fs::directory_iterator(directory)) names.insert(entry.path().filename().string());
  nlohmann::ordered_json files;
  for (const std::string& name : names) {
    const auto written = known.find(name);
    files[name] = {
        {"bytes", fs::file_size(directory / name)},
        {"crc32c", checksum_text(written != known.end() ? written->second.checksum : file_checksum(directory / name))}};
  }
  const nlohmann::ordered_json manifest = {{"format", format}, {"files", files}};
  write_new_file(directory / kName, manifest.dump(1) + "\n");
}

std::optional<std::string> compare_with_manifest(const fs::path& checkpoint, bool checksums, FileShare share) {
  try {
    const nlohmann::json manifest = read_manifest(checkpoint / kName);
    const nlohmann::json& format = manifest.at("format");
    if (format != 1 && format != kNewestFormat)  // written out only when that cannot walk a deep nesting on the stack
      return fmt::format("{} has format {}, this version reads 1 to {}", kName,
                         format.is_structured() ? format.type_name() : format.dump(), kNewestFormat);
    for (const auto& [name, checksum, expected] : files_of(manifest, share)) {
      const fs::path file = checkpoint / name;
      if (std::error_code ignored; !fs::exists(file, ignored) && !ignored) return fmt::format("{} is missing", name);
      const auto bytes = static_cast<uint64_t>(RegularFile(file).size());
      if (bytes != expected) return fmt::format("{} has {} bytes instead of {}", name, bytes, expected);
      if (checksums && checksum != checksum_text(file_checksum(file)))
        return fmt::format("{} has a wrong checksum", name);
    }
  } catch (const nlohmann::json::exception& error) {
    return fmt::format("{} is damaged ({})", kName, printable(error.what(), 200));
  } catch (const UnreadableFile& error) {
    // Removed, or something else has its name: damage. Anything else may be gone tomorrow.
    if (error.reason() == ENOENT || error.reason() == ENOTDIR || error.reason() == 0) return error.what();
    throw;
  } catch (const Error& error) {
    return error.what();
  }
  return std::nullopt;
}

}  // namespace sb
