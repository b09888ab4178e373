#include "data/text/jsonl.h"

#include <nlohmann/json.hpp>

#include "core/errors.h"
#include "core/utf8.h"

namespace sb {
namespace {

using nlohmann::json;

std::string string_of(json& object, const char* key, const std::string& where) {
  const auto found = object.find(key);
  SB_USER_CHECK(found != object.end(), "{}\"{}\" is missing", where, key);
  SB_USER_CHECK(found->is_string(), "{}\"{}\" must be a string, it is {}", where, key, found->type_name());
  return std::move(found->get_ref<std::string&>());
}

// " among "a", "b", …", to show what the file calls them.
std::string keys_of(const json& object) {
  std::string keys;
  for (const auto& [key, value] : object.items()) {
    if (keys.size() > 150) return keys + ", …";
    keys += fmt::format("{}\"{}\"", keys.empty() ? " among " : ", ", printable(key, 30));
  }
  return keys;
}

}  // namespace

JsonlRecord parse_jsonl_record(std::string_view line, const std::string& text_key) {
  if (const std::optional<size_t> bad = find_invalid_utf8(line))
    throw UserError("invalid UTF-8 at byte {} (0x{:02x})", *bad, static_cast<unsigned char>(line[*bad]));
  json object;
  try {
    object = json::parse(line);
  } catch (const json::parse_error& error) {
    throw UserError("not JSON: at byte {} of the line, near \"{}\"", error.byte,
                    printable(line.substr(std::min(line.size(), error.byte > 20 ? error.byte - 20 : 0)), 40));
  } catch (const json::out_of_range& error) {  // 1e999
    throw UserError("not JSON that can be read: {}", printable(error.what(), 120));
  }
  SB_USER_CHECK(object.is_object(), "a line must be an object, this is {}", object.type_name());
  const bool text = object.contains(text_key), messages = object.contains("messages"),
             completion = object.contains("prompt") || object.contains("completion");
  SB_USER_CHECK(text || messages || completion,
                "none of \"{}\", \"messages\" and \"prompt\"/\"completion\" is there{}; --text-key names the key of "
                "plain text",
                printable(text_key), keys_of(object));
  SB_USER_CHECK(text + messages + completion == 1,
                "more than one of \"{}\", \"messages\" and \"prompt\"/\"completion\" is there", printable(text_key));
  JsonlRecord record;
  if (text) {
    record.text = string_of(object, text_key.c_str(), "");
    SB_USER_CHECK(!record.text.empty(), "\"{}\" is empty", printable(text_key));
  } else if (completion) {
    record.kind = JsonlRecord::Kind::completion;
    record.prompt = string_of(object, "prompt", "");
    record.completion = string_of(object, "completion", "");
    SB_USER_CHECK(!record.completion.empty(), "no label: \"completion\" is empty");
  } else {
    record.kind = JsonlRecord::Kind::messages;
    json& list = object["messages"];
    SB_USER_CHECK(list.is_array() && !list.empty(), "\"messages\" must be a list with entries");
    bool answered = false;
    for (size_t i = 0; i < list.size(); ++i) {
      const std::string where = fmt::format("message {}: ", i + 1);
      SB_USER_CHECK(list[i].is_object(), "{}must be an object, it is {}", where, list[i].type_name());
      ChatMessage message{string_of(list[i], "role", where), string_of(list[i], "content", where)};
      SB_USER_CHECK(!message.role.empty(), "{}\"role\" is empty", where);
      answered = answered || message.role == "assistant";
      record.messages.push_back(std::move(message));
    }
    SB_USER_CHECK(answered, "no label: no message has the role \"assistant\"");
  }
  return record;
}

bool next_line(std::string_view text, size_t& offset, std::string_view& line) {
  if (offset >= text.size()) return false;
  const size_t end = text.find('\n', offset);
  line = text.substr(offset, end == std::string_view::npos ? std::string_view::npos : end - offset);
  offset = end == std::string_view::npos ? text.size() : end + 1;
  if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
  return true;
}

bool is_blank(std::string_view line) {
  return line.find_first_not_of(" \t\r\n") == std::string_view::npos;
}

}  // namespace sb
