#include "data/tokenizer/byte_level.h"

#include <array>

#include "core/utf8.h"

namespace sb {
namespace {

using ByteOfCharacter = std::array<int, 0x144>;  // the 68 invisible bytes end at U+0143; -1: none

ByteOfCharacter make_table() {
  ByteOfCharacter table;
  table.fill(-1);
  char32_t next = 0x100;
  for (int b = 0; b < 256; ++b) {
    const bool visible = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
    table[visible ? static_cast<char32_t>(b) : next++] = b;
  }
  return table;
}

}  // namespace

std::optional<std::string> byte_level_decode(std::string_view token) {
  static const ByteOfCharacter to_byte = make_table();
  std::string bytes;
  while (!token.empty()) {
    const Utf8Character character = first_character(token);
    if (character.bytes == 0 || character.code >= to_byte.size() || to_byte[character.code] < 0) return std::nullopt;
    bytes += static_cast<char>(static_cast<unsigned char>(to_byte[character.code]));
    token.remove_prefix(static_cast<size_t>(character.bytes));
  }
  return bytes;
}

}  // namespace sb
