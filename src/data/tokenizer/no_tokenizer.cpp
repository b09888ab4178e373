// Stands in for tokenizer.cpp in a build without PCRE2 or ICU.
#include "core/errors.h"
#include "data/tokenizer/tokenizer.h"

namespace sb {

struct Tokenizer::Impl {};

namespace {
[[noreturn]] void refuse() {
  throw UserError(
      "this build has no tokenizer: PCRE2 and ICU were not found when it was configured. Install libpcre2-dev and "
      "libicu-dev and build again, or tokenize the text on a machine that has them");
}
}  // namespace

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;

Tokenizer Tokenizer::load(const std::string&) {
  refuse();
}
Tokenizer Tokenizer::parse(std::string_view, const std::string&) {
  refuse();
}
std::vector<int32_t> Tokenizer::encode(std::string_view, const EncodeOptions&) const {
  refuse();
}
std::vector<std::vector<int32_t>> Tokenizer::encode_batch(std::span<const std::string_view>, ThreadPool&,
                                                          const EncodeOptions&) const {
  refuse();
}
std::string Tokenizer::decode(std::span<const int32_t>, bool) const {
  refuse();
}
bool Tokenizer::has(int32_t) const {
  refuse();
}
std::string_view Tokenizer::token_bytes(int32_t) const {
  refuse();
}
int64_t Tokenizer::vocab_size() const {
  refuse();
}
std::optional<int32_t> Tokenizer::token_id(std::string_view) const {
  refuse();
}
bool Tokenizer::is_special(int32_t) const {
  refuse();
}
const std::string& Tokenizer::name() const {
  refuse();
}

}  // namespace sb
