#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "data/tokenizer/tokenizer.h"

namespace sb {

// What made a token file, in PREFIX.origin.json beside it. Files of other programs have none.
struct TokenOrigin {
  std::string tokenizer;    // its file, as it was named
  std::string fingerprint;  // of its vocabulary: which id stands for which bytes
  int64_t vocab_size = 0;
};

TokenOrigin origin_of(const Tokenizer& tokenizer);
std::string write_token_origin(const TokenOrigin& origin);
// `path` as open_token_file() takes it. Nothing where there is no such file; a damaged one is a UserError.
std::optional<TokenOrigin> read_token_origin(const std::string& path);

// Warns of token files that were made with another vocabulary than that of model/tokenizer.json: their ids mean other
// words, which no later check can see. Says nothing where either is not known.
void warn_of_other_tokenizer(const std::vector<std::string>& paths, const std::filesystem::path& model);

}  // namespace sb
