#pragma once

#include <string>

namespace sb {

// Refuses a path that cannot be written before the work whose result it is to hold; nothing for an empty path.
void check_output(const std::string& path);
void write_output(const std::string& path, const std::string& text);

}  // namespace sb
