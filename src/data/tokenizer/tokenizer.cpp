#include "data/tokenizer/tokenizer.h"

#include <filesystem>
#include <mutex>
#include <unordered_map>

#include "core/errors.h"
#include "core/files/mapped_file.h"
#include "core/utf8.h"
#include "data/tokenizer/added_tokens.h"
#include "data/tokenizer/bpe.h"
#include "data/tokenizer/byte_level.h"
#include "data/tokenizer/pre_tokenizer.h"
#include "data/tokenizer/tokenizer_spec.h"
#include "data/tokenizer/unicode_text.h"

namespace sb {
namespace {

struct Stage {
  std::optional<SplitPattern> pattern;  // none: only the prefix space
  bool removed = false, invert = false, add_prefix_space = false;
};

// What one thread needs while it encodes.
struct Encoder {
  SplitPattern::Matcher matcher;
  BpeModel::Scratch scratch;
  WordCache cache;
};

std::vector<AddedTokenSpec> select(const TokenizerSpec& spec, bool normalized) {
  std::vector<AddedTokenSpec> tokens;
  for (AddedTokenSpec token : spec.added_tokens) {
    if (token.normalized != normalized) continue;
    std::string storage;
    if (normalized)
      for (NormalForm form : spec.normal_forms) token.content = std::string(normalize(token.content, form, storage));
    tokens.push_back(std::move(token));
  }
  return tokens;
}

}  // namespace

struct Tokenizer::Impl {
  std::string name;
  std::vector<NormalForm> normal_forms;
  std::vector<Stage> stages;
  AddedTokenFinder raw_tokens, normalized_tokens;
  BpeModel bpe;
  std::vector<int32_t> prefix, suffix;
  std::vector<std::string> bytes;  // of each id; empty where there is none
  std::vector<uint8_t> known, special;
  std::unordered_map<std::string, int32_t> ids;

  // Encoders not in use; a thread takes one and puts it back, so that caches stay warm between calls.
  std::mutex mutex;
  std::vector<std::unique_ptr<Encoder>> idle;

  explicit Impl(const TokenizerSpec& spec);
  std::unique_ptr<Encoder> take();
  void put_back(std::unique_ptr<Encoder> encoder);

