#include <cstring>

#include "core/errors.h"
#include "core/files/mapped_file.h"
#include "data/files/label_mask.h"
#include "data/files/token_file.h"
#include "data/files/unaligned.h"

// Layout of PREFIX.idx, little-endian: "MMIDIDX\0\0", u64 version 1, u8 type code, u64 sequences, u64 entries of the
// document index, then i32 lengths, i64 byte offsets into PREFIX.bin, and the i64 document index (where each document's
// sequences start, and the end).
namespace sb {
namespace {

constexpr char kMagic[] = "MMIDIDX\0";  // with the terminating zero: nine bytes
constexpr int64_t kIndexHeader = 9 + 8 + 1 + 8 + 8;

const char* type_name(int code) {
  constexpr const char* kNames[] = {"", "u8", "i8", "i16", "i32", "i64", "f64", "f32", "u16"};
  return code >= 1 && code <= 8 ? kNames[code] : "unknown";
}

class MegatronFile final : public TokenFile {
 public:
  explicit MegatronFile(const std::string& prefix) : name_(prefix), index_(prefix + ".idx"), tokens_(prefix + ".bin") {
    read_header();
    check_sequences();
    check_documents();
    mask_ = LabelMask::open_beside(prefix, *this);
  }

  const std::string& name() const override { return name_; }
  TokenType type() const override { return type_; }
  int64_t documents() const override { return by_document_ ? document_entries_ - 1 : sequences_; }

  int64_t length(int64_t document) const override {
    const auto [first, last] = sequences_of(document);
    int64_t total = 0;
    for (int64_t s = first; s < last; ++s) total += sequence_length(s);
    return total;
  }

  void read(int64_t document, int64_t begin, int64_t count, int32_t* out) const override {
    const auto [first, last] = sequences_of(document);
    for (int64_t s = first; s < last && count > 0; ++s) {
      const int64_t n = sequence_length(s);
      if (begin >= n) {
        begin -= n;
        continue;
      }
      const int64_t taken = std::min(count, n - begin);
      copy(pointer(s) + begin * token_bytes(type_), taken, out);
      out += taken;
      count -= taken;
      begin = 0;
    }
    SB_CHECK(count == 0, "{}: {} tokens beyond the end of document {}", name_, count, document);
  }

 private:
  void read_header() {
    const std::string& path = index_.path();
    SB_USER_CHECK(index_.size() >= kIndexHeader, "{}: truncated: {} bytes are fewer than the {} of the header", path,
                  index_.size(), kIndexHeader);
    const unsigned char* at = index_.data();
    SB_USER_CHECK(std::memcmp(at, kMagic, 9) == 0, "{}: is not a Megatron index: it does not start with MMIDIDX", path);
    const auto version = load<uint64_t>(at + 9);
    SB_USER_CHECK(version == 1, "{}: has version {} of the Megatron index format; only version 1 is supported", path,
                  version);
    const int code = at[17];
    SB_USER_CHECK(code == 4 || code == 8, "{}: tokens of type {} (code {}) are not supported; u16 (8) and i32 (4) are",
                  path, type_name(code), code);
    type_ = static_cast<TokenType>(code);
    const auto sequences = load<uint64_t>(at + 18), entries = load<uint64_t>(at + 26);
    const auto room = static_cast<uint64_t>(index_.size() - kIndexHeader);
    SB_USER_CHECK(sequences <= room / 12 && entries <= room / 8 && sequences * 12 + entries * 8 == room,
                  "{}: {} bytes do not match its header ({} sequences, {} document entries): truncated or damaged",
                  path, index_.size(), sequences, entries);
    SB_USER_CHECK(sequences > 0, "{}: is empty: it has no sequences", path);
    sequences_ = static_cast<int64_t>(sequences);
    document_entries_ = static_cast<int64_t>(entries);
    lengths_ = at + kIndexHeader;
    pointers_ = lengths_ + 4 * sequences_;
    documents_ = pointers_ + 8 * sequences_;
  }

  void check_sequences() const {
    const int64_t bytes = token_bytes(type_);
    for (int64_t s = 0; s < sequences_; ++s) {
      const int64_t n = sequence_length(s), from = pointer(s);
      SB_USER_CHECK(n >= 0, "{}: sequence {} has length {}: damaged", index_.path(), s, n);
      SB_USER_CHECK(from >= 0 && from % bytes == 0 && from <= tokens_.size() && n <= (tokens_.size() - from) / bytes,
                    "{}: sequence {} ({} tokens from byte {}) lies outside {} ({} bytes): truncated, or the two files "
                    "do not belong together",
                    index_.path(), s, n, from, tokens_.path(), tokens_.size());
    }
  }

  void check_documents() {
    by_document_ = document_entries_ > 1;
    int64_t before = 0;
    for (int64_t d = 0; d < document_entries_; ++d) {
      const int64_t start = document_start(d);
      SB_USER_CHECK(start >= before && start <= sequences_ && (d > 0 || start == 0),
                    "{}: entry {} of the document index is {}, after {} and with {} sequences: damaged", index_.path(),
                    d, start, before, sequences_);
      before = start;
    }
    SB_USER_CHECK(!by_document_ || before == sequences_, "{}: the document index ends at sequence {} of {}: damaged",
                  index_.path(), before, sequences_);
  }

  int64_t sequence_length(int64_t s) const { return load<int32_t>(lengths_ + 4 * s); }
  int64_t pointer(int64_t s) const { return load<int64_t>(pointers_ + 8 * s); }
  int64_t document_start(int64_t d) const { return load<int64_t>(documents_ + 8 * d); }
  std::pair<int64_t, int64_t> sequences_of(int64_t document) const {
    SB_CHECK(document >= 0 && document < documents(), "document {} of {}", document, documents());
    if (!by_document_) return {document, document + 1};
    return {document_start(document), document_start(document + 1)};
  }

  void copy(int64_t from, int64_t count, int32_t* out) const {
    const unsigned char* at = tokens_.data() + from;
    if (type_ == TokenType::i32)
      std::memcpy(out, at, static_cast<size_t>(4 * count));
    else
      for (int64_t i = 0; i < count; ++i) out[i] = load<uint16_t>(at + 2 * i);
  }

  std::string name_;
  MappedFile index_, tokens_;
  TokenType type_ = TokenType::i32;
  int64_t sequences_ = 0, document_entries_ = 0;
  bool by_document_ = false;
  const unsigned char *lengths_ = nullptr, *pointers_ = nullptr, *documents_ = nullptr;
};

}  // namespace

std::unique_ptr<TokenFile> open_megatron_file(const std::string& prefix) {
  return std::make_unique<MegatronFile>(prefix);
}

}  // namespace sb
