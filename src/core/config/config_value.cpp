#include "core/config/config_value.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <sstream>

#include "core/errors.h"

namespace sb {
namespace {

constexpr size_t kMaxDepth = 16;
constexpr size_t kMaxKeys = 1000;  // of one section; keeps the search for duplicates short

// Builds ConfigValues from the parser's events. Events rather than the library's node tree: aliases are seen before
// they are expanded, duplicate keys before one of them is lost, and every value's line is at hand.
class Builder : public YAML::EventHandler {
 public:
  Builder(std::string source, bool lines) : source_(std::move(source)), lines_(lines) {}

  ConfigValue take() { return std::move(root_); }

  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    refuse_anchor(mark, anchor);
    add(value_at(mark, ConfigValue::Kind::null));
  }

  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override {
    throw UserError("{}: YAML aliases (*name) are not supported here; write the value out", where(mark));
  }

  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& text) override {
    refuse_anchor(mark, anchor);
    refuse_tag(mark, tag);
    ConfigValue value = value_at(mark, ConfigValue::Kind::scalar);
    value.text = text;
    value.quoted = tag == "!";
    if (!value.quoted && (text.empty() || text == "~" || text == "null" || text == "Null" || text == "NULL"))
      value.kind = ConfigValue::Kind::null;
    add(std::move(value));
  }

  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    open(mark, tag, anchor, ConfigValue::Kind::list);
  }
  void OnSequenceEnd() override { close(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    open(mark, tag, anchor, ConfigValue::Kind::map);
  }
  void OnMapEnd() override { close(); }

 private:
  struct Open {
    ConfigValue value;
    bool key_pending = false;  // the last entry has its key and waits for its value
  };

  std::string where(const YAML::Mark& mark) const {
    return lines_ ? fmt::format("{}:{}", source_, mark.line + 1) : source_;
  }

  ConfigValue value_at(const YAML::Mark& mark, ConfigValue::Kind kind) const {
    ConfigValue value;
    value.kind = kind;
    value.where = where(mark);
    return value;
  }

  void refuse_anchor(const YAML::Mark& mark, YAML::anchor_t anchor) const {
    SB_USER_CHECK(anchor == 0, "{}: YAML anchors (&name) are not supported here; write the value out", where(mark));
  }

  // "?" is no tag, "!" what a quoted scalar has.
  void refuse_tag(const YAML::Mark& mark, const std::string& tag) const {
    SB_USER_CHECK(tag.empty() || tag == "?" || tag == "!", "{}: YAML tags ({}) are not supported here", where(mark),
                  tag);
  }

  void open(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor, ConfigValue::Kind kind) {
    refuse_anchor(mark, anchor);
    refuse_tag(mark, tag);
    refuse_as_key(where(mark));
    SB_USER_CHECK(open_.size() < kMaxDepth, "{}: nested deeper than {} levels", where(mark), kMaxDepth);
    open_.push_back({value_at(mark, kind), false});
  }

  void close() {
    ConfigValue value = std::move(open_.back().value);
    open_.pop_back();
    add(std::move(value));
  }

  void refuse_as_key(const std::string& place) const {
    if (open_.empty()) return;
    const Open& top = open_.back();
    SB_USER_CHECK(top.value.kind != ConfigValue::Kind::map || top.key_pending, "{}: a key must be a plain word", place);
  }

  void add(ConfigValue value) {
    if (open_.empty()) {
      root_ = std::move(value);
      return;
    }
    Open& top = open_.back();
    if (top.value.kind == ConfigValue::Kind::list) {
      top.value.items.push_back(std::move(value));
      return;
    }
    auto& entries = top.value.entries;
    if (top.key_pending) {
      // The line of a value is the line of its key when the value is absent or starts a block below it.
      if (value.kind != ConfigValue::Kind::scalar) value.where = entries.back().value.where;
      entries.back().value = std::move(value);
      top.key_pending = false;
      return;
    }
    SB_USER_CHECK(value.kind == ConfigValue::Kind::scalar, "{}: a key must be a plain word", value.where);
    const auto same =
        std::find_if(entries.begin(), entries.end(), [&](const ConfigEntry& entry) { return entry.key == value.text; });
    SB_USER_CHECK(same == entries.end(), "{}: key '{}' appears a second time (first at {})", value.where, value.text,
                  same->value.where);
    SB_USER_CHECK(entries.size() < kMaxKeys, "{}: more than {} keys in one section", value.where, kMaxKeys);
    std::string key = value.text;
    entries.push_back({std::move(key), std::move(value)});
    top.key_pending = true;
  }

  std::string source_;
  bool lines_;
  std::vector<Open> open_;
  ConfigValue root_;
};

// The parser says of a tab only that what follows it is misplaced.
bool indented_by_tab(const std::string& yaml, int line) {
  std::istringstream stream(yaml);
  std::string text;
  for (int i = 0; i <= line; ++i)
    if (!std::getline(stream, text)) return false;
  return text.substr(0, text.find_first_not_of(" \t")).find('\t') != std::string::npos;
}

