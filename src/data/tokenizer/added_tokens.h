#pragma once

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "data/tokenizer/tokenizer_spec.h"

namespace sb {

// Finds added tokens in a text: the leftmost, of those the longest, without overlaps.
class AddedTokenFinder {
 public:
  explicit AddedTokenFinder(std::vector<AddedTokenSpec> tokens);
  bool empty() const { return tokens_.empty(); }

  // Calls `text` for what lies between and `token` for each token found, in order.
  void split(std::string_view whole, const std::function<void(std::string_view)>& text,
             const std::function<void(const AddedTokenSpec&)>& token) const;

 private:
  const AddedTokenSpec* longest_at(std::string_view text) const;

  std::vector<AddedTokenSpec> tokens_;  // sorted by first byte, then longest first
  int32_t first_[257] = {};             // where the tokens of each first byte start
};

}  // namespace sb
