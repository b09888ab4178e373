#include "data/tokenizer/tokenizer_spec.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "core/errors.h"
#include "core/utf8.h"

namespace sb {
namespace {

using nlohmann::json;

// Ids index tables; a larger one is a damaged file, not a vocabulary.
constexpr int64_t kMaxId = (int64_t{1} << 24) - 1;

// Sequences inside sequences; real files have one or two. Reading them walks the nesting on the stack.
constexpr int kDeepestJson = 16;

class SpecReader {
 public:
  explicit SpecReader(TokenizerSpec& spec) : spec_(spec) {}

  void read(const json& root) {
    SB_USER_CHECK(root.is_object(), "{}: not a tokenizer.json: the top level must be an object", spec_.name);
    SB_USER_CHECK(root.contains("model"), "{}: not a tokenizer.json: \"model\" is missing", spec_.name);
    read_model(root["model"]);
    read_added_tokens(root);
    read_normalizer(optional_member(root, "normalizer"));
    read_pre_tokenizer(optional_member(root, "pre_tokenizer"));
    read_post_processor(optional_member(root, "post_processor"));
    read_decoder(optional_member(root, "decoder"));
  }

 private:
  const json& member(const json& object, const char* key) {
    SB_USER_CHECK(object.is_object() && object.contains(key), "{}: \"{}\" is missing", spec_.name, key);
    return object[key];
  }
  static const json& optional_member(const json& object, const char* key) {
    static const json nothing;
    const auto found = object.find(key);
    return found == object.end() ? nothing : *found;
  }
  std::string type_of(const json& part, const char* what) {
    const json& type = member(part, "type");
    SB_USER_CHECK(type.is_string(), "{}: the {}'s \"type\" must be a string", spec_.name, what);
    return type.get<std::string>();
  }
  bool flag(const json& object, const char* key, bool otherwise) {
    const json& value = optional_member(object, key);
    if (value.is_null()) return otherwise;
    SB_USER_CHECK(value.is_boolean(), "{}: \"{}\" must be true or false", spec_.name, key);
    return value.get<bool>();
  }
  std::string text(const json& object, const char* key) {
    const json& value = member(object, key);
    SB_USER_CHECK(value.is_string(), "{}: \"{}\" must be a string", spec_.name, key);
    return value.get<std::string>();
  }
  const json& list(const json& object, const char* key) {
    const json& value = member(object, key);
    SB_USER_CHECK(value.is_array(), "{}: \"{}\" must be a list", spec_.name, key);
    return value;
  }
  // The parts of a Sequence that lies inside `depth` others.
  const json& parts(const json& sequence, const char* key, int depth) {
    SB_USER_CHECK(depth < kDeepestJson, "{}: \"{}\" are nested deeper than {} levels", spec_.name, key, kDeepestJson);
    return list(sequence, key);
  }
  int32_t id_of(const json& value, const std::string& of) {
    SB_USER_CHECK(value.is_number_integer() && value >= 0 && value <= kMaxId,
                  "{}: the id of \"{}\" must be an integer between 0 and {}", spec_.name, printable(of), kMaxId);
    return value.get<int32_t>();
  }
  [[noreturn]] void refuse(const char* what, const std::string& type, const char* supported) {
    throw UserError("{}: the {} \"{}\" is not supported; supported: {}", spec_.name, what, printable(type), supported);
  }

  void read_model(const json& model) {
    const std::string type = type_of(model, "model");
    if (type != "BPE") refuse("tokenizer model", type, "byte-level BPE (GPT-2, Llama-3, Qwen2 and the like)");
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      const json& value = optional_member(model, key);
      SB_USER_CHECK(value.is_null() || value == "", "{}: BPE with \"{}\" is not supported", spec_.name, key);
    }
    const json& dropout = optional_member(model, "dropout");
    SB_USER_CHECK(dropout.is_null() || dropout == 0.0, "{}: BPE with dropout is not supported", spec_.name);
    SB_USER_CHECK(!flag(model, "byte_fallback", false),
                  "{}: BPE with byte_fallback (as Llama-2 and SentencePiece models have it) is not supported",
                  spec_.name);
    if (optional_member(model, "unk_token").is_string()) spec_.unk_token = text(model, "unk_token");
    spec_.ignore_merges = flag(model, "ignore_merges", false);

