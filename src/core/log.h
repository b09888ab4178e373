#pragma once

#include <fmt/core.h>

#include <string>
#include <string_view>

// Log lines go to standard error (standard output is for results). Kept free of the logging library's headers.
namespace sb::log {

enum class Level { debug, info, warning, error, off };

void set_level(Level level);
// Prefixed to every line ("rank 3"); empty for a single process.
void set_prefix(std::string prefix);
void write(Level level, std::string_view message);

template <typename... Args>
void debug(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::debug, fmt::vformat(format, fmt::make_format_args(args...)));
}
template <typename... Args>
void info(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::info, fmt::vformat(format, fmt::make_format_args(args...)));
}
template <typename... Args>
void warning(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::warning, fmt::vformat(format, fmt::make_format_args(args...)));
}
template <typename... Args>
void error(fmt::format_string<Args...> format, Args&&... args) {
  write(Level::error, fmt::vformat(format, fmt::make_format_args(args...)));
}

}  // namespace sb::log
