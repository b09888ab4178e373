#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace sb {

// The bytes an entry of a byte-level tokenizer's vocabulary stands for; nothing when a character of it stands for no
// byte. Such vocabularies are written in GPT-2's way to make any byte string printable: bytes that are visible Latin-1
// characters stand for themselves, the others are U+0100 and up in order.
std::optional<std::string> byte_level_decode(std::string_view token);

}  // namespace sb
