#include "cli/at_least.h"

#include <fmt/format.h>

#include <charconv>

namespace sb {

std::function<std::string(const std::string&)> at_least(int64_t least) {
  return [least](const std::string& text) -> std::string {
    int64_t value = 0;
    const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    // The conversion that follows also reads hexadecimal digits and a plus sign, which would pass unchecked.
    if (error != std::errc() || rest != text.data() + text.size())
      return fmt::format("{} is not a 64-bit decimal integer", text);
    return value >= least ? std::string() : fmt::format("{} is below {}", text, least);
  };
}

}  // namespace sb
