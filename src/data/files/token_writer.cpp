#include "data/files/token_writer.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "core/errors.h"
#include "core/files/durable_file.h"
#include "core/files/file_lock.h"
#include "core/files/mapped_file.h"
#include "core/utf8.h"
#include "data/files/append_file.h"
#include "data/files/label_mask.h"

namespace sb {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// Renames onto `to`, in one step and for good.
void publish_file(const std::string& from, const std::string& to) {
  std::error_code error;
  fs::rename(from, to, error);
  SB_USER_CHECK(!error, "cannot rename {} to {}: {}", from, to, error.message());
  sync_entry(to);
}

void append_copy(AppendFile& to, const std::string& from) {
  const MappedFile file(from);
  if (file.size() > 0) to.append(file.data(), static_cast<size_t>(file.size()));
}

}  // namespace

struct TokenWriter::Impl {
  std::string prefix, folder;
  Options options;
  std::unique_ptr<FileLock> lock;
  std::unique_ptr<AppendFile> bin, lengths, valid, bitmap_sizes, bitmaps;
  int64_t documents = 0, tokens = 0;
  bool masked = false, finished = false;
  std::string note;

  std::string part(const char* name) const { return folder + "/" + name; }
  void open(const json& state);
  json state(bool complete) const;
  void sync();
  void write_index();
  void write_mask();
  void publish();
};

json TokenWriter::Impl::state(bool complete) const {
  return {{"version", 1},
          {"type", static_cast<int>(options.type)},
          {"documents", documents},
          {"tokens", tokens},
          {"bitmap_bytes", bitmaps->size()},
          {"masked", masked},
          {"complete", complete},
          {"note", note}};
}

void TokenWriter::Impl::open(const json& state) {
  const auto number = [&](const char* key) {
    constexpr int64_t kMost = INT64_MAX / 8;  // whose bytes can still be counted
    if (state.is_null()) return int64_t{0};
    const json& value = state.at(key);
    SB_USER_CHECK(value.is_number_integer() && value >= 0 && value <= kMost,
                  "{}: damaged: \"{}\" must be an integer from 0 to {}; delete the directory {} and start again",
                  part("state.json"), key, kMost, folder);
    return value.get<int64_t>();
  };
  documents = number("documents");
  tokens = number("tokens");
  if (!state.is_null()) {
    SB_USER_CHECK(number("version") == 1 && number("type") == static_cast<int>(options.type),
                  "{}: the interrupted run used another token type; start again without resuming", folder);
    masked = state.at("masked").get<bool>();
    note = state.at("note").get<std::string>();
  }
  bin = std::make_unique<AppendFile>(part("bin"), tokens * token_bytes(options.type));
  lengths = std::make_unique<AppendFile>(part("lengths"), documents * 4);
  valid = std::make_unique<AppendFile>(part("valid"), documents * 4);
  bitmap_sizes = std::make_unique<AppendFile>(part("bitmap_sizes"), documents * 8);
  bitmaps = std::make_unique<AppendFile>(part("bitmaps"), number("bitmap_bytes"));
}

TokenWriter::TokenWriter(const std::string& prefix, const Options& options) : impl_(std::make_unique<Impl>()) {
  Impl& w = *impl_;
  w.prefix = prefix;
  w.folder = prefix + ".partial";
  w.options = options;
  SB_USER_CHECK(options.overwrite || !fs::exists(prefix + ".idx") || fs::exists(w.part("state.json")),
                "{}.idx already exists; choose another output, or replace it with --overwrite", prefix);
  std::error_code error;
  fs::create_directories(w.folder, error);
  SB_USER_CHECK(!error, "{}: cannot create the directory: {}", w.folder, error.message());
  w.lock = std::make_unique<FileLock>(w.part("lock"), w.folder + ": another process is writing this output");
  json state;
  if (options.resume && fs::exists(w.part("state.json"))) {
    try {
      state = json::parse(MappedFile(w.part("state.json")).text());
      if (state.at("complete").get<bool>()) {
        w.documents = state.at("documents");
        w.tokens = state.at("tokens");
        w.masked = state.at("masked");
        w.note = state.at("note");
        w.publish();
        return;
      }
      w.open(state);
    } catch (const json::exception& problem) {
      throw UserError("{}: damaged ({}); delete the directory {} and start again", w.part("state.json"),
                      printable(problem.what(), 200), w.folder);
    }
  } else {
    fs::remove(w.part("state.json"));
    w.open(json());
  }
  SB_USER_CHECK(options.overwrite || !fs::exists(prefix + ".idx"),
                "{}.idx already exists; choose another output, or replace it with --overwrite", prefix);
}

TokenWriter::~TokenWriter() = default;

