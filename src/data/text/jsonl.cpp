#include "data/text/jsonl.h"

#include <nlohmann/json.hpp>
#include <optional>

#include "core/errors.h"
#include "core/utf8.h"

namespace sb {
namespace {

using nlohmann::json;

std::string string_of(json& object, const char* key, const std::string& where) {
  const auto found = object.find(key);
  SB_USER_CHECK(found != object.end(), "{}\"{}\" is missing", where, key);
  SB_USER_CHECK(found->is_string(), "{}\"{}\" must be a string, but is {}", where, key, found->type_name());
  return std::move(found->get_ref<std::string&>());
}

// Of a message: text, or a list of parts that are all text, as chats that might have pictures are written. Parts are
// lines of their own, as vLLM puts them together for a model of text.
std::string content_of(json& message, const char* key, const std::string& where) {
  const auto found = message.find(key);
  if (found == message.end() || !found->is_array()) return string_of(message, key, where);
  std::string text;
  for (size_t i = 0; i < found->size(); ++i) {
    json& part = (*found)[i];
    const std::string part_where = fmt::format("{}part {}: ", where, i + 1);
    SB_USER_CHECK(part.is_object(), "{}must be an object, but is {}", part_where, part.type_name());
    const std::string type = string_of(part, "type", part_where);
    SB_USER_CHECK(type == "text", "{}is of the type \"{}\"; only text can be trained on", part_where, printable(type));
    text += fmt::format("{}{}", i > 0 ? "\n" : "", string_of(part, "text", part_where));
  }
  return text;
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

enum class Layout { text, messages, sharegpt, completion, alpaca };

Layout layout_of(const json& object, const std::string& text_key) {
  const std::pair<bool, Layout> there[] = {
      {object.contains(text_key), Layout::text},
      {object.contains("messages"), Layout::messages},
      {object.contains("conversations"), Layout::sharegpt},
      {object.contains("completion"), Layout::completion},
      {object.contains("instruction"), Layout::alpaca},
  };
  const std::string known = fmt::format(
      "\"{}\", \"messages\", \"conversations\" (ShareGPT), \"prompt\"/\"completion\" and "
      "\"instruction\"/\"output\" (Alpaca)",
      printable(text_key));
  std::optional<Layout> found;
  for (const auto& [given, layout] : there) {
    if (!given) continue;
    SB_USER_CHECK(!found, "more than one of {} is present; keep only one, for example with `jq -c 'del(.text)'`",
                  known);
    found = layout;
  }
  // Beside chats (UltraChat) a prompt is their first message once more.
  if (!found && object.contains("prompt")) found = Layout::completion;
  SB_USER_CHECK(found, "none of {} is present{}; name the key of plain text with --text-key", known, keys_of(object));
  return *found;
}

// ShareGPT's names for who speaks, beside those that ChatML has.
std::string role_of(const std::string& name, const std::string& where) {
  if (name == "human") return "user";
  if (name == "gpt" || name == "chatgpt") return "assistant";
  SB_USER_CHECK(name == "system" || name == "user" || name == "assistant",
                "{}\"from\" is \"{}\"; expected human, gpt or system", where, printable(name));
  return name;
}

void read_chat(json& list, const char* key, const char* role_key, const char* content_key, JsonlRecord& record) {
  record.kind = JsonlRecord::Kind::messages;
  SB_USER_CHECK(list.is_array() && !list.empty(), "\"{}\" must be a list that is not empty", key);
  bool answered = false;
  for (size_t i = 0; i < list.size(); ++i) {
    const std::string where = fmt::format("message {}: ", i + 1);
    SB_USER_CHECK(list[i].is_object(), "{}must be an object, but is {}", where, list[i].type_name());
    ChatMessage message{string_of(list[i], role_key, where), content_of(list[i], content_key, where)};
    SB_USER_CHECK(!message.role.empty(), "{}\"{}\" is empty", where, role_key);
    if (role_key == std::string_view("from")) message.role = role_of(message.role, where);
    answered = answered || message.role == "assistant";
    record.messages.push_back(std::move(message));
  }
  SB_USER_CHECK(answered, "no target: no message has the role \"assistant\"");
}

void read_completion(json& object, const char* prompt, const char* completion, JsonlRecord& record) {
  record.kind = JsonlRecord::Kind::completion;
  record.prompt = string_of(object, prompt, "");
  record.completion = string_of(object, completion, "");
  SB_USER_CHECK(!record.completion.empty(), "no target: \"{}\" is empty", completion);
}

// The instruction and, where there is one, its input on lines of their own, then the answer.
void read_alpaca(json& object, JsonlRecord& record) {
  read_completion(object, "instruction", "output", record);
  const std::string input = object.contains("input") ? string_of(object, "input", "") : "";
  record.prompt += input.empty() ? "\n" : fmt::format("\n{}\n", input);
}

}  // namespace

JsonlRecord parse_jsonl_record(std::string_view line, const std::string& text_key) {
  if (const std::optional<size_t> bad = find_invalid_utf8(line))
    throw UserError("invalid UTF-8 at byte {} (0x{:02x})", *bad, static_cast<unsigned char>(line[*bad]));
  json object;
  try {
    object = json::parse(line);
  } catch (const json::parse_error& error) {
    const bool whole = line.starts_with('{') && line.ends_with('}');  // a slip inside; else rather no JSONL at all
    throw UserError("invalid JSON at byte {} of the line, near \"{}\"{}", error.byte,
                    printable(line.substr(std::min(line.size(), error.byte > 20 ? error.byte - 20 : 0)), 40),
                    whole ? "" : "; every line must be one JSON object, such as {\"text\": \"...\"}");
  } catch (const json::out_of_range& error) {  // 1e999
    throw UserError("unreadable JSON: {}", printable(error.what(), 120));
  }
  SB_USER_CHECK(object.is_object(), "a line must be an object, but this is {}", object.type_name());
  JsonlRecord record;
  switch (layout_of(object, text_key)) {
    case Layout::text:
      record.text = string_of(object, text_key.c_str(), "");
      SB_USER_CHECK(!record.text.empty(), "\"{}\" is empty", printable(text_key));
      break;
    case Layout::messages:
      read_chat(object["messages"], "messages", "role", "content", record);
      break;
    case Layout::sharegpt:
      read_chat(object["conversations"], "conversations", "from", "value", record);
      break;
    case Layout::completion:
      read_completion(object, "prompt", "completion", record);
      break;
    case Layout::alpaca:
      read_alpaca(object, record);
      break;
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
