#include "data/text/token_copy.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <optional>

#include "core/errors.h"
#include "core/random.h"
#include "data/files/label_mask.h"
#include "data/files/token_file.h"
#include "data/files/token_writer.h"
#include "data/text/token_origin.h"

namespace sb {
namespace {

// Whose words the ids of all these files are; nothing where that of one is not known.
std::string common_origin(const std::vector<std::string>& paths) {
  std::optional<TokenOrigin> first;
  bool known = true;
  for (const std::string& path : paths) {
    const std::optional<TokenOrigin> own = read_token_origin(path);
    known = known && own;
    if (!own) continue;
    SB_USER_CHECK(!first || first->fingerprint == own->fingerprint,
                  "{} was made with the vocabulary of {}, but the files before it with that of {}: their ids mean "
                  "different words; tokenize all of them with the same tokenizer first",
                  path, own->tokenizer, first->tokenizer);
    first = own;
  }
  return known && first ? write_token_origin(*first) : "";
}

// Copies documents from one file to another.
class Copier {
 public:
  Copier(const std::string& output, TokenType type, const std::string& origin, bool overwrite)
      : writer_(output, {.type = type, .resume = false, .overwrite = overwrite, .origin = origin}) {}

  void copy(const TokenFile& file, int64_t document) {
    const int64_t length = file.length(document);
    const int64_t targets =
        file.mask() != nullptr ? file.mask()->valid_targets(document) : std::max<int64_t>(length - 1, 0);
    if (targets == 0) {
      ++copied_.left_out;
      return;
    }
    tokens_.resize(static_cast<size_t>(length));
    file.read(document, 0, length, tokens_.data());
    targets_.clear();
    if (targets < length - 1)
      for (int64_t t = 0; t < length; ++t) targets_.push_back(t > 0 && file.mask()->is_target(document, t));
    writer_.add(tokens_, targets_);
  }

  CopiedDocuments finish() {
    copied_.documents = writer_.documents();
    copied_.tokens = writer_.tokens();
    writer_.finish();
    return copied_;
  }
  int64_t documents() const { return writer_.documents(); }

 private:
  TokenWriter writer_;
  CopiedDocuments copied_;
  std::vector<int32_t> tokens_;
  std::vector<uint8_t> targets_;
};

}  // namespace

CopiedDocuments merge_token_files(const std::vector<std::string>& paths, const std::string& output, bool overwrite) {
  SB_USER_CHECK(!paths.empty(), "no token files were given");
  std::vector<std::unique_ptr<TokenFile>> files;
  TokenType type = TokenType::u16;
  for (const std::string& path : paths) {
    files.push_back(open_token_file(path));
    if (files.back()->type() == TokenType::i32) type = TokenType::i32;
  }
  Copier copier(output, type, common_origin(paths), overwrite);
  for (const auto& file : files)
    for (int64_t d = 0; d < file->documents(); ++d) copier.copy(*file, d);
  SB_USER_CHECK(copier.documents() > 0, "{}: no document has a target; there is nothing to write", paths.front());
  return copier.finish();
}

SplitDocuments split_token_file(const std::string& path, const std::string& train, const std::string& validation,
                                double share, uint64_t seed, bool overwrite) {
  SB_USER_CHECK(share > 0 && share < 1, "--validation {}: must be above 0 and below 1", share);
  const std::unique_ptr<TokenFile> file = open_token_file(path);
  std::vector<int64_t> order(static_cast<size_t>(file->documents()));
  std::iota(order.begin(), order.end(), int64_t{0});
  Random random(seed);
  const auto wanted = static_cast<size_t>(std::llround(share * static_cast<double>(order.size())));
  std::vector<uint8_t> held(order.size());
  for (size_t i = 0; i < wanted; ++i) {
    std::swap(order[i], order[i + random.below(order.size() - i)]);
    held[static_cast<size_t>(order[i])] = 1;
  }
  const std::string origin = common_origin({path});
  Copier to_train(train, file->type(), origin, overwrite), to_validation(validation, file->type(), origin, overwrite);
  for (int64_t d = 0; d < file->documents(); ++d)
    (held[static_cast<size_t>(d)] ? to_validation : to_train).copy(*file, d);
  SB_USER_CHECK(to_train.documents() > 0 && to_validation.documents() > 0,
                "{}: {} documents with targets would go to training and {} to validation; choose another --validation",
                path, to_train.documents(), to_validation.documents());
  SplitDocuments split;
  split.validation = to_validation.finish();
  split.train = to_train.finish();
  return split;
}

}  // namespace sb
