#include "core/errors.h"
#include "data/tokenizer/tokenizer.h"

// The input is a tokenizer.json. One that is accepted must encode and decode.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const sb::Tokenizer tokenizer = sb::Tokenizer::parse({reinterpret_cast<const char*>(data), size}, "fuzz.json");
    for (const char* text :
         {"", "a", "Hello, world! it's 12 345\n\n  x", "na\xc3\xafve e\xcc\x81 \xe5\x8c\x97\xe4\xba\xac",
          "<|endoftext|> <a>b", "aaaaaaaaaaaaaaaaaaaaaaaa"}) {
      for (const bool special : {false, true}) {
        sb::EncodeOptions options;
        options.add_special_tokens = special;
        options.parse_added_tokens = special;
        try {
          tokenizer.decode(tokenizer.encode(text, options), special);
        } catch (const sb::UserError&) {  // a byte without a token, a pattern that gives up
        }
      }
    }
  } catch (const sb::UserError&) {
  }
  return 0;
}
