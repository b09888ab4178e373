#include "run/common_directory.h"

#include <fmt/format.h>

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "comm/host_name.h"
#include "core/errors.h"
#include "core/files/durable_file.h"
#include "core/files/regular_file.h"
#include "parallel/grid.h"

namespace sb {
namespace {

namespace fs = std::filesystem;

// What keeps this rank from sharing the directory with the one that wrote `word` to `probe`; empty: nothing.
std::string obstacle(const fs::path& directory, const fs::path& probe, const std::string& word) {
  try {
    if (read_regular_file(directory / probe) != word) return "another file is there";
  } catch (const UserError& error) {
    return error.what();
  }
  if (::access(directory.c_str(), W_OK) != 0)
    return fmt::format("{}: cannot be written to: {}", directory.string(), std::strerror(errno));
  return "";
}

}  // namespace

void check_common_directory(Communicator& world, const fs::path& directory) {
  if (world.size() == 1) return;
  std::string word;
  const auto name_of = [](const std::string& text) { return fs::path(".saving-probe-" + text); };  // a leftover goes
  if (world.rank() == 0) {
    std::random_device random;
    word = fmt::format("{:08x}{:08x}", random(), random());
    std::error_code failed;
    fs::create_directories(directory, failed);
    SB_USER_CHECK(!failed, "train.output_dir {}: cannot be created: {}", directory.string(), failed.message());
    write_new_file(directory / name_of(word), word);
  }
  word = broadcast_text(world, word, 0);
  const std::string own = obstacle(directory, name_of(word), word);
  const std::vector<std::string> reasons = gather_texts(world, own.empty() ? "" : host_name() + "\n" + own, 0);
  if (world.rank() != 0) return;
  std::error_code ignored;
  fs::remove(directory / name_of(word), ignored);
  for (size_t rank = 0; rank < reasons.size(); ++rank) {
    if (reasons[rank].empty()) continue;
    const size_t end = reasons[rank].find('\n');
    throw UserError(
        "train.output_dir {}: rank {} on {} does not see what rank 0 on {} writes there ({}). Every rank writes its "
        "part of each checkpoint: name a directory on a file system that all hosts share, by its full path",
        directory.string(), rank, reasons[rank].substr(0, end), host_name(), reasons[rank].substr(end + 1));
  }
}

}  // namespace sb
