#include "data/text/token_origin.h"

#include <nlohmann/json.hpp>

#include "core/errors.h"
#include "core/files/mapped_file.h"
#include "core/log.h"
#include "core/utf8.h"
#include "data/files/token_file.h"

namespace sb {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// FNV-1a.
class Hash {
 public:
  void add(const void* data, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i)
      value_ = (value_ ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001b3ULL;
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325ULL;
};

std::string origin_path(const std::string& path) {
  const fs::path extension = fs::path(path).extension();
  const bool pair = extension == ".bin" || extension == ".idx";
  return (pair ? path.substr(0, path.size() - 4) : path) + ".origin.json";
}

}  // namespace

TokenOrigin origin_of(const Tokenizer& tokenizer) {
  Hash hash;
  for (int64_t id = 0; id < tokenizer.vocab_size(); ++id) {
    if (!tokenizer.has(static_cast<int32_t>(id))) continue;
    const std::string_view bytes = tokenizer.token_bytes(static_cast<int32_t>(id));
    const auto size = static_cast<int64_t>(bytes.size());
    hash.add(&id, sizeof id);
    hash.add(&size, sizeof size);
    hash.add(bytes.data(), bytes.size());
  }
  return {tokenizer.name(), fmt::format("{:016x}", hash.value()), tokenizer.vocab_size()};
}

std::string write_token_origin(const TokenOrigin& origin) {
  const json object = {
      {"tokenizer", origin.tokenizer}, {"vocabulary", origin.fingerprint}, {"vocab_size", origin.vocab_size}};
  return object.dump(1, ' ', false, json::error_handler_t::replace) + "\n";
}

std::optional<TokenOrigin> read_token_origin(const std::string& path) {
  const std::string file = origin_path(path);
  if (!fs::exists(file)) return std::nullopt;
  try {
    const json object = json::parse(MappedFile(file).text());
    return TokenOrigin{object.at("tokenizer"), object.at("vocabulary"), object.at("vocab_size")};
  } catch (const json::exception& problem) {
    throw UserError("{}: damaged ({}); delete it, or make the token file again", file, printable(problem.what(), 200));
  }
}

void warn_of_other_tokenizer(const std::vector<std::string>& paths, const fs::path& model) {
  const fs::path file = model / "tokenizer.json";
  if (model.empty() || !fs::exists(file)) return;
  std::optional<TokenOrigin> own;
  for (const std::string& path : expand_token_paths(paths)) {
    const std::optional<TokenOrigin> origin = read_token_origin(path);
    if (!origin) continue;
    try {
      if (!own) own = origin_of(Tokenizer::load(file.string()));
    } catch (const UserError& unknown) {
      log::info("{}: made with {}; cannot tell whether that is the model's tokenizer: {}", path, origin->tokenizer,
                unknown.what());
      return;
    }
    if (own->fingerprint == origin->fingerprint) continue;
    log::warning(
        "{}: was not made with the model's tokenizer, so its token ids mean different words: {} ({} ids) there, {} ({} "
        "ids) here; run `sparsebalance data tokenize` again with the model's tokenizer.json",
        path, origin->tokenizer, origin->vocab_size, file.string(), own->vocab_size);
  }
}

}  // namespace sb
