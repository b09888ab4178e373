#include <cstring>

#include "core/errors.h"
#include "core/files/mapped_file.h"
#include "core/files/regular_file.h"
#include "data/files/label_mask.h"
#include "data/files/token_file.h"

// Layout: 256 i32 of header (magic, version, number of tokens, zeros), then the tokens.
namespace sb {
namespace {

constexpr int64_t kLlmcHeader = 256 * 4;

struct Variant {
  int32_t magic, version;
  int64_t bytes;
  int32_t document_start;
};
constexpr Variant kVariants[] = {{20240520, 1, 2, 50256}, {20240801, 7, 4, 128000}};

class LlmcFile final : public TokenFile {
 public:
  explicit LlmcFile(const std::string& path) : file_(path) {
    SB_USER_CHECK(file_.size() >= kLlmcHeader, "{}: truncated: {} bytes are fewer than the {} of the header", path,
                  file_.size(), kLlmcHeader);
    int32_t header[3];
    std::memcpy(header, file_.data(), sizeof(header));
    for (const Variant& variant : kVariants)
      if (variant.magic == header[0]) variant_ = variant;
    SB_USER_CHECK(variant_.bytes > 0, "{}: not an llm.c token file: it starts with {}", path, header[0]);
    SB_USER_CHECK(variant_.version == header[1],
                  "{}: has version {} of llm.c's format {}; only version {} is supported", path, header[1], header[0],
                  variant_.version);
    const int64_t count = header[2];
    SB_USER_CHECK(count > 0, "{}: is empty: the header counts {} tokens", path, count);
    SB_USER_CHECK(file_.size() == kLlmcHeader + count * variant_.bytes,
                  "{}: {} bytes do not match the {} tokens that its header counts ({} bytes): truncated or damaged",
                  path, file_.size(), count, kLlmcHeader + count * variant_.bytes);
    starts_.push_back(0);
    for (int64_t i = 1; i < count; ++i)
      if (token(i) == variant_.document_start) starts_.push_back(i);
    starts_.push_back(count);
  }

  const std::string& name() const override { return file_.path(); }
  TokenType type() const override { return variant_.bytes == 2 ? TokenType::u16 : TokenType::i32; }
  int64_t documents() const override { return static_cast<int64_t>(starts_.size()) - 1; }
  int64_t length(int64_t document) const override {
    return starts_[static_cast<size_t>(document) + 1] - starts_[static_cast<size_t>(document)];
  }
  void read(int64_t document, int64_t begin, int64_t count, int32_t* out) const override {
    SB_CHECK(begin >= 0 && begin + count <= length(document), "{}: {} tokens from {} of document {}", name(), count,
             begin, document);
    for (int64_t i = 0; i < count; ++i) out[i] = token(starts_[static_cast<size_t>(document)] + begin + i);
  }

 private:
  // An u32 beyond 2^31 becomes negative, which no vocabulary holds.
  int32_t token(int64_t i) const {
    const unsigned char* at = file_.data() + kLlmcHeader + i * variant_.bytes;
    if (variant_.bytes == 2) {
      uint16_t value = 0;
      std::memcpy(&value, at, 2);
      return value;
    }
    int32_t value = 0;
    std::memcpy(&value, at, 4);
    return value;
  }

  MappedFile file_;
  Variant variant_{};
  std::vector<int64_t> starts_;  // of the documents, and the end
};

}  // namespace

std::unique_ptr<TokenFile> open_llmc_file(const std::string& path) {
  return std::make_unique<LlmcFile>(path);
}

bool looks_like_llmc(const std::string& path) {
  RegularFile file(path);
  int32_t magic = 0;
  const bool whole = file.read(&magic, sizeof magic) == sizeof magic;
  for (const Variant& variant : kVariants)
    if (whole && magic == variant.magic) return true;
  return false;
}

}  // namespace sb
