#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

// What a tokenizer.json says, checked, before anything is built from it.
namespace sb {

enum class NormalForm { nfc, nfd, nfkc, nfkd };

struct SplitSpec {
  std::string pattern;
  bool literal = false;
  bool removed = false;  // else isolated
  bool invert = false;
  bool add_prefix_space = false;  // before matching; a ByteLevel stage's option
  bool splits = true;             // false: only the prefix space
};

struct AddedTokenSpec {
  int32_t id = 0;
  std::string content;
  bool single_word = false, lstrip = false, rstrip = false, normalized = false, special = false;
};

struct TokenizerSpec {
  std::string name;
  std::vector<NormalForm> normal_forms;
  std::vector<SplitSpec> splits;
  std::vector<AddedTokenSpec> added_tokens;
  std::vector<int32_t> prefix_ids, suffix_ids;  // of the post-processor
  bool ignore_merges = false;
  std::optional<std::string> unk_token;
  std::vector<std::pair<std::string, int32_t>> vocab;  // as written; each id once
  struct Merge {
    int32_t left, right, merged;
  };
  std::vector<Merge> merges;
};

// Throws UserError for anything malformed or unsupported, naming it.
TokenizerSpec parse_tokenizer_json(std::string_view json, const std::string& name);

}  // namespace sb
