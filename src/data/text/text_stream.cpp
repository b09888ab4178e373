#include "data/text/text_stream.h"

#include <zlib.h>
#ifdef SB_ZSTD
#include <zstd.h>
#endif

#include <algorithm>
#include <vector>

#include "core/errors.h"
#include "core/files/mapped_file.h"

namespace sb {
namespace {

using namespace std::string_view_literals;
constexpr size_t kUnpacked = size_t{1} << 20;  // of text that is unpacked at a time

class PlainText final : public TextStream {
 public:
  explicit PlainText(const std::string& path) : file_(path) {}
  std::string_view next(size_t bytes) override {
    const std::string_view rest = file_.text().substr(offset_);
    const size_t newline = rest.find('\n', std::min(rest.size(), std::max<size_t>(bytes, 1) - 1));
    const std::string_view text = rest.substr(0, newline == std::string_view::npos ? newline : newline + 1);
    offset_ += text.size();
    return text;
  }
  int64_t position() const override { return static_cast<int64_t>(offset_); }
  bool packed() const override { return false; }

 private:
  MappedFile file_;
  size_t offset_ = 0;
};

// Takes a compressed file apart. `unpack` appends at most a piece of text.
class PackedText : public TextStream {
 public:
  explicit PackedText(const std::string& path) : path_(path), file_(path) {}

  std::string_view next(size_t bytes) override {
    text_.erase(0, taken_);
    taken_ = 0;
    size_t newline = std::string::npos;
    size_t searched = std::max<size_t>(bytes, 1) - 1;
    while (true) {
      if (searched < text_.size()) {
        newline = text_.find('\n', searched);
        if (newline != std::string::npos) break;
        searched = text_.size();
      }
      if (ended_) break;
      SB_USER_CHECK(std::ssize(text_) < static_cast<int64_t>(bytes) + kLongestLine,
                    "{}: a line has more than {} bytes: this is not JSONL", path_, kLongestLine);
      ended_ = !unpack(text_);
    }
    taken_ = newline == std::string::npos ? text_.size() : newline + 1;
    return std::string_view(text_).substr(0, taken_);
  }
  int64_t position() const override { return static_cast<int64_t>(read_); }
  bool packed() const override { return true; }

 protected:
  // False at the end of the file.
  virtual bool unpack(std::string& text) = 0;

  std::string_view rest() const { return file_.text().substr(read_); }
  void advance(size_t bytes) { read_ += bytes; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  MappedFile file_;
  size_t read_ = 0;
  std::string text_;
  size_t taken_ = 0;
  bool ended_ = false;
};

class GzipText final : public PackedText {
 public:
  explicit GzipText(const std::string& path) : PackedText(path) {
    constexpr int kGzip = 16 + MAX_WBITS;
    SB_CHECK(inflateInit2(&stream_, kGzip) == Z_OK, "zlib does not start");
  }
  ~GzipText() override { inflateEnd(&stream_); }

 protected:
  bool unpack(std::string& text) override {
    const std::string_view input = rest();
    SB_USER_CHECK(!input.empty() || between_, "{}: truncated: ends in the middle of its gzip data", path());
    if (input.empty()) return false;
    if (between_) SB_CHECK(inflateReset(&stream_) == Z_OK, "zlib does not start again");
    between_ = false;
    const size_t before = text.size();
    text.resize(before + kUnpacked);
    stream_.next_in = const_cast<Bytef*>(reinterpret_cast<const Bytef*>(input.data()));
    stream_.avail_in = static_cast<uInt>(std::min<size_t>(input.size(), kUnpacked));
    const uInt given = stream_.avail_in;
    stream_.next_out = reinterpret_cast<Bytef*>(text.data() + before);
    stream_.avail_out = static_cast<uInt>(kUnpacked);
    const int result = inflate(&stream_, Z_NO_FLUSH);
    text.resize(before + kUnpacked - stream_.avail_out);
    advance(given - stream_.avail_in);
    SB_USER_CHECK(result == Z_OK || result == Z_STREAM_END, "{}: damaged gzip data at byte {}{}", path(), position(),
                  stream_.msg != nullptr ? fmt::format(" ({})", stream_.msg) : "");
    between_ = result == Z_STREAM_END;  // the next member, or the end
    return true;
  }

 private:
  z_stream stream_{};
  bool between_ = false;
};

#ifdef SB_ZSTD
class ZstdText final : public PackedText {
 public:
  explicit ZstdText(const std::string& path) : PackedText(path), stream_(ZSTD_createDStream(), ZSTD_freeDStream) {
    SB_CHECK(stream_ != nullptr, "zstd does not start");
    // What `zstd --long=27` writes and no more: a frame may ask for any amount of memory.
    ZSTD_DCtx_setParameter(stream_.get(), ZSTD_d_windowLogMax, 27);
  }

 protected:
  bool unpack(std::string& text) override {
    const std::string_view rest_of_file = rest();
    SB_USER_CHECK(!rest_of_file.empty() || between_, "{}: truncated: ends in the middle of its zstd data", path());
    if (rest_of_file.empty()) return false;
    const size_t before = text.size();
    text.resize(before + kUnpacked);
    ZSTD_inBuffer input{rest_of_file.data(), rest_of_file.size(), 0};
    ZSTD_outBuffer output{text.data() + before, kUnpacked, 0};
    const size_t result = ZSTD_decompressStream(stream_.get(), &output, &input);
    text.resize(before + output.pos);
    advance(input.pos);
    SB_USER_CHECK(!ZSTD_isError(result), "{}: damaged zstd data at byte {} ({})", path(), position(),
                  ZSTD_getErrorName(result));
    between_ = result == 0;
    return true;
  }

 private:
  std::unique_ptr<ZSTD_DStream, size_t (*)(ZSTD_DStream*)> stream_;
  bool between_ = false;
};
#endif

}  // namespace

std::unique_ptr<TextStream> open_text(const std::string& path) {
  std::string first;
  {
    const MappedFile file(path);
    first = file.text().substr(0, 4);
  }
  if (first.starts_with("\x1f\x8b"sv)) return std::make_unique<GzipText>(path);
#ifdef SB_ZSTD
  if (first == "\x28\xb5\x2f\xfd"sv) return std::make_unique<ZstdText>(path);
#else
  SB_USER_CHECK(
      first != "\x28\xb5\x2f\xfd"sv,
      "{}: zstd is not supported by this build; decompress the file first, or install libzstd-dev and build again",
      path);
#endif
  return std::make_unique<PlainText>(path);
}

}  // namespace sb
