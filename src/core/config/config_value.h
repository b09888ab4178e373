#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sb {

struct ConfigEntry;

// A parsed piece of YAML that remembers where it stood. Free of the YAML library's types, so that only one file of the
// project knows it.
struct ConfigValue {
  enum class Kind { null, scalar, list, map };
  Kind kind = Kind::null;
  std::string where;    // "run.yaml:12" or "--set"
  std::string text;     // of a scalar
  bool quoted = false;  // a scalar in quotes is text, whatever it looks like
  std::vector<ConfigValue> items;
  std::vector<ConfigEntry> entries;  // of a map, in the order of the file; keys are unique

  // "a list", "text", ... for messages
  std::string describe() const;
};

struct ConfigEntry {
  std::string key;
  ConfigValue value;
};

// The largest file that is read: a configuration is written by hand.
inline constexpr int64_t kMaxConfigBytes = 1 << 20;

// One YAML document whose top is a map (or nothing). Anchors, aliases, tags, duplicate keys, a second document, deep
// nesting and oversized input are refused with a UserError: they are mistakes or attacks here. `where` of every value
// is "source:line".
ConfigValue parse_config(const std::string& yaml, const std::string& source);
// A single value, as after "=" in --set a.b=c; `where` of everything is `source` alone.
ConfigValue parse_config_value(const std::string& yaml, const std::string& source);

// Each returns the value or throws a UserError "<where>: <name>: ..." that says what was expected.
bool config_bool(const ConfigValue& value, const std::string& name);
int64_t config_integer(const ConfigValue& value, const std::string& name, int64_t min, int64_t max);
double config_number(const ConfigValue& value, const std::string& name, double min, double max);
std::string config_text(const ConfigValue& value, const std::string& name);
const std::vector<ConfigValue>& config_list(const ConfigValue& value, const std::string& name);

// Text as a YAML scalar that reads back as the same text; quoted where it must be.
std::string yaml_text(const std::string& text);

}  // namespace sb
