#include "core/utf8.h"

#include <fmt/format.h>

#include <cstring>

namespace sb {

Utf8Character first_character(std::string_view text) {
  const auto at = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = at(0);
  if (lead < 0x80) return {lead, 1, 0};
  int more = 0;
  char32_t code = 0;
  // The second byte's range rules out overlong forms, surrogates and codes beyond U+10FFFF.
  unsigned char low = 0x80, high = 0xBF;
  if (lead >= 0xC2 && lead <= 0xDF) {
    more = 1;
    code = lead & 0x1Fu;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    more = 2;
    code = lead & 0x0Fu;
    if (lead == 0xE0) low = 0xA0;
    if (lead == 0xED) high = 0x9F;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    more = 3;
    code = lead & 0x07u;
    if (lead == 0xF0) low = 0x90;
    if (lead == 0xF4) high = 0x8F;
  } else {
    return {0, 0, 1};
  }
  for (int i = 1; i <= more; ++i) {
    if (static_cast<size_t>(i) >= text.size() || at(static_cast<size_t>(i)) < low || at(static_cast<size_t>(i)) > high)
      return {0, 0, i};
    code = code << 6 | (at(static_cast<size_t>(i)) & 0x3Fu);
    low = 0x80;
    high = 0xBF;
  }
  return {code, more + 1, 0};
}

std::optional<size_t> find_invalid_utf8(std::string_view text) {
  size_t i = 0;
  while (i < text.size()) {
    // Eight ASCII bytes at once: most text is that.
    uint64_t word = 0;
    if (i + 8 <= text.size()) {
      std::memcpy(&word, text.data() + i, 8);
      if ((word & 0x8080808080808080u) == 0) {
        i += 8;
        continue;
      }
    }
    const Utf8Character character = first_character(text.substr(i));
    if (character.bytes == 0) return i;
    i += static_cast<size_t>(character.bytes);
  }
  return std::nullopt;
}

std::string replace_invalid_utf8(std::string_view text) {
  std::string clean;
  clean.reserve(text.size());
  while (!text.empty()) {
    const size_t valid = find_invalid_utf8(text).value_or(text.size());
    clean.append(text.substr(0, valid));
    text.remove_prefix(valid);
    if (text.empty()) break;
    clean += "\xEF\xBF\xBD";
    text.remove_prefix(static_cast<size_t>(first_character(text).bad_bytes));
  }
  return clean;
}

std::string printable(std::string_view text, size_t limit) {
  std::string shown;
  const bool cut = text.size() > limit;
  const std::string clean = replace_invalid_utf8(text.substr(0, limit));
  for (std::string_view rest = clean; !rest.empty();) {
    const Utf8Character character = first_character(rest);
    const auto bytes = static_cast<size_t>(character.bytes);
    if (character.code < 0x20 || (character.code >= 0x7F && character.code < 0xA0))
      shown += fmt::format("\\x{:02x}", static_cast<uint32_t>(character.code));
    else
      shown += rest.substr(0, bytes);
    rest.remove_prefix(bytes);
  }
  return cut ? shown + "..." : shown;
}

}  // namespace sb
