#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace sb {

// GPT-2's way to write any byte string as printable characters: bytes that are visible Latin-1 characters stand for
// themselves, the others are U+0100 and up in order. Vocabularies of byte-level tokenizers are written in it.
char32_t byte_level_character(unsigned char byte);

// The bytes a vocabulary entry stands for; nothing when a character of it stands for no byte.
std::optional<std::string> byte_level_decode(std::string_view token);

}  // namespace sb
