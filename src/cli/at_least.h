#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdint>
#include <string>

namespace sb {

// An option's whole number has a least value. (The library's own checks name the largest double, in all its digits.)
inline CLI::Validator at_least(int64_t least) {
  const auto check = [least](const std::string& text) -> std::string {
    int64_t value = 0;
    const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    // What is no number is named when it is converted.
    if (error != std::errc() || rest != text.data() + text.size() || value >= least) return {};
    return fmt::format("{} is below {}", text, least);
  };
  return CLI::Validator(check, least == 0 ? "NONNEGATIVE" : "POSITIVE");
}

}  // namespace sb
