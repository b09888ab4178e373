#include "data/tokenizer/added_tokens.h"

#include <algorithm>

#include "data/tokenizer/unicode_text.h"

namespace sb {

AddedTokenFinder::AddedTokenFinder(std::vector<AddedTokenSpec> tokens) : tokens_(std::move(tokens)) {
  const auto first_byte = [](const AddedTokenSpec& t) { return static_cast<unsigned char>(t.content[0]); };
  std::stable_sort(tokens_.begin(), tokens_.end(), [&](const AddedTokenSpec& a, const AddedTokenSpec& b) {
    return first_byte(a) != first_byte(b) ? first_byte(a) < first_byte(b) : a.content.size() > b.content.size();
  });
  for (const AddedTokenSpec& token : tokens_) ++first_[first_byte(token) + 1];
  for (int b = 0; b < 256; ++b) first_[b + 1] += first_[b];
}

const AddedTokenSpec* AddedTokenFinder::longest_at(std::string_view text) const {
  const auto byte = static_cast<unsigned char>(text[0]);
  for (int32_t i = first_[byte]; i < first_[byte + 1]; ++i)
    if (text.substr(0, tokens_[static_cast<size_t>(i)].content.size()) == tokens_[static_cast<size_t>(i)].content)
      return &tokens_[static_cast<size_t>(i)];
  return nullptr;
}

void AddedTokenFinder::split(std::string_view whole, const std::function<void(std::string_view)>& text,
                             const std::function<void(const AddedTokenSpec&)>& token) const {
  size_t done = 0, at = 0;
  while (!tokens_.empty() && at < whole.size()) {
    const AddedTokenSpec* found = longest_at(whole.substr(at));
    if (!found) {
      ++at;
      continue;
    }
    size_t begin = at, end = at + found->content.size();
    at = end;
    if (found->single_word && (ends_with_word(whole.substr(0, begin)) || starts_with_word(whole.substr(end)))) continue;
    // The white space beside the token belongs to it, as far as no token before has it.
    if (found->lstrip) begin = std::max(done, begin - trailing_white_space(whole.substr(0, begin)));
    if (found->rstrip) end += leading_white_space(whole.substr(end));
    if (begin > done) text(whole.substr(done, begin - done));
    token(*found);
    done = at = end;
  }
  if (done < whole.size()) text(whole.substr(done));
}

}  // namespace sb
