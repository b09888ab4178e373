#define PCRE2_CODE_UNIT_WIDTH 8
#include "data/tokenizer/pre_tokenizer.h"

#include <pcre2.h>

#include <limits>

#include "core/errors.h"
#include "core/utf8.h"

namespace sb {

const char kGpt2Pattern[] = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

namespace {

// Unicode's White_Space. PCRE2's own \s adds U+180E, which Oniguruma and Unicode since 6.3 do not.
constexpr const char* kWhiteSpace =
    R"(\x{09}-\x{0d}\x{20}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000})";

// Writes \s and \S out, and refuses what Oniguruma would read differently from PCRE2. Inside a class \s becomes its
// ranges; \S has no such form there and stays.
std::string translate(const std::string& pattern, const std::string& name) {
  std::string out;
  bool in_class = false;
  const auto copy = [&](size_t& i, size_t count) {
    out.append(pattern, i, count);
    i += count;
  };
  const auto next_is = [&](size_t i, std::string_view what) { return pattern.compare(i, what.size(), what) == 0; };
  for (size_t i = 0; i < pattern.size();) {
    if (next_is(i, "\\s") || (next_is(i, "\\S") && !in_class)) {
      if (!in_class) out += pattern[i + 1] == 's' ? "[" : "[^";
      out += kWhiteSpace;
      if (!in_class) out += "]";
      i += 2;
    } else if (pattern[i] == '\\') {
      copy(i, 2);
    } else if (!in_class && pattern[i] == '[') {
      in_class = true;
      copy(i, 1);
      // A bracket right after the opening (or its negation) is an ordinary character.
      if (next_is(i, "^")) copy(i, 1);
      if (next_is(i, "]")) copy(i, 1);
    } else if (in_class && next_is(i, "[:")) {
      const size_t end = pattern.find(":]", i);
      copy(i, end == std::string::npos ? pattern.size() - i : end + 2 - i);
    } else {
      SB_USER_CHECK(!in_class || (pattern[i] != '[' && !next_is(i, "&&")),
                    "{}: the pre-tokenizer's pattern \"{}\" has a class inside a class, which is not supported", name,
                    printable(pattern, 200));
      if (pattern[i] == ']') in_class = false;
      copy(i, 1);
    }
  }
  return out;
}

struct CodeDeleter {
  void operator()(pcre2_code* code) const { pcre2_code_free(code); }
};

}  // namespace

struct SplitPattern::Impl {
  std::unique_ptr<pcre2_code, CodeDeleter> code;
  std::string literal;  // used instead of the code when not empty
  std::string shown, name;
  bool jit = false;
};

struct SplitPattern::Matcher::Impl {
  pcre2_match_data* data = pcre2_match_data_create(1, nullptr);
  pcre2_match_context* context = pcre2_match_context_create(nullptr);
  pcre2_jit_stack* stack = pcre2_jit_stack_create(32 << 10, 4 << 20, nullptr);

  Impl() {
    SB_CHECK(data && context && stack, "PCRE2 could not allocate what matching needs");
    pcre2_jit_stack_assign(context, nullptr, stack);
  }
  ~Impl() {
    pcre2_match_data_free(data);
    pcre2_match_context_free(context);
    pcre2_jit_stack_free(stack);
  }
};

SplitPattern::Matcher::Matcher() : impl_(std::make_unique<Impl>()) {}
SplitPattern::Matcher::~Matcher() = default;

SplitPattern::SplitPattern(const std::string& pattern, bool literal, const std::string& name)
    : impl_(std::make_unique<Impl>()) {
  impl_->shown = printable(pattern, 200);
  impl_->name = name;
  SB_USER_CHECK(!pattern.empty(), "{}: a pre-tokenizer's pattern is empty", name);
  if (literal) {
    impl_->literal = pattern;
    return;
  }
  const std::string translated = translate(pattern, name);
  int error = 0;
  size_t offset = 0;
  impl_->code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                                  PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error, &offset, nullptr));
  if (!impl_->code) {
    PCRE2_UCHAR message[256] = {};
    pcre2_get_error_message(error, message, sizeof(message));
    throw UserError("{}: the pre-tokenizer's pattern \"{}\" does not compile: {}", name, impl_->shown,
                    reinterpret_cast<const char*>(message));
  }
  impl_->jit = pcre2_jit_compile(impl_->code.get(), PCRE2_JIT_COMPLETE) == 0;
}

SplitPattern::~SplitPattern() = default;
SplitPattern::SplitPattern(SplitPattern&&) noexcept = default;
SplitPattern& SplitPattern::operator=(SplitPattern&&) noexcept = default;

bool SplitPattern::find(std::string_view text, size_t from, Matcher& matcher, Match& match) const {
  if (!impl_->literal.empty()) {
    const size_t at = text.find(impl_->literal, from);
    if (at == std::string_view::npos) return false;
    match = {at, at + impl_->literal.size()};
    return true;
  }
  // The limit stops patterns that back-track without end; it grows with the text, over which white space may run.
  const uint64_t limit = 10'000'000 + 64 * static_cast<uint64_t>(text.size());
  pcre2_set_match_limit(matcher.impl_->context,
                        static_cast<uint32_t>(std::min<uint64_t>(limit, std::numeric_limits<uint32_t>::max())));
  const auto subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  while (from < text.size()) {
    const uint32_t flags = PCRE2_NO_UTF_CHECK;
    const int found = impl_->jit ? pcre2_jit_match(impl_->code.get(), subject, text.size(), from, flags,
                                                   matcher.impl_->data, matcher.impl_->context)
                                 : pcre2_match(impl_->code.get(), subject, text.size(), from, flags,
                                               matcher.impl_->data, matcher.impl_->context);
    if (found == PCRE2_ERROR_NOMATCH) return false;
    if (found < 0) {
      PCRE2_UCHAR message[256] = {};
      pcre2_get_error_message(found, message, sizeof(message));
      throw UserError("{}: matching the pre-tokenizer's pattern \"{}\" failed near byte {} of a text: {}", impl_->name,
                      impl_->shown, from, reinterpret_cast<const char*>(message));
    }
    const size_t* place = pcre2_get_ovector_pointer(matcher.impl_->data);
    // \K may set the start behind the end or before `from`; such a match cuts nothing, like an empty one.
    if (place[1] > place[0] && place[0] >= from) {
      match = {place[0], place[1]};
      return true;
    }
    const size_t at = std::max(from, place[1]);
    if (at >= text.size()) return false;
    from = at + static_cast<size_t>(first_character(text.substr(at)).bytes);
  }
  return false;
}

}  // namespace sb
