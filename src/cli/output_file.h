#pragma once

#include <string>

namespace sb {

// Refuses a path that cannot be written before the work whose result it is to hold; nothing for an empty path.
void check_output(const std::string& path);
void write_output(const std::string& path, const std::string& text);
// UserError when something that was printed did not get to where standard output goes. Printing does not look: a full
// disk shows when what was buffered is written. `reason`: error number of a write that is known to have failed, or 0.
void check_standard_output(int reason = 0);

}  // namespace sb
