#pragma once

#include <concepts>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "core/config/config_value.h"
#include "core/words.h"

namespace sb {

// The options a configuration file may hold, each bound to the variable it fills. The one table is what parsing,
// --set, --print-config and the documentation use, so that they cannot disagree. The variables' values at the time of
// declaration are the defaults; they must outlive the table.
class OptionTable {
 public:
  static constexpr int64_t kAny = std::numeric_limits<int64_t>::max();

  // Names are dotted ("batch.loss"). A section is declared before its options; `present`, where given, makes it
  // optional: it becomes true when the file mentions the section, and an absent one is neither printed nor checked.
  void section(std::string name, std::string help, bool* present = nullptr);

  void flag(std::string name, bool* value, std::string help);
  template <std::integral T>
  void integer(std::string name, T* value, int64_t min, int64_t max, std::string help) {
    const auto largest = std::numeric_limits<T>::max();
    if (std::cmp_greater(max, largest)) max = static_cast<int64_t>(largest);
    add(
        std::move(name), "integer", integer_range(min, max), std::move(help),
        [value, min, max](const ConfigValue& given, const std::string& label) {
          *value = static_cast<T>(config_integer(given, label, min, max));
        },
        [value] { return std::to_string(*value); });
  }
  template <std::floating_point T>
  void number(std::string name, T* value, double min, double max, std::string help) {
    add(
        std::move(name), "number", number_range(min, max), std::move(help),
        [value, min, max](const ConfigValue& given, const std::string& label) {
          *value = static_cast<T>(config_number(given, label, min, max));
        },
        [value] { return number_text(*value); });
  }
  // A list of exactly these numbers.
  void numbers(std::string name, std::vector<double*> values, double min, double max, std::string help);
  void integers(std::string name, std::vector<int64_t>* values, int64_t min, int64_t max, std::string help);
  void text(std::string name, std::string* value, std::string help);
  void path(std::string name, std::filesystem::path* value, std::string help);
  template <typename E>
  void choice(std::string name, E* value, std::vector<std::pair<std::string, E>> words, std::string help) {
    std::vector<std::string> names;
    for (const auto& [word, meaning] : words) names.push_back(word);
    add_choice(
        std::move(name), std::move(names), std::move(help), [value, words](size_t i) { *value = words[i].second; },
        [value, words] {
          size_t i = 0;
          while (i < words.size() && words[i].second != *value) ++i;
          return i;
        });
  }
  template <typename E, size_t N>
  void word(std::string name, E* value, const Word<E> (&words)[N], std::string help) {
    choice(std::move(name), value, std::vector<std::pair<std::string, E>>(std::begin(words), std::end(words)),
           std::move(help));
  }
  // A word that the option had: who gives it is told why it has gone and what to do. After the option itself.
  void refuse_word(const std::string& name, std::string word, std::string cure);
  // Anything else: `read` gets the value and the option's name for its messages, `write` gives YAML on one line.
  void add(std::string name, std::string type, std::string range, std::string help,
           std::function<void(const ConfigValue&, const std::string&)> read, std::function<std::string()> write);

  // Fills the variables. UserError names the place, the key and the cure.
  void load(const std::string& yaml, const std::string& source);
  // "a.b=c", c in YAML
  void set(const std::string& assignment);

  // Whether a file or --set gave this option.
  bool given(const std::string& name) const;
  // Whether it was --set that gave it last.
  bool overridden(const std::string& name) const;
  // "run.yaml:12: batch.loss" when given, "batch.loss" otherwise: the beginning of a message about it.
  std::string label(const std::string& name) const;

  // Every option of every present section with its value; loads again to the same values.
  std::string yaml() const;
  // One table a section: option, type and range, default, meaning.
  std::string markdown() const;

 private:
  struct Section {
    std::string name, help;
    bool* present;
  };
  struct Option {
    std::string name, type, range, help, standard;
    std::function<void(const ConfigValue&, const std::string&)> read;
    std::function<std::string()> write;
    std::string where;  // empty: not given
  };

  static std::string integer_range(int64_t min, int64_t max);
  static std::string number_range(double min, double max);
  static std::string number_text(double value);
  static std::string number_text(float value);

  void add_choice(std::string name, std::vector<std::string> words, std::string help, std::function<void(size_t)> put,
                  std::function<size_t()> get);
  void assign(const std::string& name, const ConfigValue& value);
  void assign_entries(const std::string& name, const ConfigValue& value);
  void mark_present(const std::string& name);
  bool visible(const std::string& section) const;
  [[noreturn]] void fail_unknown(const std::string& name, const std::string& where) const;
  const Option* find(const std::string& name) const;
  const Section* find_section(const std::string& name) const;

  std::vector<Section> sections_;
  std::vector<Option> options_;
};

// The text of a configuration file; UserError when it cannot be read or is larger than kMaxConfigBytes.
std::string read_config_file(const std::filesystem::path& path);

// The candidate nearest to `word` by edit distance (swaps of neighbours count once), empty when none is near.
std::string nearest_word(const std::string& word, const std::vector<std::string>& candidates);

}  // namespace sb
