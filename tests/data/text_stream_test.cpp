#include "data/text/text_stream.h"

#include <zlib.h>
#ifdef SB_ZSTD
#include <zstd.h>
#endif

#include <functional>
#include <random>

#include "tests/data/temporary_folder.h"

namespace sb {
namespace {

std::string gzip(const std::string& text) {
  z_stream stream{};
  EXPECT_EQ(deflateInit2(&stream, 6, Z_DEFLATED, 16 + MAX_WBITS, 8, Z_DEFAULT_STRATEGY), Z_OK);
  std::string packed(deflateBound(&stream, text.size()) + 64, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(packed.data());
  stream.avail_out = static_cast<uInt>(packed.size());
  EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  packed.resize(stream.total_out);
  deflateEnd(&stream);
  return packed;
}

#ifdef SB_ZSTD
std::string zstd(const std::string& text) {
  std::string packed(ZSTD_compressBound(text.size()) + 64, '\0');
  ZSTD_CCtx* context = ZSTD_createCCtx();
  ZSTD_CCtx_setParameter(context, ZSTD_c_checksumFlag, 1);  // as the program zstd writes it
  packed.resize(ZSTD_compress2(context, packed.data(), packed.size(), text.data(), text.size()));
  ZSTD_freeCCtx(context);
  return packed;
}
#endif

// Lines of random letters, some empty, some long, the last one without an end.
std::string some_text(int lines, uint32_t seed) {
  std::mt19937 random(seed);
  std::string text;
  for (int i = 0; i < lines; ++i) {
    for (unsigned n = i % 97 == 0 ? 30000 : random() % 200; n > 0; --n)
      text += static_cast<char>('a' + static_cast<char>(random() % 26));
    text += '\n';
  }
  return text + "end";
}

struct Packing {
  const char* name;
  std::function<std::string(const std::string&)> pack;
};
std::vector<Packing> packings() {
  std::vector<Packing> all = {{"gzip", gzip}};
#ifdef SB_ZSTD
  all.push_back({"zstd", zstd});
#endif
  return all;
}

std::string all_of(TextStream& stream, size_t bytes, bool check_lines = true) {
  std::string text;
  while (true) {
    const std::string piece(stream.next(bytes));
    if (piece.empty()) return text;
    if (check_lines && !text.empty()) {
      EXPECT_EQ(text.back(), '\n');
    }
    text += piece;
  }
}

TEST(TextStream, CompressedTextIsReadAsPlainText) {
  const TemporaryFolder folder;
  for (const std::string& text :
       {some_text(20000, 1), std::string("one line"), std::string("\n\n"), std::string("a\n")})
    for (const size_t bytes : {size_t{1}, size_t{1000}, size_t{1} << 22}) {
      write_bytes(folder.path("plain"), text);
      EXPECT_EQ(all_of(*open_text(folder.path("plain")), bytes), text);
      for (const Packing& packing : packings()) {
        const std::string packed = packing.pack(text);
        write_bytes(folder.path("packed"), packed);
        const auto stream = open_text(folder.path("packed"));
        EXPECT_EQ(all_of(*stream, bytes), text) << packing.name;
        EXPECT_EQ(stream->position(), std::ssize(packed));
      }
    }
}

TEST(TextStream, PartsThatWerePackedOnTheirOwnFollowEachOther) {
  const TemporaryFolder folder;
  const std::string first = some_text(300, 2), second = some_text(10, 3);
  for (const Packing& packing : packings()) {
    write_bytes(folder.path("packed"), packing.pack(first) + packing.pack("") + packing.pack(second));
    EXPECT_EQ(all_of(*open_text(folder.path("packed")), 5000), first + second) << packing.name;
  }
}

TEST(TextStream, DamagedFilesAreNamed) {
  const TemporaryFolder folder;
  const std::string text = some_text(3000, 4);
  for (const Packing& packing : packings()) {
    const std::string packed = packing.pack(text);
    const auto error = [&](const std::string& bytes) -> std::string {
      write_bytes(folder.path("packed"), bytes);
      try {
        all_of(*open_text(folder.path("packed")), 1000);
      } catch (const UserError& problem) {
        return problem.what();
      }
      return "";
    };
    for (const size_t size : {size_t{6}, packed.size() / 2, packed.size() - 1})
      EXPECT_NE(error(packed.substr(0, size)).find("packed: truncated: ends in the middle"), std::string::npos) << size;
    std::string other = packed;
    for (size_t i = packed.size() / 2; i < packed.size() / 2 + 40; ++i) other[i] = static_cast<char>(other[i] ^ 0x55);
    EXPECT_NE(error(other).find("packed: damaged"), std::string::npos) << packing.name;
    EXPECT_NE(error(packed + "garbage").find("packed: damaged"), std::string::npos) << packing.name;
  }
}

}  // namespace
}  // namespace sb
