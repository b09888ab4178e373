#include "run/checkpoint/new_directory.h"

#include <fcntl.h>

#include <cstdio>
#include <string>
#include <vector>

#include "core/errors.h"
#include "core/files/durable_file.h"
#include "core/log.h"

namespace sb {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kSaving = ".saving-";
constexpr std::string_view kRemoving = ".removing-";

void warn_of_leftover(const fs::path& path, const std::error_code& reason) {
  log::warning("{} is left over from an earlier save and cannot be removed: {}", path.string(), reason.message());
}

// A name of this kind beside the directory that nothing has: what an earlier process left goes, unless it belongs to
// somebody else.
fs::path free_name(const fs::path& directory, std::string_view kind) {
  const fs::path name = directory.parent_path() / (std::string(kind) + directory.filename().string());
  fs::path candidate = name;
  for (int number = 2;; ++number) {
    std::error_code failed;
    fs::remove_all(candidate, failed);
    if (!failed || number > 100) return candidate;  // whoever uses it says what is wrong
    candidate = name.string() + fmt::format(".{}", number);
  }
}

// Gives a new directory its name. One that has it stays until the new one is there, and is gone afterwards.
void put_in_place(const fs::path& fresh, const fs::path& directory) {
  if (!fs::exists(directory)) return fs::rename(fresh, directory);
  fs::path old = fresh;
  if (::renameat2(AT_FDCWD, fresh.c_str(), AT_FDCWD, directory.c_str(), RENAME_EXCHANGE) != 0) {
    // A file system that cannot exchange two names.
    old = free_name(directory, kRemoving);
    fs::rename(directory, old);
    try {
      fs::rename(fresh, directory);
    } catch (const fs::filesystem_error&) {
      fs::rename(old, directory);
      throw;
    }
  }
  std::error_code failed;
  fs::remove_all(old, failed);
  if (failed) warn_of_leftover(old, failed);
}

}  // namespace

fs::path begin_directory(const fs::path& directory) {
  const fs::path temporary = free_name(directory, kSaving);
  fs::create_directory(temporary);
  return temporary;
}

void finish_directory(const fs::path& temporary, const fs::path& directory) {
  for (const auto& entry : fs::recursive_directory_iterator(temporary))
    entry.is_directory() ? sync_directory(entry.path()) : sync_file(entry.path());
  sync_directory(temporary);
  put_in_place(temporary, directory);
  sync_directory(directory.parent_path());
}

void write_directory_atomically(const fs::path& directory, const std::function<void(const fs::path&)>& fill) {
  fs::path temporary;
  std::error_code ignored;
  try {
    temporary = begin_directory(directory);
    fill(temporary);
    finish_directory(temporary, directory);
  } catch (const fs::filesystem_error& error) {
    fs::remove_all(temporary, ignored);
    throw UserError("{}", error.what());
  } catch (...) {
    fs::remove_all(temporary, ignored);
    throw;
  }
}

void remove_directory(const fs::path& directory) {
  const fs::path doomed = free_name(directory, kRemoving);
  fs::rename(directory, doomed);
  fs::remove_all(doomed);
}

void remove_leftovers(const fs::path& output_dir) {
  std::vector<fs::path> leftovers;
  for (const auto& entry : fs::directory_iterator(output_dir)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(kSaving) || name.starts_with(kRemoving)) leftovers.push_back(entry.path());
  }
  for (const fs::path& path : leftovers) {
    std::error_code failed;
    fs::remove_all(path, failed);
    if (failed) warn_of_leftover(path, failed);
  }
}

}  // namespace sb
