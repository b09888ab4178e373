#include "data/files/token_check.h"

#include <gtest/gtest.h>

#include "core/thread_pool.h"
#include "data/files/token_writer.h"
#include "tests/data/temporary_folder.h"

namespace sb {
namespace {

using Document = std::vector<int32_t>;

std::unique_ptr<TokenFile> write(const std::string& prefix, const std::vector<Document>& documents) {
  TokenWriter writer(prefix, {});
  for (const Document& document : documents) writer.add(document);
  writer.finish();
  return open_token_file(prefix);
}

// Stores an id that the writer would refuse, or another one than it was given, as the `place`-th token of the file.
void put_token(const std::string& prefix, size_t place, int32_t id) {
  std::fstream file(prefix + ".bin", std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(4 * place)).write(reinterpret_cast<const char*>(&id), 4);
}

TEST(TokenCheck, CountsEveryTokenOutsideTheVocabulary) {
  TemporaryFolder folder;
  std::vector<Document> documents(100, Document(7, 3));
  documents[20] = {4};
  // More than one piece, with a bad id on both sides of its border.
  documents[37] = Document(70000, 5);
  documents[37][65535] = 10;
  documents[37][65536] = 11;
  documents[61] = {1, 9, 2};
  const auto file = write(folder.path("a"), documents);
  put_token(folder.path("a"), 59 * 7 + 1 + 70000, -1);
  for (const int workers : {1, 3}) {
    ThreadPool threads(workers);
    int64_t seen = 0, calls = 0;
    const TokenCheck check = check_token_file(*file, 10, threads, [&](int64_t tokens) {
      EXPECT_GT(tokens, seen);
      seen = tokens;
      ++calls;
    });
    EXPECT_EQ(check.documents, 100);
    EXPECT_EQ(check.tokens, 97 * 7 + 1 + 70000 + 3);
    EXPECT_EQ(check.targets, check.tokens - 100);
    EXPECT_EQ(check.short_documents, 1);
    EXPECT_EQ(check.smallest, -1);
    EXPECT_EQ(check.largest, 11);
    EXPECT_EQ(check.outside_tokens, 3);
    EXPECT_EQ(check.outside_documents, 2);
    ASSERT_TRUE(check.outside);
    EXPECT_EQ(check.outside->document, 37);
    EXPECT_EQ(check.outside->token, 65535);
    EXPECT_EQ(check.outside->id, 10);
    EXPECT_FALSE(check.sound());
    EXPECT_EQ(seen, check.tokens);
    EXPECT_GT(calls, 1);
    // Without a vocabulary only the negative id is wrong.
    const TokenCheck any = check_token_file(*file, 0, threads);
    EXPECT_EQ(any.outside_tokens, 1);
    EXPECT_EQ(any.outside->document, 61);
  }
}

TEST(TokenCheck, FindsAMaskThatContradictsItself) {
  TemporaryFolder folder;
  TokenWriter writer(folder.path("a"), {});
  writer.add(Document{1, 2, 3, 4});
  writer.add(Document{1, 2, 3, 4}, std::vector<uint8_t>{0, 1, 0, 1});
  writer.finish();
  ThreadPool threads(1);
  EXPECT_EQ(check_token_file(*open_token_file(folder.path("a")), 5, threads).targets, 3 + 2);
  std::string mask = read_bytes(folder.path("a.mask"));
  mask[32 + 4] = 1;  // valid targets of the second document
  write_bytes(folder.path("a.mask"), mask);
  const TokenCheck check = check_token_file(*open_token_file(folder.path("a")), 5, threads);
  EXPECT_FALSE(check.sound());
  EXPECT_EQ(check.wrong_masks, 1);
  EXPECT_EQ(check.wrong_mask, 1);
}

// A million tokens and a bad one; a look at 2 x 65,536 of them goes to the first ones of each half.
TEST(TokenCheck, SpotsAreSpreadEvenlyOverAllFiles) {
  TemporaryFolder folder;
  for (const size_t length : {100'000, 1'000}) {
    const size_t each = 500'000 / length;
    const std::string name = folder.path(std::to_string(length));
    const std::vector<Document> documents(each, Document(length, 1));
    const auto a = write(name + "a", documents), b = write(name + "b", documents);
    const auto look = [&](size_t bad, int64_t most) {
      const std::string prefix = name + (bad < 500'000 ? "a" : "b");
      put_token(prefix, bad % 500'000, 7);
      try {
        const int64_t looked_at = spot_check_ids({a.get(), b.get()}, 7, most);
        put_token(prefix, bad % 500'000, 1);
        return looked_at;
      } catch (const UserError&) {
        put_token(prefix, bad % 500'000, 1);
        throw;
      }
    };
    EXPECT_EQ(look(65'536, 131'072), 131'072);
    EXPECT_EQ(look(499'999, 131'072), 131'072);
    for (const size_t bad : {size_t{0}, size_t{65'535}, size_t{500'000}, size_t{565'535}}) {
      const std::string error = user_error([&] { look(bad, 131'072); });
      const size_t document = bad % 500'000 / length, token = bad % length;
      const std::string place = "token " + std::to_string(token) + " of document " + std::to_string(document) + " is 7";
      EXPECT_NE(error.find(place), std::string::npos) << error;
      EXPECT_NE(error.find(bad < 500'000 ? "a: " : "b: "), std::string::npos) << error;
      EXPECT_NE(error.find("data check --vocab-size 7"), std::string::npos) << error;
    }
    // As many as there are: all are looked at.
    EXPECT_THROW(look(999'999, 1'000'000), UserError);
  }
  const auto sound = write(folder.path("sound"), {Document(100, 6), Document(1, 6)});
  EXPECT_EQ(spot_check_ids({sound.get()}, 7, 1 << 20), 101);
}

}  // namespace
}  // namespace sb
