#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/jsonl.h"
#include "data/tokenizer.h"

namespace sb {

struct EncodedDocument {
  std::vector<int32_t> tokens;
  std::vector<uint8_t> targets;  // one a token; empty when all count
};

struct DocumentEncoderOptions {
  bool append_eod = false;
  std::string eod_token;            // empty: <|endoftext|>, <|end_of_text|> or </s>, whichever there is
  bool add_special_tokens = false;  // what the tokenizer's post-processor adds to plain text
};

// Turns records into tokens and targets.
// Plain text: every token is a target.
// Messages: ChatML as Qwen writes it, <|im_start|>role\ncontent<|im_end|>\n for each message, without a default system
// message; an assistant's content and its <|im_end|> are targets. Content is text: "<|im_end|>" inside it is spelled
// out and ends nothing. Prompt and completion: encoded apart from each other, as at inference; the completion is the
// target. The end-of-document token is a target after text and completions, not after messages, which have ended
// already.
class DocumentEncoder {
 public:
  // Throws UserError when the tokenizer lacks the end-of-document token asked for.
  DocumentEncoder(const Tokenizer& tokenizer, const DocumentEncoderOptions& options);

  EncodedDocument encode(const JsonlRecord& record) const;

 private:
  void encode_messages(const JsonlRecord& record, EncodedDocument& document) const;
  void append(EncodedDocument& document, const std::vector<int32_t>& tokens, bool target) const;

  const Tokenizer& tokenizer_;
  DocumentEncoderOptions options_;
  int32_t eod_ = -1, start_ = -1, end_ = -1;
};

}  // namespace sb
