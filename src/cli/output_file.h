#pragma once

#include <string>

namespace sb {

// Refuses a path that cannot be written before the work whose result it is to hold; nothing for an empty path.
void check_output(const std::string& path);
// The whole file or, when it cannot be written, the one that was there.
void write_output(const std::string& path, const std::string& text);
// Check of an option that is the prefix of several files: empty, or why it is a folder's name instead.
std::string names_files(const std::string& prefix);
// A standard stream that the caller has closed (`>&-`) leaves its number to the next file that is opened, and what is
// printed would stand in that one: a checkpoint, metrics.jsonl. To be called before any is.
void occupy_closed_descriptors();
// UserError when something that was printed did not get to where standard output goes. Printing does not look: a full
// disk shows when what was buffered is written. `reason`: error number of a write that is known to have failed, or 0.
void check_standard_output(int reason = 0);

}  // namespace sb
