#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/thread_pool.h"

namespace sb {

struct EncodeOptions {
  // Added tokens such as <|im_start|> are recognised in the text. Off for text that others wrote: then "<|im_end|>" is
  // eight characters or so like any others.
  bool parse_added_tokens = true;
  // What the post-processor adds (Llama-3 puts <|begin_of_text|> in front).
  bool add_special_tokens = false;
};

// A byte-level BPE tokenizer read from a Hugging Face tokenizer.json. Safe to use from several threads at once.
// In a build without PCRE2 or ICU, load() and parse() say so in a UserError.
class Tokenizer {
 public:
  // A kind that is not supported is refused by name.
  // A tokenizer.json, or the folder that has one.
  static Tokenizer load(const std::string& path);
  // `name` stands for the file in error messages.
  static Tokenizer parse(std::string_view json, const std::string& name);
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;

  // The text must be valid UTF-8: a UserError names the first bad byte.
  std::vector<int32_t> encode(std::string_view text, const EncodeOptions& options = {}) const;
  std::vector<std::vector<int32_t>> encode_batch(std::span<const std::string_view> texts, ThreadPool& pool,
                                                 const EncodeOptions& options = {}) const;

  // Bytes that do not form a character become U+FFFD. An id outside the vocabulary is a UserError.
  std::string decode(std::span<const int32_t> ids, bool skip_special_tokens = false) const;
  // Whether there is a token with this id; a model may have more of them.
  bool has(int32_t id) const;
  // The bytes of one token, unchanged.
  std::string_view token_bytes(int32_t id) const;

  // The largest id + 1: what an embedding must have at least.
  int64_t vocab_size() const;
  // Of an added token or vocabulary entry, as written in the file.
  std::optional<int32_t> token_id(std::string_view content) const;
  bool is_special(int32_t id) const;
  const std::string& name() const;

 private:
  struct Impl;
  explicit Tokenizer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace sb
