#include "data/files/label_mask.h"

#include <bit>
#include <cstring>
#include <filesystem>

#include "core/errors.h"
#include "data/files/unaligned.h"

namespace sb {
std::unique_ptr<LabelMask> LabelMask::open_beside(const std::string& prefix, const TokenFile& tokens) {
  const std::string path = prefix + ".mask";
  if (!std::filesystem::exists(path)) return nullptr;
  return std::unique_ptr<LabelMask>(new LabelMask(path, tokens));
}

LabelMask::LabelMask(const std::string& path, const TokenFile& tokens) : file_(path) {
  SB_USER_CHECK(file_.size() >= kMaskHeader && std::memcmp(file_.data(), kMaskMagic, 8) == 0,
                "{}: is not a label mask: it does not start with {}", path, kMaskMagic);
  const auto version = load<uint64_t>(file_.data() + 8);
  SB_USER_CHECK(version == kMaskVersion, "{}: has version {} of the label mask format; only version {} is supported",
                path, version, kMaskVersion);
  const auto documents = load<uint64_t>(file_.data() + 16);
  const int64_t n = tokens.documents();
  SB_USER_CHECK(documents == static_cast<uint64_t>(n),
                "{}: made for {} documents, but {} has {}: the two files do not belong together", path, documents,
                tokens.name(), n);
  const int64_t offsets_at = kMaskHeader + (4 * n + 7) / 8 * 8, bitmaps_at = offsets_at + 8 * (n + 1);
  SB_USER_CHECK(file_.size() >= bitmaps_at, "{}: truncated: {} bytes, its tables alone take {}", path, file_.size(),
                bitmaps_at);
  valid_ = file_.data() + kMaskHeader;
  offsets_ = file_.data() + offsets_at;
  bitmaps_ = file_.data() + bitmaps_at;

  int64_t total = 0, expected = 0;
  for (int64_t d = 0; d < n; ++d) {
    const int64_t length = tokens.length(d), bytes = (length + 7) / 8;
    total += length;
    SB_USER_CHECK(offset(d) == expected, "{}: the bitmap of document {} starts at {} instead of {}: damaged", path, d,
                  offset(d), expected);
    const int64_t next = offset(d + 1);
    SB_USER_CHECK(next == expected || next == expected + bytes,
                  "{}: the bitmap of document {} ({} tokens) ends at {} after {}: damaged, or from another token file",
                  path, d, length, next, expected);
    SB_USER_CHECK(next <= file_.size() - bitmaps_at, "{}: truncated: the bitmap of document {} ends at {}", path, d,
                  next);
    expected = next;
    const int64_t valid = valid_targets(d);
    SB_USER_CHECK(valid > 0 || length < 2,
                  "{}: document {} has no target, so nothing could be learned from it; leave it out when tokenizing",
                  path, d);
    SB_USER_CHECK(valid >= 0 && valid <= std::max<int64_t>(0, length - 1),
                  "{}: document {} of {} tokens cannot have {} targets: damaged, or from another token file", path, d,
                  length, valid);
  }
  SB_USER_CHECK(load<uint64_t>(file_.data() + 24) == static_cast<uint64_t>(total),
                "{}: made for {} tokens, but {} has {}: the two files do not belong together", path,
                load<uint64_t>(file_.data() + 24), tokens.name(), total);
  SB_USER_CHECK(expected == file_.size() - bitmaps_at, "{}: {} bytes too many: damaged", path,
                file_.size() - bitmaps_at - expected);
}

int64_t LabelMask::offset(int64_t document) const {
  return load<int64_t>(offsets_ + 8 * document);
}

int64_t LabelMask::valid_targets(int64_t document) const {
  return load<int32_t>(valid_ + 4 * document);
}

bool LabelMask::is_target(int64_t document, int64_t token) const {
  const int64_t at = offset(document);
  if (token == 0) return false;
  return at == offset(document + 1) || (bitmaps_[at + token / 8] >> (token % 8) & 1) != 0;
}

int64_t LabelMask::count(int64_t document, int64_t begin, int64_t end) const {
  begin = std::max<int64_t>(begin, 1);
  if (begin >= end) return 0;
  const int64_t at = offset(document);
  if (at == offset(document + 1)) return end - begin;
  int64_t total = 0, token = begin;
  for (; token < end && token % 8 != 0; ++token) total += bitmaps_[at + token / 8] >> (token % 8) & 1;
  for (; token + 64 <= end; token += 64) total += std::popcount(load<uint64_t>(bitmaps_ + at + token / 8));
  for (; token < end; ++token) total += bitmaps_[at + token / 8] >> (token % 8) & 1;
  return total;
}

}  // namespace sb
