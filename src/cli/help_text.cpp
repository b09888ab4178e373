#include "cli/help_text.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <set>
#include <sstream>
#include <vector>

namespace sb {
namespace {

constexpr size_t kNameColumns = 30, kColumns = 120;

// The library joins a value's type and its checks: "TEXT:{cpu,cuda}", "INT:INT in [1 - 4096]", "INT:at least 1".
struct ValueForm {
  std::string label, limits;
};
ValueForm value_form(const CLI::Option& option) {
  if (option.get_type_size() == 0) return {};
  if (!option.get_option_text().empty()) return {option.get_option_text(), ""};
  const std::string type = option.get_type_name();
  const size_t colon = std::min(type.find(':'), type.size());
  const std::string check = type.substr(std::min(colon + 1, type.size()));
  if (check.starts_with('{') || check == "FILE" || check == "DIR" || check == "PREFIX") return {check, ""};
  const std::string label = type.starts_with("UINT") ? "INT" : type.substr(0, colon);
  const size_t bracket = check.find(" in [");
  if (bracket == std::string::npos) return {label, check};
  std::string range = check.substr(bracket + 5, check.size() - bracket - 6);
  if (const size_t dash = range.find(" - "); dash != std::string::npos) range.replace(dash, 3, " to ");
  return {label, range};
}

std::string names_of(const std::set<CLI::Option*>& options) {
  std::vector<std::string> names;
  for (const CLI::Option* option : options) names.push_back(option->get_name());
  return fmt::format("{}", fmt::join(names, ", "));
}

// Beyond ASCII a character has several bytes, all but the first of which are 10xxxxxx.
size_t shown_columns(const std::string& text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

std::string wrapped(const std::string& text, size_t columns) {
  std::istringstream words(text);
  std::string lines, line;
  for (std::string word; words >> word;) {
    if (!line.empty() && shown_columns(line) + 1 + shown_columns(word) > columns) {
      lines += line + "\n";
      line.clear();
    }
    line += (line.empty() ? "" : " ") + word;
  }
  return lines + line;
}

class HelpFormat : public CLI::Formatter {
 public:
  std::string make_option_name(const CLI::Option* option, bool is_positional) const override {
    if (is_positional) return option->get_name(true, false);
    std::vector<std::string> names;
    for (const std::string& name : option->get_snames()) names.push_back("-" + name);
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    return fmt::format("{}", fmt::join(names, ", "));
  }
  std::string make_option_opts(const CLI::Option* option) const override {
    const std::string label = value_label(*option);
    return label.empty() || option->get_positional() ? "" : " " + label;
  }
  std::string make_option_desc(const CLI::Option* option) const override {
    return wrapped(option_help(*option), kColumns - kNameColumns);
  }
};

}  // namespace

std::string value_label(const CLI::Option& option) {
  std::string label = value_form(option).label;
  if (label.empty()) return label;
  if (option.get_expected_max() == CLI::detail::expected_max_vector_size) return label + " ...";
  return option.get_expected_min() > 1 ? fmt::format("{} x {}", label, option.get_expected_min()) : label;
}

std::string option_help(const CLI::Option& option) {
  std::vector<std::string> notes;
  if (option.get_required()) notes.emplace_back("required");
  if (const std::string limits = value_form(option).limits; !limits.empty()) notes.push_back(limits);
  if (std::string standard = option.get_default_str(); !standard.empty() && standard != "\"\"") {
    if (standard.starts_with('[')) standard = standard.substr(1, standard.size() - 2);
    notes.push_back("default: " + standard);
  }
  if (!option.get_needs().empty()) notes.push_back("needs " + names_of(option.get_needs()));
  if (!option.get_excludes().empty()) notes.push_back("not with " + names_of(option.get_excludes()));
  std::string text = option.get_description();
  if (notes.empty()) return text;
  // A default that only words can say is in the description already: one pair of parentheses for all.
  const size_t said = text.rfind(" (default");
  const bool open = said != std::string::npos && text.find(')', said) == text.size() - 1;
  if (open) text.pop_back();
  return fmt::format("{}{}{})", text, open ? "; " : " (", fmt::join(notes, "; "));
}

void set_help_format(CLI::App& app) {
  const auto format = std::make_shared<HelpFormat>();
  format->column_width(kNameColumns);
  app.formatter(format);
  app.set_help_flag("-h,--help", "print this help and exit");
}

}  // namespace sb
