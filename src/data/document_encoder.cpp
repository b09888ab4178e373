#include "data/document_encoder.h"

#include <algorithm>

#include "core/errors.h"

namespace sb {

DocumentEncoder::DocumentEncoder(const Tokenizer& tokenizer, const DocumentEncoderOptions& options)
    : tokenizer_(tokenizer), options_(options) {
  start_ = tokenizer.token_id("<|im_start|>").value_or(-1);
  end_ = tokenizer.token_id("<|im_end|>").value_or(-1);
  if (!options.append_eod) return;
  if (!options.eod_token.empty()) {
    eod_ = tokenizer.token_id(options.eod_token).value_or(-1);
    SB_USER_CHECK(eod_ >= 0, "{}: there is no token \"{}\" to end documents with", tokenizer.name(), options.eod_token);
    return;
  }
  for (const char* name : {"<|endoftext|>", "<|end_of_text|>", "</s>"})
    if (eod_ < 0) eod_ = tokenizer.token_id(name).value_or(-1);
  SB_USER_CHECK(eod_ >= 0,
                "{}: none of <|endoftext|>, <|end_of_text|> and </s> is in the vocabulary; name the token that ends "
                "documents with --eod-token",
                tokenizer.name());
}

void DocumentEncoder::append(EncodedDocument& document, const std::vector<int32_t>& tokens, bool target) const {
  document.tokens.insert(document.tokens.end(), tokens.begin(), tokens.end());
  document.targets.insert(document.targets.end(), tokens.size(), target ? 1 : 0);
}

EncodedDocument DocumentEncoder::encode(const JsonlRecord& record) const {
  EncodedDocument document;
  EncodeOptions whole;
  whole.add_special_tokens = options_.add_special_tokens;
  switch (record.kind) {
    case JsonlRecord::Kind::text:
      append(document, tokenizer_.encode(record.text, whole), true);
      break;
    case JsonlRecord::Kind::completion:
      append(document, tokenizer_.encode(record.prompt), false);
      append(document, tokenizer_.encode(record.completion), true);
      break;
    case JsonlRecord::Kind::messages:
      encode_messages(record, document);
      break;
  }
  if (options_.append_eod) append(document, {eod_}, record.kind != JsonlRecord::Kind::messages);
  // The first token has nothing before it, so it can never be a target.
  SB_USER_CHECK(document.targets.size() > 1 &&
                    std::find(document.targets.begin() + 1, document.targets.end(), 1) != document.targets.end(),
                "no label: the line gives {} tokens and none of them can be a target", document.tokens.size());
  if (std::find(document.targets.begin() + 1, document.targets.end(), 0) == document.targets.end())
    document.targets.clear();
  return document;
}

void DocumentEncoder::encode_messages(const JsonlRecord& record, EncodedDocument& document) const {
  SB_USER_CHECK(start_ >= 0 && end_ >= 0,
                "{}: \"messages\" need the tokens <|im_start|> and <|im_end|>, which this tokenizer does not have",
                tokenizer_.name());
  EncodeOptions as_text;
  as_text.parse_added_tokens = false;
  const std::vector<int32_t> line_end = tokenizer_.encode("\n", as_text);
  for (const ChatMessage& message : record.messages) {
    append(document, {start_}, false);
    if (message.role == "assistant") {
      // Apart from the header, as the model will continue it.
      append(document, tokenizer_.encode("assistant\n", as_text), false);
      append(document, tokenizer_.encode(message.content, as_text), true);
      append(document, {end_}, true);
    } else {
      append(document, tokenizer_.encode(message.role + "\n" + message.content, as_text), false);
      append(document, {end_}, false);
    }
    append(document, line_end, false);
  }
}

}  // namespace sb
