#include "core/config/config.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/errors.h"
#include "core/files/regular_file.h"

namespace sb {
namespace {

constexpr const char* kCommandLine = "--set";

std::string parent(const std::string& name) {
  const size_t dot = name.rfind('.');
  return dot == std::string::npos ? "" : name.substr(0, dot);
}

std::string last_part(const std::string& name) {
  return name.substr(name.rfind('.') + 1);
}

std::string join(const std::vector<std::string>& words, const std::string& between) {
  return fmt::format("{}", fmt::join(words, between));
}

// Optimal string alignment: insert, delete, replace, swap neighbours.
size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<size_t> before(b.size() + 1), above(b.size() + 1), row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) above[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({above[j] + 1, row[j - 1] + 1, above[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) row[j] = std::min(row[j], before[j - 2] + 1);
    }
    std::swap(before, above);
    std::swap(above, row);
  }
  return above[b.size()];
}

// The first key that begins with this word (hidden, hidden_size), else the only one that holds it (epochs,
// num_train_epochs).
std::string word_with(const std::string& word, const std::vector<std::string>& keys) {
  std::vector<std::string> holding;
  for (const auto& key : keys) {
    if (key.starts_with(word + "_")) return key;
    if ((key + "_").find("_" + word + "_") != std::string::npos) holding.push_back(key);
  }
  return holding.size() == 1 ? holding.front() : "";
}

std::string markdown_cell(const std::string& text) {
  std::string out;
  for (const char c : text) out += c == '|' ? std::string("\\|") : std::string(1, c);
  return out;
}

}  // namespace

