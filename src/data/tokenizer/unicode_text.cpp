#include "data/tokenizer/unicode_text.h"

#include <unicode/bytestream.h>
#include <unicode/normalizer2.h>
#include <unicode/uchar.h>

#include "core/errors.h"
#include "core/utf8.h"

namespace sb {
namespace {

const icu::Normalizer2& normalizer(NormalForm form) {
  UErrorCode status = U_ZERO_ERROR;
  const icu::Normalizer2* instance = nullptr;
  switch (form) {
    case NormalForm::nfc:
      instance = icu::Normalizer2::getNFCInstance(status);
      break;
    case NormalForm::nfd:
      instance = icu::Normalizer2::getNFDInstance(status);
      break;
    case NormalForm::nfkc:
      instance = icu::Normalizer2::getNFKCInstance(status);
      break;
    case NormalForm::nfkd:
      instance = icu::Normalizer2::getNFKDInstance(status);
      break;
  }
  SB_CHECK(U_SUCCESS(status) && instance, "ICU has no normalizer: {}", u_errorName(status));
  return *instance;
}

bool is_word(char32_t code) {
  const auto c = static_cast<UChar32>(code);
  return u_isUAlphabetic(c) || (U_GET_GC_MASK(c) & (U_GC_M_MASK | U_GC_ND_MASK | U_GC_PC_MASK)) != 0 ||
         u_hasBinaryProperty(c, UCHAR_JOIN_CONTROL);
}

Utf8Character last_character(std::string_view text) {
  size_t start = text.size() - 1;
  while (start > 0 && (static_cast<unsigned char>(text[start]) & 0xC0) == 0x80) --start;
  return first_character(text.substr(start));
}

}  // namespace

std::string_view normalize(std::string_view text, NormalForm form, std::string& storage) {
  const icu::Normalizer2& forms = normalizer(form);
  const icu::StringPiece piece(text.data(), static_cast<int32_t>(text.size()));
  UErrorCode status = U_ZERO_ERROR;
  if (forms.isNormalizedUTF8(piece, status) && U_SUCCESS(status)) return text;
  status = U_ZERO_ERROR;
  std::string result;
  icu::StringByteSink<std::string> sink(&result);
  forms.normalizeUTF8(0, piece, sink, nullptr, status);
  SB_CHECK(U_SUCCESS(status), "ICU failed to normalize a text of {} bytes: {}", text.size(), u_errorName(status));
  storage = std::move(result);
  return storage;
}

bool ends_with_word(std::string_view text) {
  return !text.empty() && is_word(last_character(text).code);
}
bool starts_with_word(std::string_view text) {
  return !text.empty() && is_word(first_character(text).code);
}

size_t trailing_white_space(std::string_view text) {
  size_t left = text.size();
  while (left > 0) {
    const Utf8Character last = last_character(text.substr(0, left));
    if (!u_isUWhiteSpace(static_cast<UChar32>(last.code))) break;
    left -= static_cast<size_t>(last.bytes);
  }
  return text.size() - left;
}

size_t leading_white_space(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    const Utf8Character first = first_character(text.substr(at));
    if (!u_isUWhiteSpace(static_cast<UChar32>(first.code))) break;
    at += static_cast<size_t>(first.bytes);
  }
  return at;
}

}  // namespace sb
