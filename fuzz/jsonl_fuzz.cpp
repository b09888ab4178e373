#include "core/errors.h"
#include "core/utf8.h"
#include "data/text/jsonl.h"
#include "data/tokenizer/tokenizer.h"

namespace {

// Nothing of a text is lost by a tokenizer that does not normalise.
void check_round_trip(const std::string& text) {
  static const sb::Tokenizer tokenizer =
      sb::Tokenizer::load(SB_SOURCE_DIR "/tests/data/tokenizer_reference/gpt2_style.json");
  sb::EncodeOptions options;
  options.parse_added_tokens = false;
  SB_CHECK(tokenizer.decode(tokenizer.encode(text, options)) == text, "{}", sb::printable(text));
}

}  // namespace

// The input is a JSONL file.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  std::string_view line;
  for (size_t offset = 0; sb::next_line(text, offset, line);) {
    if (sb::is_blank(line)) continue;
    try {
      const sb::JsonlRecord record = sb::parse_jsonl_record(line);
      check_round_trip(record.text);
      check_round_trip(record.prompt + record.completion);
      for (const sb::ChatMessage& message : record.messages) check_round_trip(message.role + "\n" + message.content);
    } catch (const sb::UserError&) {
    }
  }
  return 0;
}
