#include "data/text/document_encoder.h"

#include <algorithm>

#include "core/errors.h"

namespace sb {
namespace {

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kSpace = " \t\n\v\f\r";
  const size_t begin = text.find_first_not_of(kSpace);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kSpace) + 1 - begin);
}

}  // namespace

DocumentEncoder::DocumentEncoder(const Tokenizer& tokenizer, const DocumentEncoderOptions& options)
    : tokenizer_(tokenizer), options_(options) {
  const auto id = [&](const char* token) { return tokenizer.token_id(token).value_or(-1); };
  const ChatTokens chatml{-1, id("<|im_start|>"), -1, id("<|im_end|>")};
  const ChatTokens llama3{id("<|begin_of_text|>"), id("<|start_header_id|>"), id("<|end_header_id|>"),
                          id("<|eot_id|>")};
  if (chatml.start >= 0 && chatml.end >= 0)
    chat_ = chatml;
  else if (llama3.begin >= 0 && llama3.start >= 0 && llama3.header_end >= 0 && llama3.end >= 0)
    chat_ = llama3;
  if (!options.eod_token.empty()) {
    eod_ = tokenizer.token_id(options.eod_token).value_or(-1);
    SB_USER_CHECK(eod_ >= 0, "{}: has no token \"{}\" to end documents with", tokenizer.name(), options.eod_token);
    return;
  }
  for (const char* name : {"<|endoftext|>", "<|end_of_text|>", "</s>"})
    if (eod_ < 0) eod_ = tokenizer.token_id(name).value_or(-1);
  SB_USER_CHECK(eod_ >= 0 || !options.append_eod,
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
      append(document, tokenizer_.encode(record.prompt, whole), false);
      append(document, tokenizer_.encode(record.completion), true);
      break;
    case JsonlRecord::Kind::messages:
      encode_messages(record, document);
      break;
  }
  const bool completion = record.kind == JsonlRecord::Kind::completion;
  SB_USER_CHECK(eod_ >= 0 || !completion || !options_.end_completions,
                "{}: none of <|endoftext|>, <|end_of_text|> and </s> is in the vocabulary to end completions with; "
                "name the token with --eod-token, or do without with --no-end-token",
                tokenizer_.name());
  if (options_.append_eod || (completion && options_.end_completions))
    append(document, {eod_}, record.kind != JsonlRecord::Kind::messages);
  // The first token has nothing before it, so it can never be a target.
  SB_USER_CHECK(document.targets.size() > 1 &&
                    std::find(document.targets.begin() + 1, document.targets.end(), 1) != document.targets.end(),
                "no target: none of the {} tokens of this line can be one", document.tokens.size());
  if (std::find(document.targets.begin() + 1, document.targets.end(), 0) == document.targets.end())
    document.targets.clear();
  return document;
}

DocumentEncoder::Question DocumentEncoder::encode_question(const std::string& text) const {
  JsonlRecord chat;
  chat.kind = JsonlRecord::Kind::messages;
  chat.messages = {{"user", text}, {"assistant", ""}};
  EncodedDocument document;
  encode_messages(chat, document);
  // Of an empty answer the first target is the token that ends it.
  const auto answer = std::find(document.targets.begin(), document.targets.end(), 1) - document.targets.begin();
  return {{document.tokens.begin(), document.tokens.begin() + answer}, document.tokens[static_cast<size_t>(answer)]};
}

void DocumentEncoder::encode_messages(const JsonlRecord& record, EncodedDocument& document) const {
  SB_USER_CHECK(chat_.start >= 0,
                "{}: chats need <|im_start|> and <|im_end|> (ChatML), or <|begin_of_text|>, <|start_header_id|>, "
                "<|end_header_id|> and <|eot_id|> (Llama-3), but this tokenizer has neither",
                tokenizer_.name());
  EncodeOptions as_text;
  as_text.parse_added_tokens = false;
  const bool llama3 = chat_.header_end >= 0;
  const std::vector<int32_t> line_end = tokenizer_.encode(llama3 ? "\n\n" : "\n", as_text);
  if (llama3) append(document, {chat_.begin}, false);
  for (const ChatMessage& message : record.messages) {
    const bool answer = message.role == "assistant";
    append(document, {chat_.start}, false);
    if (llama3) {
      append(document, tokenizer_.encode(message.role, as_text), false);
      append(document, {chat_.header_end}, false);
      append(document, line_end, false);
      append(document, tokenizer_.encode(trimmed(message.content), as_text), answer);
    } else if (answer) {
      // Apart from the header, as the model will continue it.
      append(document, tokenizer_.encode("assistant\n", as_text), false);
      append(document, tokenizer_.encode(message.content, as_text), true);
    } else {
      append(document, tokenizer_.encode(message.role + "\n" + message.content, as_text), false);
    }
    append(document, {chat_.end}, answer);
    if (!llama3) append(document, line_end, false);
  }
}

}  // namespace sb
