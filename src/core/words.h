#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "core/errors.h"

namespace sb {

// What people call the values of an enumeration, written down once for all that read or print them.
template <typename E>
using Word = std::pair<std::string_view, E>;

template <typename E, size_t N>
std::string word_of(const Word<E> (&words)[N], E value) {
  for (const auto& [word, meaning] : words)
    if (meaning == value) return std::string(word);
  throw InternalError("value {} has no word", static_cast<int>(value));
}

// `what`: the beginning of the message when there is no such word.
template <typename E, size_t N>
E value_of(const Word<E> (&words)[N], std::string_view word, std::string_view what) {
  std::string known;
  for (const auto& [name, meaning] : words) {
    if (name == word) return meaning;
    known.append(known.empty() ? "" : ", ").append(name);
  }
  throw UserError("{}: unknown value {}; choose from {}", what, word, known);
}

}  // namespace sb