  void encode(std::string_view text, const EncodeOptions& options, Encoder& encoder, std::vector<int32_t>& out) const;
  void encode_piece(std::string_view text, bool parse, Encoder& encoder, std::vector<int32_t>& out) const;
  void run_stage(size_t stage, std::string_view text, Encoder& encoder, std::vector<int32_t>& out) const;
  void encode_word(std::string_view word, Encoder& encoder, std::vector<int32_t>& out) const;
};

Tokenizer::Impl::Impl(const TokenizerSpec& spec)
    : name(spec.name),
      normal_forms(spec.normal_forms),
      raw_tokens(select(spec, false)),
      normalized_tokens(select(spec, true)),
      bpe(spec.ignore_merges),
      prefix(spec.prefix_ids),
      suffix(spec.suffix_ids) {
  for (const SplitSpec& split : spec.splits) {
    Stage stage;
    if (split.splits)
      stage.pattern.emplace(split.pattern.empty() ? std::string(kGpt2Pattern) : split.pattern, split.literal, name);
    stage.removed = split.removed;
    stage.invert = split.invert;
    stage.add_prefix_space = split.add_prefix_space;
    stages.push_back(std::move(stage));
  }
  int32_t largest = 0;
  for (const auto& entry : spec.vocab) largest = std::max(largest, entry.second);
  for (const AddedTokenSpec& token : spec.added_tokens) largest = std::max(largest, token.id);
  bytes.resize(static_cast<size_t>(largest) + 1);
  known.resize(bytes.size());
  special.resize(bytes.size());

  bpe.reserve(spec.vocab.size(), spec.merges.size());
  const auto define = [&](const std::string& content, int32_t id) {
    const auto at = static_cast<size_t>(id);
    // A content with characters that stand for no byte (a space in an added token) stands for itself.
    bytes[at] = byte_level_decode(content).value_or(content);
    known[at] = 1;
    ids.emplace(content, id);
  };
  for (const auto& [content, id] : spec.vocab) {
    define(content, id);
    if (std::optional<std::string> decoded = byte_level_decode(content)) bpe.add_token(std::move(*decoded), id);
  }
  for (const TokenizerSpec::Merge& merge : spec.merges) bpe.add_merge(merge.left, merge.right, merge.merged);
  for (const AddedTokenSpec& token : spec.added_tokens) {
    define(token.content, token.id);
    special[static_cast<size_t>(token.id)] = token.special;
  }
  if (spec.unk_token) {
    const auto unknown = ids.find(*spec.unk_token);
    if (unknown != ids.end()) bpe.set_unknown(unknown->second);
  }
  for (int32_t id : prefix)
    SB_USER_CHECK(id <= largest && known[static_cast<size_t>(id)], "{}: the post-processor's id {} has no token", name,
                  id);
  for (int32_t id : suffix)
    SB_USER_CHECK(id <= largest && known[static_cast<size_t>(id)], "{}: the post-processor's id {} has no token", name,
                  id);
}

std::unique_ptr<Encoder> Tokenizer::Impl::take() {
  {
    const std::lock_guard lock(mutex);
    if (!idle.empty()) {
      std::unique_ptr<Encoder> encoder = std::move(idle.back());
      idle.pop_back();
      return encoder;
    }
  }
  return std::make_unique<Encoder>();
}

void Tokenizer::Impl::put_back(std::unique_ptr<Encoder> encoder) {
  const std::lock_guard lock(mutex);
  idle.push_back(std::move(encoder));
}

void Tokenizer::Impl::encode(std::string_view text, const EncodeOptions& options, Encoder& encoder,
                             std::vector<int32_t>& out) const {
  SB_USER_CHECK(text.size() < size_t{1} << 31, "a text of {} bytes is too long to encode in one go; the limit is 2 GiB",
                text.size());
  if (const std::optional<size_t> bad = find_invalid_utf8(text))
    throw UserError("invalid UTF-8 at byte {} of a text of {} bytes (0x{:02x})", *bad, text.size(),
                    static_cast<unsigned char>(text[*bad]));
  if (options.add_special_tokens) out.insert(out.end(), prefix.begin(), prefix.end());
  if (options.parse_added_tokens && !raw_tokens.empty())
    raw_tokens.split(
        text, [&](std::string_view piece) { encode_piece(piece, true, encoder, out); },
        [&](const AddedTokenSpec& token) { out.push_back(token.id); });
  else
    encode_piece(text, options.parse_added_tokens, encoder, out);
  if (options.add_special_tokens) out.insert(out.end(), suffix.begin(), suffix.end());
}

void Tokenizer::Impl::encode_piece(std::string_view text, bool parse, Encoder& encoder,
                                   std::vector<int32_t>& out) const {
  std::string storage;
  for (NormalForm form : normal_forms) text = normalize(text, form, storage);
  if (parse && !normalized_tokens.empty())
    normalized_tokens.split(
        text, [&](std::string_view piece) { run_stage(0, piece, encoder, out); },
        [&](const AddedTokenSpec& token) { out.push_back(token.id); });
  else
    run_stage(0, text, encoder, out);
}

void Tokenizer::Impl::run_stage(size_t index, std::string_view text, Encoder& encoder,
                                std::vector<int32_t>& out) const {
  if (text.empty()) return;
  if (index == stages.size()) return encode_word(text, encoder, out);
  const Stage& stage = stages[index];
  std::string prefixed;
  if (stage.add_prefix_space && text[0] != ' ') {
    prefixed.append(1, ' ').append(text);
    text = prefixed;
  }
  if (!stage.pattern) return run_stage(index + 1, text, encoder, out);
  const bool drop_match = stage.removed && !stage.invert, drop_gap = stage.removed && stage.invert;
  size_t done = 0;
  SplitPattern::Match match;
  while (stage.pattern->find(text, done, encoder.matcher, match)) {
    if (match.begin > done && !drop_gap) run_stage(index + 1, text.substr(done, match.begin - done), encoder, out);
    if (!drop_match) run_stage(index + 1, text.substr(match.begin, match.end - match.begin), encoder, out);
    done = match.end;
  }
  if (done < text.size() && !drop_gap) run_stage(index + 1, text.substr(done), encoder, out);
}

void Tokenizer::Impl::encode_word(std::string_view word, Encoder& encoder, std::vector<int32_t>& out) const {
  const bool cached = word.size() <= WordCache::kMaxWord;
  const uint64_t hash = cached ? WordCache::hash(word) : 0;
  if (cached && encoder.cache.find(word, hash, out)) return;
  const size_t before = out.size();
  const int64_t missing = bpe.encode(word, encoder.scratch, out);
  if (missing >= 0)
    throw UserError("{}: the byte 0x{:02x} of \"{}\" has no token in this vocabulary", name,
                    static_cast<unsigned char>(word[static_cast<size_t>(missing)]), printable(word));
  if (cached) encoder.cache.insert(word, hash, out.data() + before, out.size() - before);
}

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;

Tokenizer Tokenizer::load(const std::string& path) {
  const std::string json = std::filesystem::is_directory(path) ? path + "/tokenizer.json" : path;
  const MappedFile file(json);
  return parse(file.text(), json);
}

Tokenizer Tokenizer::parse(std::string_view json, const std::string& name) {
  return Tokenizer(std::make_unique<Impl>(parse_tokenizer_json(json, name)));
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, const EncodeOptions& options) const {
  std::unique_ptr<Encoder> encoder = impl_->take();
  std::vector<int32_t> ids;
  impl_->encode(text, options, *encoder, ids);
  impl_->put_back(std::move(encoder));
  return ids;
}

std::vector<std::vector<int32_t>> Tokenizer::encode_batch(std::span<const std::string_view> texts, ThreadPool& pool,
                                                          const EncodeOptions& options) const {
  std::vector<std::vector<int32_t>> ids(texts.size());
  pool.parallel_for(static_cast<int64_t>(texts.size()), 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) ids[static_cast<size_t>(i)] = encode(texts[static_cast<size_t>(i)], options);
  });
  return ids;
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_special_tokens) const {
  std::string text;
  for (int32_t id : ids)
    if (!skip_special_tokens || !is_special(id)) text += token_bytes(id);
  return replace_invalid_utf8(text);
}

bool Tokenizer::has(int32_t id) const {
  return id >= 0 && id < vocab_size() && impl_->known[static_cast<size_t>(id)];
}

std::string_view Tokenizer::token_bytes(int32_t id) const {
  SB_USER_CHECK(has(id), "the token id {} is not in the vocabulary of {} ({} ids)", id, impl_->name, vocab_size());
  return impl_->bytes[static_cast<size_t>(id)];
}

int64_t Tokenizer::vocab_size() const {
  return static_cast<int64_t>(impl_->bytes.size());
}

std::optional<int32_t> Tokenizer::token_id(std::string_view content) const {
  const auto found = impl_->ids.find(std::string(content));
  if (found == impl_->ids.end()) return std::nullopt;
  return found->second;
}

bool Tokenizer::is_special(int32_t id) const {
  return id >= 0 && id < vocab_size() && impl_->special[static_cast<size_t>(id)] != 0;
}

const std::string& Tokenizer::name() const {
  return impl_->name;
}

}  // namespace sb