std::string nearest_word(const std::string& word, const std::vector<std::string>& candidates) {
  // A key may be as long as the file; nothing that long is a misspelling.
  constexpr size_t kLongest = 200;
  if (word.size() > kLongest) return "";
  std::string best;
  size_t best_distance = std::max<size_t>(2, word.size() / 3) + 1;
  for (const auto& candidate : candidates) {
    const size_t distance = edit_distance(word, candidate);
    // Words that share less than half of their letters are not alike, however short they are.
    if (distance < best_distance && 2 * distance < std::max(word.size(), candidate.size())) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

std::string read_config_file(const std::filesystem::path& path) {
  return read_regular_file(path, kMaxConfigBytes);
}

std::string OptionTable::integer_range(int64_t min, int64_t max) {
  if (min == max) return fmt::format("{}", min);
  if (max == kAny) return fmt::format("at least {}", min);
  return fmt::format("{} to {}", min, max);
}

std::string OptionTable::number_range(double min, double max) {
  return fmt::format("{} to {}", min, max);
}
std::string OptionTable::number_text(double value) {
  return fmt::format("{}", value);
}
std::string OptionTable::number_text(float value) {
  return fmt::format("{}", value);
}

void OptionTable::section(std::string name, std::string help, bool* present) {
  SB_CHECK(find_section(name) == nullptr, "section {} declared twice", name);
  sections_.push_back({std::move(name), std::move(help), present});
}

void OptionTable::add(std::string name, std::string type, std::string range, std::string help,
                      std::function<void(const ConfigValue&, const std::string&)> read,
                      std::function<std::string()> write) {
  SB_CHECK(find(name) == nullptr, "option {} declared twice", name);
  SB_CHECK(parent(name).empty() || find_section(parent(name)) != nullptr, "option {} without its section", name);
  std::string standard = write();
  options_.push_back({std::move(name), std::move(type), std::move(range), std::move(help), std::move(standard),
                      std::move(read), std::move(write), ""});
}

void OptionTable::flag(std::string name, bool* value, std::string help) {
  add(
      std::move(name), "true or false", "", std::move(help),
      [value](const ConfigValue& given, const std::string& label) { *value = config_bool(given, label); },
      [value] { return *value ? "true" : "false"; });
}

void OptionTable::numbers(std::string name, std::vector<double*> values, double min, double max, std::string help) {
  std::string type = fmt::format("list of {} numbers", values.size());
  add(
      std::move(name), std::move(type), number_range(min, max), std::move(help),
      [values, min, max](const ConfigValue& given, const std::string& label) {
        const auto& items = config_list(given, label);
        SB_USER_CHECK(items.size() == values.size(), "{}: {}: expected {} numbers, found {}", given.where, label,
                      values.size(), items.size());
        for (size_t i = 0; i < items.size(); ++i)
          *values[i] = config_number(items[i], fmt::format("{}[{}]", label, i), min, max);
      },
      [values] {
        std::vector<std::string> texts;
        for (const double* value : values) texts.push_back(number_text(*value));
        return fmt::format("[{}]", join(texts, ", "));
      });
}

void OptionTable::integers(std::string name, std::vector<int64_t>* values, int64_t min, int64_t max, std::string help) {
  add(
      std::move(name), "list of integers", integer_range(min, max), std::move(help),
      [values, min, max](const ConfigValue& given, const std::string& label) {
        std::vector<int64_t> read;
        for (const auto& item : config_list(given, label))
          read.push_back(config_integer(item, fmt::format("{}[{}]", label, read.size()), min, max));
        *values = std::move(read);
      },
      [values] { return fmt::format("[{}]", fmt::join(*values, ", ")); });
}

void OptionTable::text(std::string name, std::string* value, std::string help) {
  add(
      std::move(name), "string", "", std::move(help),
      [value](const ConfigValue& given, const std::string& label) { *value = config_text(given, label); },
      [value] { return yaml_text(*value); });
}

void OptionTable::path(std::string name, std::filesystem::path* value, std::string help) {
  add(
      std::move(name), "path", "", std::move(help),
      [value](const ConfigValue& given, const std::string& label) { *value = config_text(given, label); },
      [value] { return yaml_text(value->string()); });
}

void OptionTable::add_choice(std::string name, std::vector<std::string> words, std::string help,
                             std::function<void(size_t)> put, std::function<size_t()> get) {
  add(
      name, join(words, ", "), "", std::move(help),
      [words, put](const ConfigValue& given, const std::string& label) {
        const std::string word = config_text(given, label);
        const auto at = std::find(words.begin(), words.end(), word);
        SB_USER_CHECK(at != words.end(), "{}: {}: unknown value {}; choose {}", given.where, label, given.describe(),
                      words.size() == 1 ? words[0] : "one of " + join(words, ", "));
        put(static_cast<size_t>(at - words.begin()));
      },
      [name, words, get] {
        const size_t i = get();
        SB_CHECK(i < words.size(), "{} holds a value that has no word", name);
        return words[i];
      });
}

void OptionTable::refuse_word(const std::string& name, std::string word, std::string cure) {
  const auto option = std::find_if(options_.begin(), options_.end(), [&](const Option& o) { return o.name == name; });
  SB_CHECK(option != options_.end(), "there is no option {}", name);
  option->read = [read = option->read, word = std::move(word), cure = std::move(cure)](const ConfigValue& given,
                                                                                       const std::string& label) {
    SB_USER_CHECK(given.kind != ConfigValue::Kind::scalar || given.text != word, "{}: {}: {} {}", given.where, label,
                  word, cure);
    read(given, label);
  };
}

void OptionTable::load(const std::string& yaml, const std::string& source) {
  for (Option& option : options_) option.where.clear();
  assign_entries("", parse_config(yaml, source));
}

void OptionTable::set(const std::string& assignment) {
  const size_t equals = assignment.find('=');
  SB_USER_CHECK(equals != std::string::npos && equals > 0,
                "--set {}: expected section.option=value, for example train.max_steps=100", assignment);
  assign(assignment.substr(0, equals), parse_config_value(assignment.substr(equals + 1), kCommandLine));
}

void OptionTable::assign_entries(const std::string& name, const ConfigValue& value) {
  for (const auto& [key, entry] : value.entries) assign(name.empty() ? key : name + "." + key, entry);
}

void OptionTable::assign(const std::string& name, const ConfigValue& value) {
  for (auto& option : options_) {
    if (option.name != name) continue;
    SB_USER_CHECK(value.kind != ConfigValue::Kind::null, "{}: {}: has no value; {}", value.where, name,
                  value.where == kCommandLine
                      ? fmt::format("give one; the default is --set '{}={}'", name, option.standard)
                      : std::string("give one or remove the key"));
    // "train: {seed: 1}" and "train.seed: 2": two keys to YAML, one to us. --set may come after either.
    SB_USER_CHECK(option.where.empty() || value.where == kCommandLine || option.where == kCommandLine,
                  "{}: key '{}' appears a second time (first at {})", value.where, name, option.where);
    option.read(value, name);
    option.where = value.where;
    mark_present(parent(name));
    return;
  }
  const Section* section = find_section(name);
  if (section == nullptr) fail_unknown(name, value.where);
  if (value.kind == ConfigValue::Kind::null) {
    // "init:" with everything below it commented out, or --set data.synthetic=null.
    if (section->present != nullptr) *section->present = false;
    return;
  }
  SB_USER_CHECK(value.kind == ConfigValue::Kind::map, "{}: {}: is a section; expected options below it, found {}",
                value.where, name, value.describe());
  mark_present(name);
  assign_entries(name, value);
}

void OptionTable::mark_present(const std::string& name) {
  for (std::string section = name; !section.empty(); section = parent(section)) {
    const Section* found = find_section(section);
    if (found != nullptr && found->present != nullptr) *found->present = true;
  }
}

void OptionTable::fail_unknown(const std::string& name, const std::string& where) const {
  const std::string shown = name.size() <= 80 ? name : name.substr(0, 80) + "...";
  SB_USER_CHECK(name.find(':') == std::string::npos, "{}: unknown key '{}'; YAML needs a space after the ':' of a key",
                where, shown);
  std::vector<std::string> names, beside;
  const std::string section = parent(name);
  const bool in_section = !section.empty() && find_section(section) != nullptr;
  for (const auto& known : sections_) names.push_back(known.name);
  for (const auto& option : options_) names.push_back(option.name);
  for (const auto& known : names)
    if (in_section && parent(known) == section) beside.push_back(last_part(known));
  // The right word in the wrong section is the commonest slip; then a misspelling.
  std::string nearest;
  for (const auto& known : names)
    if (nearest.empty() && last_part(known) == last_part(name)) nearest = known;
  // The section's own name would make any two short words of it alike.
  if (nearest.empty() && in_section) {
    std::string part = nearest_word(last_part(name), beside);
    if (part.empty()) part = word_with(last_part(name), beside);
    if (!part.empty()) nearest = section + "." + part;
  } else if (nearest.empty()) {
    nearest = nearest_word(name, names);
  }
  // In a known section a short word is rather one that the section lacks than another section's, misspelt.
  constexpr size_t kTelling = 8;
  if (nearest.empty() && (!in_section || last_part(name).size() >= kTelling)) {
    std::vector<std::string> parts;
    for (const auto& known : names) parts.push_back(last_part(known));
    const std::string part = nearest_word(last_part(name), parts);
    for (const auto& known : names)
      if (nearest.empty() && !part.empty() && last_part(known) == part) nearest = known;
  }
  if (!nearest.empty()) throw UserError("{}: unknown key '{}'; did you mean '{}'?", where, shown, nearest);
  if (in_section) throw UserError("{}: unknown key '{}'; '{}' has {}", where, shown, section, fmt::join(beside, ", "));
  throw UserError("{}: unknown key '{}'; docs/configuration.md lists the known ones", where, shown);
}

const OptionTable::Option* OptionTable::find(const std::string& name) const {
  const auto at = std::find_if(options_.begin(), options_.end(), [&](const Option& o) { return o.name == name; });
  return at == options_.end() ? nullptr : &*at;
}

const OptionTable::Section* OptionTable::find_section(const std::string& name) const {
  const auto at = std::find_if(sections_.begin(), sections_.end(), [&](const Section& s) { return s.name == name; });
  return at == sections_.end() ? nullptr : &*at;
}

bool OptionTable::given(const std::string& name) const {
  const Option* option = find(name);
  SB_CHECK(option != nullptr, "no option {}", name);
  return !option->where.empty();
}

bool OptionTable::overridden(const std::string& name) const {
  const Option* option = find(name);
  SB_CHECK(option != nullptr, "no option {}", name);
  return option->where == kCommandLine;
}

std::string OptionTable::label(const std::string& name) const {
  const Option* option = find(name);
  if (option == nullptr || option->where.empty()) return name;
  return option->where + ": " + name;
}

bool OptionTable::visible(const std::string& name) const {
  for (std::string section = name; !section.empty(); section = parent(section)) {
    const Section* found = find_section(section);
    if (found != nullptr && found->present != nullptr && !*found->present) return false;
  }
  return true;
}

std::string OptionTable::yaml() const {
  std::string out;
  const auto indent = [](const std::string& name) {
    return std::string(2 * static_cast<size_t>(std::count(name.begin(), name.end(), '.')), ' ');
  };
  // An option's lines follow those of its section; sub-sections come after the section's own options.
  const std::function<void(const std::string&)> print = [&](const std::string& section) {
    for (const auto& option : options_)
      if (parent(option.name) == section)
        out += fmt::format("{}{}: {}\n", indent(option.name), last_part(option.name), option.write());
    for (const auto& inner : sections_) {
      if (inner.name.empty() || parent(inner.name) != section || !visible(inner.name)) continue;
      out += fmt::format("{}{}:\n", indent(inner.name), last_part(inner.name));
      print(inner.name);
    }
  };
  print("");
  return out;
}

std::string OptionTable::markdown() const {
  std::string out;
  const auto print = [&](const std::string& section) {
    out += "| option | value | default | meaning |\n| --- | --- | --- | --- |\n";
    for (const auto& option : options_) {
      if (parent(option.name) != section) continue;
      const std::string value = option.range.empty() ? option.type : option.type + ", " + option.range;
      const std::string standard = option.standard == "\"\"" ? "none" : fmt::format("`{}`", option.standard);
      out += fmt::format("| `{}` | {} | {} | {} |\n", option.name, markdown_cell(value), standard,
                         markdown_cell(option.help));
    }
  };
  print("");
  for (const auto& section : sections_) {
    out += fmt::format("\n## {}\n\n{}\n", section.name, section.help);
    const bool any = std::any_of(options_.begin(), options_.end(),
                                 [&](const Option& option) { return parent(option.name) == section.name; });
    if (!any) continue;
    out += "\n";
    print(section.name);
  }
  return out;
}

}  // namespace sb
