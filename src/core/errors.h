#pragma once

#include <fmt/core.h>

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
      : Error(fmt::vformat(format, fmt::make_format_args(args...))) {}
};

// An invariant of the program itself is broken.
class InternalError : public Error {
 public:
  template <typename... Args>
  explicit InternalError(fmt::format_string<Args...> format, Args&&... args)
      : Error(fmt::vformat(format, fmt::make_format_args(args...))) {}
};

// Memory does not suffice; the message carries the plan that did not fit.
class OutOfMemory : public Error {
 public:
  template <typename... Args>
  explicit OutOfMemory(fmt::format_string<Args...> format, Args&&... args)
      : Error(fmt::vformat(format, fmt::make_format_args(args...))) {}
};

// What SB_CHECK and SB_USER_CHECK do when they fail, out of line: a check costs its caller a branch and a call.
struct FailedCheck {
  const char* file;
  int line;
  const char* condition;
};
[[noreturn]] void throw_internal_error(const FailedCheck& check, fmt::string_view format, fmt::format_args args);
[[noreturn]] void throw_user_error(fmt::string_view format, fmt::format_args args);

[[noreturn]] inline void internal_check_failed(const FailedCheck& check) {
  throw_internal_error(check, "", {});
}
template <typename... Args>
[[noreturn]] void internal_check_failed(const FailedCheck& check, fmt::format_string<Args...> format,
                                        const Args&... args) {
  throw_internal_error(check, format, fmt::make_format_args(args...));
}
template <typename... Args>
[[noreturn]] void user_check_failed(fmt::format_string<Args...> format, const Args&... args) {
  throw_user_error(format, fmt::make_format_args(args...));
}

}  // namespace sb

// SB_CHECK(x == y, "x {} but y {}", x, y): an invariant. Always on; keep it out of inner loops.
#define SB_CHECK(condition, ...)                                                                \
  do {                                                                                          \
    if (!(condition)) [[unlikely]]                                                              \
      ::sb::internal_check_failed({__FILE__, __LINE__, #condition} __VA_OPT__(, ) __VA_ARGS__); \
  } while (false)

// SB_USER_CHECK(n > 0, "{}: length must be positive, got {}", file, n): the user's input. The text is the whole
// message.
#define SB_USER_CHECK(condition, ...)       \
  do {                                      \
    if (!(condition)) [[unlikely]]          \
      ::sb::user_check_failed(__VA_ARGS__); \
  } while (false)