ConfigValue parse(const std::string& yaml, const std::string& source, bool lines) {
  SB_USER_CHECK(static_cast<int64_t>(yaml.size()) <= kMaxConfigBytes,
                "{}: {} bytes are too many for a configuration; is this the right file?", source, yaml.size());
  const size_t zero = yaml.find('\0');
  SB_USER_CHECK(zero == std::string::npos, "{}: contains a zero byte; a configuration is a text file", source);
  std::istringstream stream(yaml);
  Builder builder(source, lines);
  try {
    YAML::Parser parser(stream);
    if (parser.HandleNextDocument(builder)) {
      ConfigValue first = builder.take();
      Builder second(source, lines);
      SB_USER_CHECK(!parser.HandleNextDocument(second), "{}: contains more than one YAML document; keep one", source);
      return first;
    }
  } catch (const YAML::Exception& error) {
    if (lines && !error.mark.is_null())
      throw UserError("{}:{}: {}{}", source, error.mark.line + 1, error.msg,
                      indented_by_tab(yaml, error.mark.line) ? " (indent with spaces: YAML does not allow tabs)" : "");
    throw UserError("{}: {}", source, error.msg);
  }
  ConfigValue nothing;
  nothing.where = source;
  return nothing;
}

}  // namespace

std::string ConfigValue::describe() const {
  switch (kind) {
    case Kind::null:
      return "nothing";
    case Kind::list:
      return "a list";
    case Kind::map:
      return "a section";
    case Kind::scalar:
      break;
  }
  constexpr size_t kShown = 60;
  const std::string shown = text.size() <= kShown ? text : text.substr(0, kShown) + "...";
  return quoted ? fmt::format("the text \"{}\"", shown) : fmt::format("'{}'", shown);
}

ConfigValue parse_config(const std::string& yaml, const std::string& source) {
  ConfigValue value = parse(yaml, source, true);
  SB_USER_CHECK(value.kind == ConfigValue::Kind::map || value.kind == ConfigValue::Kind::null,
                "{}: expected sections like 'train:' at the top, found {}", value.where, value.describe());
  value.kind = ConfigValue::Kind::map;
  return value;
}

ConfigValue parse_config_value(const std::string& yaml, const std::string& source) {
  // As the value of a key: at the top of a document an unfinished bracket would pass for the beginning of a key.
  ConfigValue map = parse("value: " + yaml, source, false);
  SB_USER_CHECK(map.kind == ConfigValue::Kind::map && map.entries.size() == 1, "{}: '{}' is not a single value", source,
                yaml);
  return std::move(map.entries.front().value);
}

bool config_bool(const ConfigValue& value, const std::string& name) {
  if (value.kind == ConfigValue::Kind::scalar && !value.quoted) {
    std::string word = value.text;
    std::transform(word.begin(), word.end(), word.begin(), [](unsigned char c) { return std::tolower(c); });
    if (word == "true" || word == "on" || word == "yes") return true;
    if (word == "false" || word == "off" || word == "no") return false;
  }
  throw UserError("{}: {}: expected true or false, found {}", value.where, name, value.describe());
}

int64_t config_integer(const ConfigValue& value, const std::string& name, int64_t min, int64_t max) {
  int64_t number = 0;
  bool valid = value.kind == ConfigValue::Kind::scalar && !value.quoted;
  if (valid) {
    const char* begin = value.text.data();
    const char* end = begin + value.text.size();
    const auto [stop, code] = std::from_chars(begin, end, number);
    valid = code != std::errc::invalid_argument && stop == end;
    SB_USER_CHECK(!valid || code != std::errc::result_out_of_range, "{}: {}: {} does not fit in 64 bits", value.where,
                  name, value.describe());
  }
  SB_USER_CHECK(valid, "{}: {}: expected an integer, found {}", value.where, name, value.describe());
  SB_USER_CHECK(number >= min, "{}: {}: must be at least {}, found {}", value.where, name, min, number);
  SB_USER_CHECK(number <= max, "{}: {}: must be at most {}, found {}", value.where, name, max, number);
  return number;
}

double config_number(const ConfigValue& value, const std::string& name, double min, double max) {
  double number = 0.0;
  bool valid = value.kind == ConfigValue::Kind::scalar && !value.quoted;
  if (valid) {
    const char* begin = value.text.data();
    const char* end = begin + value.text.size();
    const auto [stop, code] = std::from_chars(begin, end, number);
    valid = code == std::errc() && stop == end && std::isfinite(number);
  }
  SB_USER_CHECK(valid, "{}: {}: expected a number, found {}", value.where, name, value.describe());
  SB_USER_CHECK(number >= min, "{}: {}: must be at least {}, found {}", value.where, name, min, number);
  SB_USER_CHECK(number <= max, "{}: {}: must be at most {}, found {}", value.where, name, max, number);
  return number;
}

std::string config_text(const ConfigValue& value, const std::string& name) {
  SB_USER_CHECK(value.kind == ConfigValue::Kind::scalar, "{}: {}: expected text, found {}", value.where, name,
                value.describe());
  return value.text;
}

const std::vector<ConfigValue>& config_list(const ConfigValue& value, const std::string& name) {
  SB_USER_CHECK(value.kind == ConfigValue::Kind::list, "{}: {}: expected a list like [a, b], found {}", value.where,
                name, value.describe());
  return value.items;
}

std::string yaml_text(const std::string& text) {
  const bool plain =
      !text.empty() && text != "null" && text != "Null" && text != "NULL" &&
      (std::isalpha(static_cast<unsigned char>(text.front())) || text.front() == '/' || text.front() == '_' ||
       text.front() == '.') &&
      std::all_of(text.begin(), text.end(), [](unsigned char c) {
        return std::isalnum(c) || std::string_view("/_.-+=").find(static_cast<char>(c)) != std::string_view::npos;
      });
  if (plain && text.find("...") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const unsigned char c : text) {
    if (c == '"' || c == '\\')
      quoted += {'\\', static_cast<char>(c)};
    else if (c < 0x20 || c == 0x7f)
      quoted += fmt::format("\\x{:02x}", c);
    else
      quoted += static_cast<char>(c);
  }
  return quoted + "\"";
}

}  // namespace sb