    const json& vocab = member(model, "vocab");
    SB_USER_CHECK(vocab.is_object() && !vocab.empty(), "{}: \"vocab\" must be an object with entries", spec_.name);
    spec_.vocab.reserve(vocab.size());
    ids_.reserve(vocab.size());
    std::unordered_set<int32_t> used;
    used.reserve(vocab.size());
    for (const auto& [content, value] : vocab.items()) {
      const int32_t id = id_of(value, content);
      SB_USER_CHECK(used.insert(id).second, "{}: the id {} is given twice, the second time to \"{}\"", spec_.name, id,
                    printable(content));
      spec_.vocab.emplace_back(content, id);
      ids_.emplace(content, id);
    }
    read_merges(list(model, "merges"));
  }

  void read_merges(const json& merges) {
    spec_.merges.reserve(merges.size());
    size_t number = 0;
    for (const json& entry : merges) {
      ++number;
      std::string left, right;
      if (entry.is_string()) {
        const std::string& both = entry.get_ref<const std::string&>();
        const size_t space = both.find(' ');
        SB_USER_CHECK(space != std::string::npos && both.find(' ', space + 1) == std::string::npos,
                      "{}: merge {} (\"{}\") is not two tokens with a space between them", spec_.name, number,
                      printable(both));
        left = both.substr(0, space);
        right = both.substr(space + 1);
      } else {
        SB_USER_CHECK(entry.is_array() && entry.size() == 2 && entry[0].is_string() && entry[1].is_string(),
                      "{}: merge {} is neither a string nor a pair of strings", spec_.name, number);
        left = entry[0].get<std::string>();
        right = entry[1].get<std::string>();
      }
      spec_.merges.push_back({vocab_id(left, number), vocab_id(right, number), vocab_id(left + right, number)});
    }
  }
  int32_t vocab_id(const std::string& token, size_t merge) {
    const auto found = ids_.find(token);
    SB_USER_CHECK(found != ids_.end(), "{}: merge {} needs the token \"{}\", which is not in the vocabulary",
                  spec_.name, merge, printable(token));
    return found->second;
  }

  void read_added_tokens(const json& root) {
    const json& tokens = optional_member(root, "added_tokens");
    if (tokens.is_null()) return;
    SB_USER_CHECK(tokens.is_array(), "{}: \"added_tokens\" must be a list", spec_.name);
    std::unordered_map<int32_t, std::string> by_id;
    for (const auto& [content, id] : spec_.vocab) by_id.emplace(id, content);
    for (const json& entry : tokens) {
      AddedTokenSpec token;
      token.content = text(entry, "content");
      token.id = id_of(member(entry, "id"), token.content);
      token.single_word = flag(entry, "single_word", false);
      token.lstrip = flag(entry, "lstrip", false);
      token.rstrip = flag(entry, "rstrip", false);
      token.special = flag(entry, "special", false);
      token.normalized = flag(entry, "normalized", !token.special);
      SB_USER_CHECK(!token.content.empty(), "{}: the added token with id {} is empty", spec_.name, token.id);
      const auto known = ids_.find(token.content);
      SB_USER_CHECK(known == ids_.end() || known->second == token.id,
                    "{}: the added token \"{}\" has id {} here and id {} elsewhere", spec_.name,
                    printable(token.content), token.id, known->second);
      const auto owner = by_id.emplace(token.id, token.content).first;
      SB_USER_CHECK(owner->second == token.content, "{}: the id {} belongs to both \"{}\" and \"{}\"", spec_.name,
                    token.id, printable(owner->second), printable(token.content));
      ids_.emplace(token.content, token.id);
      spec_.added_tokens.push_back(std::move(token));
    }
  }

  void read_normalizer(const json& part, int depth = 0) {
    if (part.is_null()) return;
    const std::string type = type_of(part, "normalizer");
    if (type == "Sequence")
      for (const json& inner : parts(part, "normalizers", depth)) read_normalizer(inner, depth + 1);
    else if (type == "NFC")
      spec_.normal_forms.push_back(NormalForm::nfc);
    else if (type == "NFD")
      spec_.normal_forms.push_back(NormalForm::nfd);
    else if (type == "NFKC")
      spec_.normal_forms.push_back(NormalForm::nfkc);
    else if (type == "NFKD")
      spec_.normal_forms.push_back(NormalForm::nfkd);
    else
      refuse("normalizer", type, "NFC, NFD, NFKC, NFKD, Sequence");
  }

