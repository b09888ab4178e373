#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace sb {

struct Utf8Character {
  char32_t code = 0;
  int bytes = 0;      // 0 when the bytes at this place are no character
  int bad_bytes = 0;  // then: how many of them one replacement character stands for (the longest valid beginning)
};

// The character at the start of `text`, which is not empty. Refuses overlong forms, surrogates and what lies above
// U+10FFFF.
Utf8Character first_character(std::string_view text);

// Offset of the first byte that is not part of valid UTF-8.
std::optional<size_t> find_invalid_utf8(std::string_view text);

// Replaces what is invalid by U+FFFD, one for each longest valid beginning, as the Unicode standard recommends.
std::string replace_invalid_utf8(std::string_view text);

// Bytes of `text` in a form fit for an error message: at most `limit` bytes, control characters escaped.
std::string printable(std::string_view text, size_t limit = 60);

}  // namespace sb
