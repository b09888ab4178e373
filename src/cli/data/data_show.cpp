#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>

#include "cli/at_least.h"
#include "cli/data/data_commands.h"
#include "core/errors.h"
#include "core/log.h"
#include "core/utf8.h"
#include "data/files/label_mask.h"
#include "data/files/token_file.h"
#include "data/text/token_origin.h"
#include "data/tokenizer/tokenizer.h"

namespace sb {
namespace {

struct ShowArguments {
  std::string path, tokenizer;
  int64_t document = 0, count = 1, tokens = 48;
};

// A string as JSON writes it, which leaves DEL and U+0080 to U+009F as they are: terminals obey some of those.
std::string quoted(const std::string& text) {
  std::string shown;
  for (const char c : nlohmann::json(text).dump()) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte == 0x7F) {
      shown += "\\u007f";
    } else if (byte >= 0x80 && byte <= 0x9F && shown.ends_with('\xC2')) {
      shown.pop_back();
      shown += fmt::format("\\u{:04x}", byte);
    } else {
      shown += c;
    }
  }
  return shown;
}

// As text in quotes, or as ids without a tokenizer; an id that the tokenizer lacks is shown as <id 8046>.
std::string text_of(std::span<const int32_t> ids, const Tokenizer* tokenizer) {
  if (tokenizer == nullptr) return fmt::format("{}", fmt::join(ids, " "));
  std::string bytes;
  for (const int32_t id : ids)
    bytes += tokenizer->has(id) ? std::string(tokenizer->token_bytes(id)) : fmt::format("<id {}>", id);
  return quoted(replace_invalid_utf8(bytes));
}

void show_document(const TokenFile& file, int64_t document, const ShowArguments& arguments,
                   const Tokenizer* tokenizer) {
  const int64_t length = file.length(document);
  std::vector<int32_t> ids(static_cast<size_t>(length));
  if (length > 0) file.read(document, 0, length, ids.data());
  const LabelMask* mask = file.mask();
  // The first token has nothing before it to be predicted from.
  const auto is_target = [&](int64_t at) { return at > 0 && (mask == nullptr || mask->is_target(document, at)); };
  int64_t targets = 0;
  for (int64_t at = 0; at < length; ++at) targets += is_target(at);
  fmt::print("{}, document {} of {}: {} tokens, {} targets\n", file.name(), document, file.documents(), length,
             targets);
  for (int64_t begin = 0, end = 0; begin < length; begin = end) {
    while (end < length && is_target(end) == is_target(begin)) ++end;
    const std::span<const int32_t> run(ids.data() + begin, static_cast<size_t>(end - begin));
    const auto most = static_cast<size_t>(arguments.tokens);
    std::string text;
    if (most == 0 || run.size() <= most)
      text = text_of(run, tokenizer);
    else
      text = fmt::format("{} ... {}", text_of(run.first((most + 1) / 2), tokenizer),
                         most > 1 ? text_of(run.last(most / 2), tokenizer) : "");
    fmt::print("{:>8} {:>8}  {}  {}\n", begin, end - 1, is_target(begin) ? "target " : "context", text);
  }
}

void warn_of_another_tokenizer(const ShowArguments& arguments, const Tokenizer& tokenizer) {
  const std::optional<TokenOrigin> origin = read_token_origin(arguments.path);
  if (origin && origin->fingerprint != origin_of(tokenizer).fingerprint)
    log::warning("{}: was made with another tokenizer than --tokenizer {}, so this is not its text; name {}",
                 arguments.path, arguments.tokenizer, origin->tokenizer);
}

void show(const ShowArguments& arguments) {
  const std::unique_ptr<TokenFile> file = open_token_file(arguments.path);
  SB_USER_CHECK(arguments.document < file->documents(), "--document {}: {} has documents 0 to {}", arguments.document,
                file->name(), file->documents() - 1);
  std::optional<Tokenizer> tokenizer;
  if (!arguments.tokenizer.empty()) tokenizer = Tokenizer::load(arguments.tokenizer);
  if (tokenizer) warn_of_another_tokenizer(arguments, *tokenizer);
  const int64_t end = arguments.document + std::min(arguments.count, file->documents() - arguments.document);
  for (int64_t document = arguments.document; document < end; ++document)
    show_document(*file, document, arguments, tokenizer ? &*tokenizer : nullptr);
}

}  // namespace

void add_data_show(CLI::App& data) {
  CLI::App* command =
      data.add_subcommand("show", "show documents of a token file: their text, and which tokens count in the loss");
  auto arguments = std::make_shared<ShowArguments>();
  command
      ->add_option("path", arguments->path,
                   "token file: prefix of .bin and .idx, an llm.c .bin file, or a directory of MDS shards")
      ->required();
  command->add_option("--tokenizer", arguments->tokenizer,
                      "tokenizer.json, or its directory; without it token ids are shown");
  command->add_option("--document", arguments->document, "first document to show, counted from 0")
      ->check(at_least(0), "at least 0")
      ->capture_default_str();
  command->add_option("--count", arguments->count, "number of documents to show")
      ->check(at_least(1), "at least 1")
      ->capture_default_str();
  command
      ->add_option("--tokens", arguments->tokens, "maximum tokens to show of each part, from both of its ends; 0: all")
      ->check(at_least(0), "at least 0")
      ->capture_default_str();
  command->callback([arguments] { show(*arguments); });
}

}  // namespace sb
