#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace sb {

// Checks that an option's whole number is not below a least one. (The library's own checks name the largest double, in
// all its digits.)
std::function<std::string(const std::string&)> at_least(int64_t least);

}  // namespace sb
