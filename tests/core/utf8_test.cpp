#include "core/utf8.h"

#include <gtest/gtest.h>

#include <vector>

#include "core/markup.h"

namespace sb {
namespace {

// The definition, written the other way round: the bytes of a code.
std::string encoded(char32_t code) {
  const auto byte = [](char32_t bits) { return static_cast<char>(static_cast<unsigned char>(bits)); };
  if (code < 0x80) return {byte(code)};
  if (code < 0x800) return {byte(0xC0 | code >> 6), byte(0x80 | (code & 0x3F))};
  if (code < 0x10000) return {byte(0xE0 | code >> 12), byte(0x80 | (code >> 6 & 0x3F)), byte(0x80 | (code & 0x3F))};
  return {byte(0xF0 | code >> 18), byte(0x80 | (code >> 12 & 0x3F)), byte(0x80 | (code >> 6 & 0x3F)),
          byte(0x80 | (code & 0x3F))};
}

std::string hex(const std::string& bytes) {
  std::string text;
  for (const char c : bytes) {
    constexpr const char* kDigits = "0123456789abcdef";
    text += kDigits[static_cast<unsigned char>(c) >> 4];
    text += kDigits[static_cast<unsigned char>(c) & 15];
  }
  return text;
}

const std::string kReplacement = encoded(0xFFFD);

TEST(Utf8, EveryCodeIsReadFromItsBytesAndSurrogatesAreNot) {
  for (char32_t code = 0; code <= 0x10FFFF; ++code) {
    const std::string bytes = encoded(code);
    // What follows must not matter.
    const Utf8Character character = first_character(bytes + "\x80");
    const bool surrogate = code >= 0xD800 && code <= 0xDFFF;
    ASSERT_EQ(character.bytes, surrogate ? 0 : static_cast<int>(bytes.size())) << hex(bytes);
    if (!surrogate) {
      ASSERT_EQ(character.code, code) << hex(bytes);
    }
  }
}

TEST(Utf8, CutCharactersAreOneBadPieceEach) {
  for (const char32_t code : {0x80u, 0x7FFu, 0x800u, 0xD7FFu, 0xE000u, 0xFFFFu, 0x10000u, 0x10FFFFu}) {
    const std::string bytes = encoded(code);
    for (size_t kept = 1; kept < bytes.size(); ++kept) {
      const std::string cut = bytes.substr(0, kept);
      for (const std::string& after : {std::string(), std::string("a"), encoded(0xE9)}) {
        const Utf8Character character = first_character(cut + after);
        EXPECT_EQ(character.bytes, 0) << hex(cut + after);
        EXPECT_EQ(character.bad_bytes, static_cast<int>(kept)) << hex(cut + after);
        EXPECT_EQ(replace_invalid_utf8(cut + after), kReplacement + after) << hex(cut + after);
      }
    }
  }
}

TEST(Utf8, BytesThatBeginNoCharacter) {
  for (int lead = 0x80; lead <= 0xFF; ++lead) {
    // Followed by what any character could go on with.
    const std::string text = std::string(1, static_cast<char>(lead)) + "\xBF\xBF\xBF";
    const bool begins = lead >= 0xC2 && lead <= 0xF4 && lead != 0xED && lead != 0xF4;
    EXPECT_EQ(first_character(text).bytes > 0, begins) << lead;
    if (lead < 0xC2 || lead > 0xF4) {
      EXPECT_EQ(first_character(text).bad_bytes, 1) << lead;
    }
  }
}

// The examples of the Unicode standard, tables 3-8 to 3-11: `?` stands for U+FFFD.
TEST(Utf8, ReplacesAsTheStandardsExamples) {
  const std::pair<std::string, std::string> cases[] = {
      {"\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41", "????????A"},
      {"\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41", "????????A"},
      {"\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42", "?????A??B"},
      {"\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41", "????A"},
      {"\x61\xF1\x80\x80\xE1\x80\xC2\x62\x80\x63\x80\xBF\x64", "a???b?c??d"},
  };
  for (const auto& [text, shown] : cases) {
    std::string expected;
    for (const char c : shown) expected += c == '?' ? kReplacement : std::string(1, c);
    EXPECT_EQ(hex(replace_invalid_utf8(text)), hex(expected)) << hex(text);
    EXPECT_FALSE(find_invalid_utf8(replace_invalid_utf8(text)).has_value()) << hex(text);
  }
}

// Eight bytes are looked at together: the bad one at every place of them, after whole characters of every length.
TEST(Utf8, FindsTheFirstBadByteWhereverItIs) {
  for (const char32_t before : {char32_t{'a'}, char32_t{0xE9}, char32_t{0x20AC}, char32_t{0x1F600}}) {
    std::string text;
    for (int characters = 0; characters <= 19; ++characters, text += encoded(before)) {
      EXPECT_FALSE(find_invalid_utf8(text).has_value()) << hex(text);
      EXPECT_EQ(find_invalid_utf8(text + "\xFF"), text.size());
      EXPECT_EQ(find_invalid_utf8(text + "\xE2\x82" + "plain text that goes on"), text.size());
      EXPECT_EQ(replace_invalid_utf8(text + "\xFF" + text), text + kReplacement + text);
    }
  }
}

TEST(Utf8, PrintableTextIsShortAndHasNoControlCharacters) {
  const std::pair<std::string, std::string> cases[] = {
      {"", ""},
      {"plain", "plain"},
      {std::string("a\0b", 3), "a\\x00b"},
      {"line\nnext\ttab\r", "line\\x0anext\\x09tab\\x0d"},
      {"\x1b[31m", "\\x1b[31m"},
      {"\x7f", "\\x7f"},
      {encoded(0x85) + encoded(0x9F), "\\x85\\x9f"},  // control characters beyond ASCII
      {encoded(0xA0) + encoded(0xE9), encoded(0xA0) + encoded(0xE9)},
      {"\xFF", kReplacement},
  };
  for (const auto& [text, expected] : cases) EXPECT_EQ(printable(text), expected) << hex(text);
  EXPECT_EQ(printable(std::string(60, 'x')), std::string(60, 'x'));
  EXPECT_EQ(printable(std::string(61, 'x')), std::string(60, 'x') + "...");
  EXPECT_EQ(printable("abc", 2), "ab...");
  EXPECT_EQ(printable("abc", 0), "...");
}

TEST(Markup, EveryAsciiCharacter) {
  for (int code = 0; code < 0x80; ++code) {
    const std::string text(1, static_cast<char>(code));
    std::string expected = text;
    if (code < 0x20 && code != '\n' && code != '\t') expected = " ";
    if (text == "&") expected = "&amp;";
    if (text == "<") expected = "&lt;";
    if (text == ">") expected = "&gt;";
    if (text == "\"") expected = "&quot;";
    if (text == "'") expected = "&#39;";
    EXPECT_EQ(markup_text("a" + text + "b"), "a" + expected + "b") << code;
  }
  EXPECT_EQ(markup_text(""), "");
  EXPECT_EQ(markup_text("&lt;"), "&amp;lt;") << "what is escaped already is text like any other";
  EXPECT_EQ(markup_text(encoded(0x20AC) + "\xFF"), encoded(0x20AC) + "\xFF");
}

}  // namespace
}  // namespace sb
