#include "cli/number_checks.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <string>

namespace sb {
namespace {

template <typename T>
bool fits(const std::string& text) {
  T value{};
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && rest == text.data() + text.size();
}

std::string check_integer(const std::string& text) {
  return fits<int64_t>(text) ? "" : fmt::format("{} is not a 64-bit decimal integer", text);
}

std::string check_natural(const std::string& text) {
  return fits<uint64_t>(text) ? "" : fmt::format("{} is not a decimal integer between 0 and 2^64 - 1", text);
}

std::string check_real(const std::string& text) {
  return fits<double>(text) ? "" : fmt::format("{} is not a number that fits in 64 bits", text);
}

}  // namespace

void check_numbers(CLI::App& app) {
  for (CLI::Option* option : app.get_options([](const CLI::Option*) { return true; })) {
    const std::string type = option->get_type_name();
    if (type.starts_with("INT")) option->check(check_integer, "");
    if (type.starts_with("UINT")) option->check(check_natural, "");
    if (type.starts_with("FLOAT")) option->check(check_real, "");
  }
  for (CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) check_numbers(*command);
}

}  // namespace sb
