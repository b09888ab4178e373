#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "data/tokenizer/tokenizer_spec.h"

// The Unicode knowledge that the tokenizer takes from ICU.
namespace sb {

// The text in this normal form; `text` is valid UTF-8. Returns a view of `text` where it is already normal, else of
// `storage`.
std::string_view normalize(std::string_view text, NormalForm form, std::string& storage);

// Whether the text's last (first) character is part of a word, and how many of its bytes are white space at the end
// (the start).
bool ends_with_word(std::string_view text);
bool starts_with_word(std::string_view text);
size_t trailing_white_space(std::string_view text);
size_t leading_white_space(std::string_view text);

}  // namespace sb
