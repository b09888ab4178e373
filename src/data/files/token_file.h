#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace sb {

// How a token is stored. The numbers are Megatron's codes.
enum class TokenType : uint8_t { i32 = 4, u16 = 8 };
int64_t token_bytes(TokenType type);

class LabelMask;

// Documents of tokens in a file on disk, mapped into memory and checked when opened.
class TokenFile {
 public:
  TokenFile();
  virtual ~TokenFile();

  virtual const std::string& name() const = 0;
  virtual TokenType type() const = 0;
  virtual int64_t documents() const = 0;
  virtual int64_t length(int64_t document) const = 0;
  // Copies tokens [begin, begin + count) of a document. Ids are as stored: whoever knows the vocabulary checks them.
  virtual void read(int64_t document, int64_t begin, int64_t count, int32_t* out) const = 0;

  // Which tokens are targets; null when all are.
  const LabelMask* mask() const { return mask_.get(); }
  int64_t total_tokens() const;

 protected:
  std::unique_ptr<LabelMask> mask_;
};

// Opens PREFIX (or PREFIX.idx, PREFIX.bin) as a Megatron pair, with PREFIX.mask beside it where there is one, or a .bin
// file that starts with an llm.c header, or a folder of MDS shards with its index.json.
std::unique_ptr<TokenFile> open_token_file(const std::string& path);

// Paths as written, with patterns (* ? [) replaced by what they match, sorted; a pattern without a match is a
// UserError.
std::vector<std::string> expand_token_paths(const std::vector<std::string>& paths);

// The formats on their own. A Megatron document is the run of sequences its document index names; a file whose
// index names none (one entry) has one document a sequence.
std::unique_ptr<TokenFile> open_megatron_file(const std::string& prefix);
// llm.c keeps no documents: they start at the end-of-text token of its tokenizer (GPT-2's 50256 in version 1, Llama-3's
// 128000 in version 7), which llm.c puts in front of each.
std::unique_ptr<TokenFile> open_llmc_file(const std::string& path);
bool looks_like_llmc(const std::string& path);
// MosaicML's streaming shards, a document a sample: the tokens of the column input_ids.
std::unique_ptr<TokenFile> open_mds_folder(const std::string& folder);

}  // namespace sb
