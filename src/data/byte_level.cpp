#include "data/byte_level.h"

#include <array>

#include "data/utf8.h"

namespace sb {
namespace {

struct Tables {
  std::array<char32_t, 256> to_character{};
  std::array<int, 0x144> to_byte{};  // the 68 invisible bytes end at U+0143

  Tables() {
    to_byte.fill(-1);
    char32_t next = 0x100;
    for (int b = 0; b < 256; ++b) {
      const bool visible = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
      const char32_t character = visible ? static_cast<char32_t>(b) : next++;
      to_character[static_cast<size_t>(b)] = character;
      to_byte[character] = b;
    }
  }
};

const Tables& tables() {
  static const Tables instance;
  return instance;
}

}  // namespace

char32_t byte_level_character(unsigned char byte) {
  return tables().to_character[byte];
}

std::optional<std::string> byte_level_decode(std::string_view token) {
  const auto& to_byte = tables().to_byte;
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