void TokenWriter::add(std::span<const int32_t> tokens, std::span<const uint8_t> targets) {
  Impl& w = *impl_;
  SB_CHECK(!w.finished, "{}: a document after the end", w.prefix);
  SB_CHECK(targets.empty() || targets.size() == tokens.size(), "{} targets for {} tokens", targets.size(),
           tokens.size());
  SB_USER_CHECK(!tokens.empty() && tokens.size() <= INT32_MAX, "{}: a document of {} tokens cannot be stored", w.prefix,
                tokens.size());
  const int32_t limit = w.options.type == TokenType::u16 ? UINT16_MAX : INT32_MAX;
  for (int32_t token : tokens)
    SB_USER_CHECK(token >= 0 && token <= limit, "{}: token id {} does not fit in type {}", w.prefix, token,
                  w.options.type == TokenType::u16 ? "u16" : "i32");
  auto count = static_cast<int32_t>(tokens.size()) - 1;
  bool all = true;
  if (!targets.empty()) {
    count = 0;
    for (size_t t = 1; t < targets.size(); ++t) {
      count += targets[t] != 0;
      all = all && targets[t] != 0;
    }
    SB_USER_CHECK(count > 0, "{}: a document of {} tokens has no target", w.prefix, tokens.size());
  }
  if (w.options.type == TokenType::i32)
    w.bin->append(tokens.data(), tokens.size() * 4);
  else
    for (int32_t token : tokens) w.bin->append_value(static_cast<uint16_t>(token));
  w.lengths->append_value(static_cast<int32_t>(tokens.size()));
  w.valid->append_value(count);
  int64_t bitmap_bytes = 0;
  if (!all) {
    w.masked = true;
    std::string bitmap((tokens.size() + 7) / 8, '\0');
    for (size_t t = 1; t < targets.size(); ++t)
      if (targets[t]) bitmap[t / 8] = static_cast<char>(static_cast<unsigned char>(bitmap[t / 8]) | 1u << (t % 8));
    w.bitmaps->append(bitmap.data(), bitmap.size());
    bitmap_bytes = static_cast<int64_t>(bitmap.size());
  }
  w.bitmap_sizes->append_value(bitmap_bytes);
  ++w.documents;
  w.tokens += static_cast<int64_t>(tokens.size());
}

int64_t TokenWriter::documents() const {
  return impl_->documents;
}
int64_t TokenWriter::tokens() const {
  return impl_->tokens;
}
const std::string& TokenWriter::note() const {
  return impl_->note;
}
bool TokenWriter::finished() const {
  return impl_->finished;
}

void TokenWriter::Impl::sync() {
  for (AppendFile* file : {bin.get(), lengths.get(), valid.get(), bitmap_sizes.get(), bitmaps.get()}) file->sync();
}

void TokenWriter::checkpoint(const std::string& note) {
  impl_->note = note;
  impl_->sync();
  replace_file(impl_->part("state.json"), impl_->state(false).dump());
}

void TokenWriter::Impl::write_index() {
  AppendFile index(part("idx"), 0);
  index.append("MMIDIDX\0\0", 9);
  index.append_value(uint64_t{1});
  index.append_value(static_cast<uint8_t>(options.type));
  index.append_value(static_cast<uint64_t>(documents));
  index.append_value(static_cast<uint64_t>(documents) + 1);
  append_copy(index, part("lengths"));
  const MappedFile sizes(part("lengths"));
  int64_t pointer = 0;
  for (int64_t d = 0; d < documents; ++d) {
    index.append_value(pointer);
    int32_t length = 0;
    std::memcpy(&length, sizes.data() + 4 * d, 4);
    pointer += length * token_bytes(options.type);
  }
  for (int64_t d = 0; d <= documents; ++d) index.append_value(d);
  index.sync();
}

void TokenWriter::Impl::write_mask() {
  AppendFile mask(part("mask"), 0);
  mask.append(kMaskMagic, 8);
  mask.append_value(kMaskVersion);
  mask.append_value(static_cast<uint64_t>(documents));
  mask.append_value(static_cast<uint64_t>(tokens));
  append_copy(mask, part("valid"));
  if (documents % 2 != 0) mask.append_value(int32_t{0});
  const MappedFile sizes(part("bitmap_sizes"));
  int64_t offset = 0;
  for (int64_t d = 0; d < documents; ++d) {
    mask.append_value(offset);
    int64_t bytes = 0;
    std::memcpy(&bytes, sizes.data() + 8 * d, 8);
    offset += bytes;
  }
  mask.append_value(offset);
  append_copy(mask, part("bitmaps"));
  mask.sync();
}

// Every step may be repeated: a run that dies in the middle is published by the next one.
void TokenWriter::Impl::publish() {
  // While the old index (of an output that is overwritten) is there, it must not meet new tokens.
  if (fs::exists(part("bin"))) fs::remove(prefix + ".idx");
  if (fs::exists(part("bin"))) publish_file(part("bin"), prefix + ".bin");
  if (!masked)
    fs::remove(prefix + ".mask");
  else if (fs::exists(part("mask")))
    publish_file(part("mask"), prefix + ".mask");
  if (options.origin.empty())
    fs::remove(prefix + ".origin.json");
  else
    replace_file(prefix + ".origin.json", options.origin);
  if (fs::exists(part("idx"))) publish_file(part("idx"), prefix + ".idx");
  finished = true;
  fs::remove_all(folder);
}

void TokenWriter::finish() {
  Impl& w = *impl_;
  if (w.finished) return;
  SB_USER_CHECK(w.documents > 0, "{}: nothing to write: there are no documents", w.prefix);
  w.sync();
  w.write_index();
  if (w.masked) w.write_mask();
  replace_file(w.part("state.json"), w.state(true).dump());
  w.publish();
}

}  // namespace sb