  void read_pre_tokenizer(const json& part) {
    collect_splits(part);
    SB_USER_CHECK(byte_level_,
                  "{}: the pre-tokenizer has no ByteLevel part; only byte-level BPE tokenizers are supported",
                  spec_.name);
  }
  void collect_splits(const json& part, int depth = 0) {
    if (part.is_null()) return;
    const std::string type = type_of(part, "pre-tokenizer");
    SB_USER_CHECK(!byte_level_, "{}: the pre-tokenizer \"{}\" after ByteLevel is not supported", spec_.name,
                  printable(type));
    if (type == "Sequence") {
      for (const json& inner : parts(part, "pretokenizers", depth)) collect_splits(inner, depth + 1);
    } else if (type == "ByteLevel") {
      byte_level_ = true;
      SplitSpec split;
      split.add_prefix_space = flag(part, "add_prefix_space", true);
      split.splits = flag(part, "use_regex", true);
      if (split.add_prefix_space || split.splits) spec_.splits.push_back(std::move(split));
    } else if (type == "Digits") {
      SplitSpec split;
      split.pattern = flag(part, "individual_digits", false) ? "\\p{N}" : "\\p{N}+";
      spec_.splits.push_back(std::move(split));
    } else if (type == "Split") {
      collect_split(part);
    } else {
      refuse("pre-tokenizer", type, "ByteLevel, Split, Digits, Sequence");
    }
  }
  void collect_split(const json& part) {
    SplitSpec split;
    const json& pattern = member(part, "pattern");
    SB_USER_CHECK(pattern.is_object() && pattern.size() == 1, "{}: a Split's \"pattern\" must have one entry",
                  spec_.name);
    split.literal = pattern.contains("String");
    split.pattern = text(pattern, split.literal ? "String" : "Regex");
    SB_USER_CHECK(!split.pattern.empty(), "{}: a Split's pattern is empty", spec_.name);
    const std::string behavior = text(part, "behavior");
    if (behavior != "Isolated" && behavior != "Removed") refuse("Split behavior", behavior, "Isolated, Removed");
    split.removed = behavior == "Removed";
    split.invert = flag(part, "invert", false);
    spec_.splits.push_back(std::move(split));
  }

  void read_post_processor(const json& part, int depth = 0) {
    if (part.is_null()) return;
    const std::string type = type_of(part, "post-processor");
    if (type == "Sequence")
      for (const json& inner : parts(part, "processors", depth)) read_post_processor(inner, depth + 1);
    else if (type == "TemplateProcessing")
      read_template(part);
    else if (type != "ByteLevel")  // which only trims offsets
      refuse("post-processor", type, "ByteLevel, TemplateProcessing, Sequence");
  }
  void read_template(const json& part) {
    const json& specials = member(part, "special_tokens");
    bool seen_text = false;
    for (const json& piece : list(part, "single")) {
      if (piece.is_object() && piece.contains("Sequence")) {
        SB_USER_CHECK(!seen_text, "{}: the post-processor's template repeats the text", spec_.name);
        seen_text = true;
        continue;
      }
      const std::string name = text(member(piece, "SpecialToken"), "id");
      for (const json& id : list(member(specials, name.c_str()), "ids"))
        (seen_text ? spec_.suffix_ids : spec_.prefix_ids).push_back(id_of(id, name));
    }
    SB_USER_CHECK(seen_text, "{}: the post-processor's template leaves the text out", spec_.name);
  }

  void read_decoder(const json& part, int depth = 0) {
    if (part.is_null()) return;
    const std::string type = type_of(part, "decoder");
    if (type == "Sequence")
      for (const json& inner : parts(part, "decoders", depth)) read_decoder(inner, depth + 1);
    else if (type != "ByteLevel")
      refuse("decoder", type, "ByteLevel");
  }

  TokenizerSpec& spec_;
  std::unordered_map<std::string, int32_t> ids_;
  bool byte_level_ = false;
};

}  // namespace

TokenizerSpec parse_tokenizer_json(std::string_view text, const std::string& name) {
  TokenizerSpec spec;
  spec.name = name;
  try {
    SpecReader(spec).read(json::parse(text));
  } catch (const json::exception& error) {
    throw UserError("{}: not a tokenizer.json: {}", name, printable(error.what(), 300));
  }
  return spec;
}

}  // namespace sb
