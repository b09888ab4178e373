#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/text/jsonl.h"
#include "data/tokenizer/tokenizer.h"

namespace sb {

struct EncodedDocument {
  std::vector<int32_t> tokens;
  std::vector<uint8_t> targets;  // one per token; empty when all count
};

struct DocumentEncoderOptions {
  bool append_eod = false;          // after every document
  bool end_completions = true;      // after a completion, whatever append_eod says: a model must learn where to stop
  std::string eod_token;            // empty: <|endoftext|>, <|end_of_text|> or </s>, whichever there is
  bool add_special_tokens = false;  // what the tokenizer's post-processor adds to plain text and to prompts
};

// Turns records into tokens and targets.
// Plain text: every token is a target.
// Messages, without a default system message, in the form whose tokens the tokenizer has: ChatML as Qwen writes it,
// <|im_start|>role\ncontent<|im_end|>\n for each message; or Llama-3's, <|begin_of_text|> and for each message
// <|start_header_id|>role<|end_header_id|>\n\ncontent<|eot_id|> with white space around the content removed, as its
// template does. An assistant's content and the token that ends it are targets. Content is text: "<|im_end|>" inside it
// is spelled out and ends nothing. Prompt and completion: encoded apart from each other, as at inference; the
// completion is the target, with the end-of-document token after it. That token is a target after text and completions,
// not after messages, which have ended already.
class DocumentEncoder {
 public:
  // Throws UserError when the tokenizer lacks the end-of-document token asked for.
  DocumentEncoder(const Tokenizer& tokenizer, const DocumentEncoderOptions& options);

  EncodedDocument encode(const JsonlRecord& record) const;

  // A chat's only message, the user's, up to where the answer begins, and the token that will end it: as in training.
  struct Question {
    std::vector<int32_t> tokens;
    int32_t end = -1;
  };
  Question encode_question(const std::string& text) const;

 private:
  // The tokens around a message of ChatML or Llama-3; -1: not there.
  struct ChatTokens {
    int32_t begin = -1, start = -1, header_end = -1, end = -1;
  };
  void encode_messages(const JsonlRecord& record, EncodedDocument& document) const;
  void append(EncodedDocument& document, const std::vector<int32_t>& tokens, bool target) const;

  const Tokenizer& tokenizer_;
  DocumentEncoderOptions options_;
  ChatTokens chat_;
  int32_t eod_ = -1;
};

}  // namespace sb
