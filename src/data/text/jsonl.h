#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace sb {

struct ChatMessage {
  std::string role, content;
};

// One line of a JSONL file: an object with `text`, with `messages` (role and content each), with ShareGPT's
// `conversations` (from and value each), with `prompt` and `completion`, or with Alpaca's `instruction`, `input` (may
// be missing) and `output`. Other keys are ignored.
struct JsonlRecord {
  enum class Kind { text, messages, completion };
  Kind kind = Kind::text;
  std::string text;
  std::vector<ChatMessage> messages;
  std::string prompt, completion;
};

// Throws UserError that says what is wrong with the line; the caller knows the file and the line number. `text_key` is
// the key of plain text.
JsonlRecord parse_jsonl_record(std::string_view line, const std::string& text_key = "text");

// The next line from `offset` on, without its end ("\n" or "\r\n"); moves the offset behind it. False at the end.
bool next_line(std::string_view text, size_t& offset, std::string_view& line);
bool is_blank(std::string_view line);

}  // namespace sb
