#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "core/files/mapped_file.h"
#include "data/files/token_file.h"

namespace sb {

// PREFIX.mask: which tokens of the documents of PREFIX.bin are targets. Little-endian: "SBLABELS", u64 version 1, u64
// documents, u64 tokens; i32 valid targets of each document, padded with zeros to a multiple of 8 bytes; i64 offsets
// (documents + 1 of them) into the bitmaps that follow. A document's bitmap is empty when every token counts, else one
// bit a token, lowest bit first, padded to a byte. The first token of a document has nothing before it to be predicted
// from and is never counted.
class LabelMask {
 public:
  // Null when there is no PREFIX.mask; one that does not belong to these tokens is a UserError.
  static std::unique_ptr<LabelMask> open_beside(const std::string& prefix, const TokenFile& tokens);

  int64_t valid_targets(int64_t document) const;
  bool is_target(int64_t document, int64_t token) const;
  // Targets among the tokens [begin, end) of the document.
  int64_t count(int64_t document, int64_t begin, int64_t end) const;

 private:
  LabelMask(const std::string& path, const TokenFile& tokens);
  int64_t offset(int64_t document) const;

  MappedFile file_;
  const unsigned char *valid_ = nullptr, *offsets_ = nullptr, *bitmaps_ = nullptr;
};

inline constexpr char kMaskMagic[] = "SBLABELS";
inline constexpr int64_t kMaskHeader = 32;
inline constexpr uint64_t kMaskVersion = 1;

}  // namespace sb
