#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "data/files/token_file.h"

namespace sb {

// Writes PREFIX.bin, PREFIX.idx and, when a document has tokens that are no targets, PREFIX.mask. Everything grows in
// the folder PREFIX.partial first; the files get their names at the end, the index last, so that what looks complete
// is. One writer a prefix at a time: a second one is refused.
class TokenWriter {
 public:
  struct Options {
    TokenType type = TokenType::i32;
    bool resume = false;      // go on from the last checkpoint() of an interrupted run, if there is one
    bool overwrite = false;   // else an existing PREFIX.idx is a UserError
    std::string origin = {};  // text of PREFIX.origin.json (data/text/token_origin.h); empty: there is none
  };
  TokenWriter(const std::string& prefix, const Options& options);
  ~TokenWriter();
  TokenWriter(const TokenWriter&) = delete;
  TokenWriter& operator=(const TokenWriter&) = delete;

  // Adds one document. `targets` is empty (every token counts) or one byte a token. An id the type cannot hold, or a
  // document in which no target counts, is a UserError.
  void add(std::span<const int32_t> tokens, std::span<const uint8_t> targets = {});

  int64_t documents() const;
  int64_t tokens() const;

  // Makes everything so far durable, together with a note of the caller's (where it stands in its input).
  void checkpoint(const std::string& note);
  // The note of the checkpoint this writer goes on from; empty for a fresh start.
  const std::string& note() const;
  // The run it was asked to resume had already been finished but for its renames, which are done now.
  bool finished() const;

  // At least one document must have been added.
  void finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sb
