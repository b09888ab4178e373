#include "cli/at_least.h"

#include <fmt/format.h>

#include <charconv>

namespace sb {

std::function<std::string(const std::string&)> at_least(int64_t least) {
  return [least](const std::string& text) -> std::string {
    int64_t value = 0;
    const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    // What is no number is named when it is converted.
    if (error != std::errc() || rest != text.data() + text.size() || value >= least) return {};
    return fmt::format("{} is below {}", text, least);
  };
}

}  // namespace sb
