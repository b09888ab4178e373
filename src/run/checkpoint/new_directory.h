#pragma once

#include <filesystem>
#include <functional>

namespace sb {

// Directories that come to be at once: written under a temporary name, synced and renamed, so that what has the right
// name is complete.

// Makes the directory under its temporary name, which it returns. Of `directory` only the last name is new.
std::filesystem::path begin_directory(const std::filesystem::path& directory);
// Syncs all that is in it and gives it its name; what had that before is replaced.
void finish_directory(const std::filesystem::path& temporary, const std::filesystem::path& directory);
// Both, with `fill` in between; on failure nothing is left of it.
void write_directory_atomically(const std::filesystem::path& directory,
                                const std::function<void(const std::filesystem::path&)>& fill);

// Deletes one; a half-deleted one does not have its name any more.
void remove_directory(const std::filesystem::path& directory);
// Removes what a killed process left half-written or half-deleted.
void remove_leftovers(const std::filesystem::path& output_dir);

}  // namespace sb
