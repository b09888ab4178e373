#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace sb {

// The text of a file from its beginning to its end, in pieces of whole lines: plain, or compressed by gzip or zstd
// (which its first bytes tell, whatever its name). What is damaged is a UserError with the file's name.
class TextStream {
 public:
  // A line longer than this is no document but a mistake, or meant to fill the memory.
  static constexpr int64_t kLongestLine = int64_t{1} << 30;

  virtual ~TextStream() = default;
  // About `bytes` of text, up to the end of a line (or of the file); empty at the end. Valid until the next call.
  virtual std::string_view next(size_t bytes) = 0;
  // Bytes of the file that were read so far.
  virtual int64_t position() const = 0;
  // Whether there may be more text than the file has bytes.
  virtual bool packed() const = 0;
};

std::unique_ptr<TextStream> open_text(const std::string& path);

}  // namespace sb
