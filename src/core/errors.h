#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace sb {

// What every error of this program derives from; `main` prints what() and picks the exit code by the type.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The input is at fault: a file, a configuration key, an argument. The message names it and the cure.
class UserError : public Error {
 public:
  template <typename... Args>
  explicit UserError(fmt::format_string<Args...> format, Args&&... args)
      : Error(fmt::format(format, std::forward<Args>(args)...)) {}
};

// An invariant of the program itself is broken.
class InternalError : public Error {
 public:
  template <typename... Args>
  explicit InternalError(fmt::format_string<Args...> format, Args&&... args)
      : Error(fmt::format(format, std::forward<Args>(args)...)) {}
};

// Memory does not suffice; the message carries the plan that did not fit.
class OutOfMemory : public Error {
 public:
  template <typename... Args>
  explicit OutOfMemory(fmt::format_string<Args...> format, Args&&... args)
      : Error(fmt::format(format, std::forward<Args>(args)...)) {}
};

[[noreturn]] void throw_check_failed(const char* file, int line, const char* condition, const std::string& message);

}  // namespace sb

// SB_CHECK(x == y, "x {} but y {}", x, y): an invariant. Always on; keep it out of inner loops.
#define SB_CHECK(condition, ...)                                                             \
  do {                                                                                       \
    if (!(condition)) [[unlikely]]                                                           \
      ::sb::throw_check_failed(__FILE__, __LINE__, #condition, fmt::format("" __VA_ARGS__)); \
  } while (false)

// SB_USER_CHECK(n > 0, "{}: length must be positive, got {}", file, n): the user's input. The text is the whole
// message.
#define SB_USER_CHECK(condition, ...)     \
  do {                                    \
    if (!(condition)) [[unlikely]]        \
      throw ::sb::UserError(__VA_ARGS__); \
  } while (false)
