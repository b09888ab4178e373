#include "data/text/token_copy.h"

#include <map>

#include "data/files/label_mask.h"
#include "data/files/token_file.h"
#include "data/files/token_writer.h"
#include "data/text/token_origin.h"
#include "tests/data/temporary_folder.h"

namespace sb {
namespace {

struct LabelledDocument {
  std::vector<int32_t> tokens;
  std::vector<uint8_t> targets;  // [0] is never one
  bool operator==(const LabelledDocument&) const = default;
};

// Of lengths 2, 3, 4 …; every third one has some tokens that are no targets.
std::vector<LabelledDocument> some_documents(int count, int32_t first) {
  std::vector<LabelledDocument> documents;
  for (int i = 0; i < count; ++i) {
    LabelledDocument document;
    for (int t = 0; t < 2 + i; ++t) {
      document.tokens.push_back(first + 100 * i + t);
      document.targets.push_back(t > 0 && (i % 3 != 0 || t % 2 == 1));
    }
    documents.push_back(std::move(document));
  }
  return documents;
}

void write(const std::string& prefix, const std::vector<LabelledDocument>& documents, TokenType type = TokenType::u16) {
  TokenWriter writer(prefix, {.type = type});
  for (const LabelledDocument& document : documents) writer.add(document.tokens, document.targets);
  writer.finish();
}

std::vector<LabelledDocument> read(const std::string& prefix) {
  const auto file = open_token_file(prefix);
  std::vector<LabelledDocument> documents;
  for (int64_t d = 0; d < file->documents(); ++d) {
    LabelledDocument& document = documents.emplace_back();
    document.tokens.resize(static_cast<size_t>(file->length(d)));
    file->read(d, 0, file->length(d), document.tokens.data());
    for (int64_t t = 0; t < file->length(d); ++t)
      document.targets.push_back(t > 0 && (file->mask() == nullptr || file->mask()->is_target(d, t)));
  }
  return documents;
}

TEST(TokenCopy, MergedFilesHoldTheDocumentsOneAfterTheOther) {
  const TemporaryFolder folder;
  std::vector<LabelledDocument> first = some_documents(5, 0), second = some_documents(7, 3000);
  second[1].tokens[0] = 100000;  // needs four bytes
  write(folder.path("a"), first);
  write(folder.path("b"), second, TokenType::i32);
  const CopiedDocuments copied = merge_token_files({folder.path("a"), folder.path("b")}, folder.path("out"), false);
  std::vector<LabelledDocument> expected = first;
  expected.insert(expected.end(), second.begin(), second.end());
  EXPECT_EQ(read(folder.path("out")), expected);
  EXPECT_EQ(copied.documents, 12);
  EXPECT_EQ(copied.left_out, 0);
  EXPECT_THROW(merge_token_files({folder.path("a")}, folder.path("out"), false), UserError);
  merge_token_files({folder.path("a")}, folder.path("out"), true);
  EXPECT_EQ(read(folder.path("out")), first);
}

TEST(TokenCopy, DocumentsWithoutATargetAreLeftOutAndCounted) {
  const TemporaryFolder folder;
  std::vector<LabelledDocument> documents = some_documents(2, 0);
  documents.insert(documents.begin() + 1, LabelledDocument{{7}, {}});  // one token alone has nothing before it
  write(folder.path("a"), documents);
  EXPECT_EQ(merge_token_files({folder.path("a")}, folder.path("out"), false).left_out, 1);
  EXPECT_EQ(read(folder.path("out")), some_documents(2, 0));
}

TEST(TokenCopy, FilesOfDifferentVocabulariesAreNotMixed) {
  const TemporaryFolder folder;
  for (const char* name : {"a", "b"}) {
    write(folder.path(name), some_documents(2, 0));
    write_bytes(folder.path(std::string(name) + ".origin.json"), write_token_origin({"t.json", name, 500}));
  }
  try {
    merge_token_files({folder.path("a"), folder.path("b")}, folder.path("out"), false);
    FAIL();
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find("different"), std::string::npos) << error.what();
  }
  EXPECT_FALSE(std::filesystem::exists(folder.path("out.idx")));
  merge_token_files({folder.path("a"), folder.path("a")}, folder.path("out"), false);
  EXPECT_TRUE(std::filesystem::exists(folder.path("out.origin.json")));
}

TEST(TokenCopy, EveryDocumentIsOnOneSideOfASplit) {
  const TemporaryFolder folder;
  const std::vector<LabelledDocument> all = some_documents(40, 0);
  write(folder.path("a"), all);
  const auto split = [&](uint64_t seed) {
    const SplitDocuments result =
        split_token_file(folder.path("a"), folder.path("t"), folder.path("v"), 0.25, seed, /*overwrite=*/true);
    EXPECT_EQ(result.validation.documents, 10);
    EXPECT_EQ(result.train.documents, 30);
    std::map<int32_t, LabelledDocument> by_first;
    for (const char* side : {"t", "v"}) {
      int32_t last = -1;
      for (const LabelledDocument& document : read(folder.path(side))) {
        EXPECT_GT(document.tokens[0], last) << "in their order";
        last = document.tokens[0];
        by_first[last] = document;
      }
    }
    EXPECT_EQ(by_first.size(), all.size());
    for (const LabelledDocument& document : all) EXPECT_EQ(by_first[document.tokens[0]], document);
    return read(folder.path("v"));
  };
  const std::vector<LabelledDocument> first = split(1);
  EXPECT_EQ(split(1), first);
  EXPECT_NE(split(2), first);
}

TEST(TokenCopy, SharesThatLeaveASideEmptyAreRefused) {
  const TemporaryFolder folder;
  write(folder.path("a"), some_documents(4, 0));
  for (const double share : {0.0, 1.0, -0.5, 0.01, 0.99})
    EXPECT_THROW(split_token_file(folder.path("a"), folder.path("t"), folder.path("v"), share, 1, false), UserError);
  EXPECT_FALSE(std::filesystem::exists(folder.path("t.idx")));
}

}  // namespace
}  // namespace sb
