#pragma once

#include <string>

namespace sb {

// Of the machine that this process runs on.
std::string host_name();

}  // namespace sb
