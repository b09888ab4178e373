#pragma once

#include <exception>

namespace sb {

// What the program ends with after this error; 0 is success. Wrong arguments give what a UserError gives.
int exit_code(const std::exception& error);
// The system has refused to start a thread.
bool no_more_threads(const std::exception& error);
inline constexpr int kUserErrorCode = 2;

}  // namespace sb
