#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sb {

// What was written to one prefix.
struct CopiedDocuments {
  int64_t documents = 0, tokens = 0;
  int64_t left_out = 0;  // documents without a target, from which nothing is learned
};

// The documents of token files one after the other, with their targets, as one file. Files of different vocabularies
// are a UserError where both are known.
CopiedDocuments merge_token_files(const std::vector<std::string>& paths, const std::string& output, bool overwrite);

// Every document of a token file in one of two, in their order: `share` of them, drawn by the seed, are for validation.
// At least one document is in each, or a UserError.
struct SplitDocuments {
  CopiedDocuments train, validation;
};
SplitDocuments split_token_file(const std::string& path, const std::string& train, const std::string& validation,
                                double share, uint64_t seed, bool overwrite);

}  // namespace sb
