#include "data/files/token_file.h"

#include <gtest/gtest.h>

#include "core/errors.h"
#include "core/random.h"
#include "data/files/label_mask.h"
#include "data/files/token_writer.h"
#include "tests/data/temporary_folder.h"

namespace sb {
namespace {

using Document = std::vector<int32_t>;

Document read_document(const TokenFile& file, int64_t d) {
  Document tokens(static_cast<size_t>(file.length(d)));
  file.read(d, 0, file.length(d), tokens.data());
  return tokens;
}

std::vector<Document> random_documents(uint64_t seed, int count, uint64_t vocab) {
  Random random(seed);
  std::vector<Document> documents(static_cast<size_t>(count));
  for (Document& document : documents) {
    document.resize(1 + random.below(300));
    for (int32_t& token : document) token = static_cast<int32_t>(random.below(vocab));
  }
  return documents;
}

void write_documents(const std::string& prefix, const std::vector<Document>& documents, TokenType type) {
  TokenWriter::Options options;
  options.type = type;
  TokenWriter writer(prefix, options);
  for (const Document& document : documents) writer.add(document);
  writer.finish();
}

struct Index {
  std::string magic = std::string("MMIDIDX\0\0", 9);
  uint64_t version = 1;
  uint8_t code = 8;
  uint64_t sequences = 3, entries = 3;
  std::vector<int32_t> lengths = {2, 1, 3};
  std::vector<int64_t> pointers = {0, 4, 6};
  std::vector<int64_t> documents = {0, 2, 3};

  std::string bytes() const {
    std::string out = magic + bytes_of(version, 8) + bytes_of(code, 1) + bytes_of(sequences, 8) + bytes_of(entries, 8);
    for (int32_t v : lengths) out += bytes_of(static_cast<uint32_t>(v), 4);
    for (int64_t v : pointers) out += bytes_of(static_cast<uint64_t>(v), 8);
    for (int64_t v : documents) out += bytes_of(static_cast<uint64_t>(v), 8);
    return out;
  }
};

// Six tokens: 1, 513 (0x0201), 65535, 7, 8, 9.
const std::string kSixTokens("\x01\x00\x01\x02\xff\xff\x07\x00\x08\x00\x09\x00", 12);

TEST(MegatronFile, BuiltByteByByteFromThePublishedLayout) {
  TemporaryFolder folder;
  write_bytes(folder.path("a.idx"), Index().bytes());
  write_bytes(folder.path("a.bin"), kSixTokens);
  for (const char* spelling : {"a", "a.idx", "a.bin"}) {
    const auto file = open_token_file(folder.path(spelling));
    ASSERT_EQ(file->documents(), 2);
    EXPECT_EQ(file->type(), TokenType::u16);
    // The first document is made of two sequences.
    EXPECT_EQ(read_document(*file, 0), (Document{1, 513, 65535}));
    EXPECT_EQ(read_document(*file, 1), (Document{7, 8, 9}));
    Document part(2);
    file->read(0, 1, 2, part.data());
    EXPECT_EQ(part, (Document{513, 65535}));
    EXPECT_EQ(file->mask(), nullptr);
    EXPECT_EQ(file->total_tokens(), 6);
  }
}

TEST(MegatronFile, ThirtyTwoBitTokensAndSequencesInAnyOrder) {
  TemporaryFolder folder;
  Index index;
  index.code = 4;
  index.sequences = 2;
  index.lengths = {1, 2};
  index.pointers = {8, 0};
  index.documents = {0, 1, 2};
  write_bytes(folder.path("a.idx"), index.bytes());
  write_bytes(folder.path("a.bin"), bytes_of(70000, 4) + bytes_of(151643, 4) + bytes_of(3, 4));
  const auto file = open_token_file(folder.path("a"));
  EXPECT_EQ(read_document(*file, 0), Document{3});
  EXPECT_EQ(read_document(*file, 1), (Document{70000, 151643}));
}

TEST(MegatronFile, WithoutDocumentsEverySequenceIsOne) {
  TemporaryFolder folder;
  Index index;
  index.entries = 1;
  index.documents = {0};
  write_bytes(folder.path("a.idx"), index.bytes());
  write_bytes(folder.path("a.bin"), kSixTokens);
  EXPECT_EQ(open_token_file(folder.path("a"))->documents(), 3);
}

TEST(MegatronFile, WrittenFilesHaveThePublishedLayout) {
  TemporaryFolder folder;
  write_documents(folder.path("a"), {{1, 513, 65535}, {7, 8, 9}}, TokenType::u16);
  Index expected;
  expected.sequences = 2;
  expected.lengths = {3, 3};
  expected.pointers = {0, 6};
  expected.documents = {0, 1, 2};
  EXPECT_EQ(read_bytes(folder.path("a.idx")), expected.bytes());
  EXPECT_EQ(read_bytes(folder.path("a.bin")), kSixTokens);
  EXPECT_FALSE(std::filesystem::exists(folder.path("a.mask")));
  EXPECT_FALSE(std::filesystem::exists(folder.path("a.partial")));
}

TEST(MegatronFile, WrittenAndReadBackIdentically) {
  TemporaryFolder folder;
  for (const auto& [type, vocab] : {std::pair{TokenType::u16, 65536}, std::pair{TokenType::i32, INT32_MAX}}) {
    const std::vector<Document> documents = random_documents(4, 1000, static_cast<uint64_t>(vocab));
    const std::string prefix = folder.path(type == TokenType::u16 ? "short" : "long");
    write_documents(prefix, documents, type);
    const auto file = open_token_file(prefix);
    ASSERT_EQ(file->documents(), 1000);
    for (int64_t d = 0; d < 1000; ++d) ASSERT_EQ(read_document(*file, d), documents[static_cast<size_t>(d)]);
  }
}

TEST(MegatronFile, EveryTruncationIsAnError) {
  TemporaryFolder folder;
  const std::string index = Index().bytes();
  write_bytes(folder.path("a.bin"), kSixTokens);
  for (size_t size = 0; size < index.size(); ++size) {
    write_bytes(folder.path("a.idx"), index.substr(0, size));
    const std::string error = user_error([&] { open_token_file(folder.path("a")); });
    EXPECT_NE(error.find("a.idx"), std::string::npos) << size << ": " << error;
  }
  write_bytes(folder.path("a.idx"), index + "x");
  EXPECT_THROW(open_token_file(folder.path("a")), UserError);
  write_bytes(folder.path("a.idx"), index);
  for (size_t size = 0; size < kSixTokens.size(); ++size) {
    write_bytes(folder.path("a.bin"), kSixTokens.substr(0, size));
    EXPECT_THROW(open_token_file(folder.path("a")), UserError) << size;
  }
}

TEST(MegatronFile, HostileIndexes) {
  TemporaryFolder folder;
  write_bytes(folder.path("a.bin"), kSixTokens);
  const auto error_with = [&](const std::function<void(Index&)>& change) {
    Index index;
    change(index);
    write_bytes(folder.path("a.idx"), index.bytes());
    return user_error([&] { open_token_file(folder.path("a")); });
  };
  EXPECT_EQ(error_with([](Index&) {}), "no error");
  const auto expect = [](const std::string& error, const char* part) {
    EXPECT_NE(error.find(part), std::string::npos) << error;
  };
  expect(error_with([](Index& i) { i.magic[0] = 'X'; }), "MMIDIDX");
  expect(error_with([](Index& i) { i.version = 2; }), "version 2");
  expect(error_with([](Index& i) { i.code = 7; }), "f32");
  expect(error_with([](Index& i) { i.code = 200; }), "unknown");
  expect(error_with([](Index& i) { i.sequences = 4; }), "truncated or damaged");
  expect(error_with([](Index& i) { i.sequences = UINT64_MAX; }), "truncated or damaged");
  expect(error_with([](Index& i) { i.sequences = UINT64_MAX / 12 + 2; }), "truncated or damaged");
  expect(error_with([](Index& i) { i.lengths[1] = -1; }), "length -1");
  expect(error_with([](Index& i) { i.lengths[2] = 4; }), "outside");
  expect(error_with([](Index& i) { i.lengths[2] = INT32_MAX; }), "outside");
  expect(error_with([](Index& i) { i.pointers[0] = -2; }), "outside");
  expect(error_with([](Index& i) { i.pointers[0] = 1; }), "outside");
  expect(error_with([](Index& i) { i.pointers[0] = INT64_MAX - 1; }), "outside");
  expect(error_with([](Index& i) { i.documents[0] = 1; }), "document index");
  expect(error_with([](Index& i) { i.documents[1] = 4; }), "document index");
  expect(error_with([](Index& i) { i.documents[1] = -1; }), "document index");
  expect(error_with([](Index& i) { i.documents[2] = 2; }), "document index");
  expect(error_with([](Index& i) {
           i.sequences = 0;
           i.entries = 1;
           i.lengths.clear();
           i.pointers.clear();
           i.documents = {0};
         }),
         "empty");
}

TEST(TokenFile, WhatIsNotThereIsNamed) {
  TemporaryFolder folder;
  EXPECT_NE(user_error([&] { open_token_file(folder.path("none")); }).find("none"), std::string::npos);
  write_bytes(folder.path("text.bin"), "just text");
  EXPECT_NE(user_error([&] { open_token_file(folder.path("text.bin")); }).find("data tokenize"), std::string::npos);
  std::filesystem::create_directory(folder.path("folder"));
  EXPECT_NE(user_error([&] { open_token_file(folder.path("folder")); }).find("folder/*\" names"), std::string::npos);
  std::filesystem::create_directory(folder.path("half.partial"));
  EXPECT_NE(user_error([&] { open_token_file(folder.path("half")); }).find("unfinished"), std::string::npos);
  EXPECT_THROW(expand_token_paths({folder.path("no*")}), UserError);
}

TEST(TokenFile, Patterns) {
  TemporaryFolder folder;
  for (const char* name : {"b", "a"}) write_documents(folder.path(name), {{1, 2}}, TokenType::u16);
  EXPECT_EQ(expand_token_paths({folder.path("*")}),
            (std::vector<std::string>{folder.path("a.idx"), folder.path("b.idx")}));
}

TEST(TokenFile, APatternMayNameEitherFileOfAPair) {
  TemporaryFolder folder;
  for (const char* name : {"a1", "a2", "b"}) write_documents(folder.path(name), {{1, 2}}, TokenType::u16);
  write_bytes(folder.path("a3.bin"), "an llm.c file, judged when it is opened");
  const std::vector<std::string> pairs = {folder.path("a1.idx"), folder.path("a2.idx")};
  EXPECT_EQ(expand_token_paths({folder.path("a[12].bin")}), pairs);
  EXPECT_EQ(expand_token_paths({folder.path("a[12].idx")}), pairs);
  EXPECT_EQ(expand_token_paths({folder.path("a[12].*")}), pairs);
  EXPECT_EQ(expand_token_paths({folder.path("*.bin")}),
            (std::vector<std::string>{folder.path("a1.idx"), folder.path("a2.idx"), folder.path("a3.bin"),
                                      folder.path("b.idx")}));
}

TEST(TokenFile, APatternWithoutTokenFilesIsRefused) {
  TemporaryFolder folder;
  write_documents(folder.path("a"), {{1, 2}}, TokenType::u16);
  for (const char* name : {"notes.txt", "more.txt"}) write_bytes(folder.path(name), "text");
  const std::string error = user_error([&] { expand_token_paths({folder.path("a*"), folder.path("*.txt")}); });
  EXPECT_NE(error.find("*.txt: 2 files match this pattern, but none of them is a token file"), std::string::npos)
      << error;
}

TEST(LlmcFile, BothVersions) {
  TemporaryFolder folder;
  const std::string zeros(253 * 4, '\0');
  write_bytes(folder.path("gpt2.bin"), bytes_of(20240520, 4) + bytes_of(1, 4) + bytes_of(6, 4) + zeros +
                                           bytes_of(50256, 2) + bytes_of(11, 2) + bytes_of(12, 2) + bytes_of(50256, 2) +
                                           bytes_of(65535, 2) + bytes_of(14, 2));
  auto file = open_token_file(folder.path("gpt2.bin"));
  ASSERT_EQ(file->documents(), 2);
  EXPECT_EQ(read_document(*file, 0), (Document{50256, 11, 12}));
  EXPECT_EQ(read_document(*file, 1), (Document{50256, 65535, 14}));
  write_bytes(folder.path("llama3.bin"), bytes_of(20240801, 4) + bytes_of(7, 4) + bytes_of(3, 4) + zeros +
                                             bytes_of(5, 4) + bytes_of(128000, 4) + bytes_of(100257, 4));
  file = open_token_file(folder.path("llama3.bin"));
  ASSERT_EQ(file->documents(), 2);
  EXPECT_EQ(read_document(*file, 0), Document{5});
  EXPECT_EQ(read_document(*file, 1), (Document{128000, 100257}));
}

TEST(LlmcFile, Damaged) {
  TemporaryFolder folder;
  const std::string zeros(253 * 4, '\0');
  const auto error = [&](uint64_t magic, uint64_t version, uint64_t count, size_t tokens) {
    write_bytes(folder.path("x.bin"),
                bytes_of(magic, 4) + bytes_of(version, 4) + bytes_of(count, 4) + zeros + std::string(2 * tokens, '\1'));
    return user_error([&] { open_token_file(folder.path("x.bin")); });
  };
  EXPECT_EQ(error(20240520, 1, 5, 5), "no error");
  EXPECT_NE(error(20240520, 2, 5, 5).find("version 2"), std::string::npos);
  EXPECT_NE(error(20240520, 1, 5, 4).find("truncated"), std::string::npos);
  EXPECT_NE(error(20240520, 1, 5, 6).find("damaged"), std::string::npos);
  EXPECT_NE(error(20240520, 1, 0, 0).find("empty"), std::string::npos);
  EXPECT_NE(error(20240520, 1, 0xFFFFFFFF, 5).find("empty"), std::string::npos);
  EXPECT_NE(error(7, 1, 5, 5).find("neither"), std::string::npos);
  write_bytes(folder.path("x.bin"), bytes_of(20240520, 4) + "short");
  EXPECT_NE(user_error([&] { open_token_file(folder.path("x.bin")); }).find("truncated"), std::string::npos);
}

TEST(LabelMask, KnowsEveryTokenAndTheCounts) {
  TemporaryFolder folder;
  const std::vector<Document> documents = random_documents(9, 200, 1000);
  Random random(2);
  std::vector<std::vector<uint8_t>> targets;
  {
    TokenWriter writer(folder.path("a"), {});
    for (const Document& document : documents) {
      std::vector<uint8_t> target(document.size());
      for (uint8_t& t : target) t = static_cast<uint8_t>(random.below(2));
      if (document.size() > 1) target.back() = 1;
      const bool all = document.size() == 1 || random.below(3) == 0;
      if (all) target.assign(document.size(), 1);
      writer.add(document, all ? std::span<const uint8_t>() : target);
      targets.push_back(target);
    }
    writer.finish();
  }
  const auto file = open_token_file(folder.path("a"));
  ASSERT_NE(file->mask(), nullptr);
  for (int64_t d = 0; d < 200; ++d) {
    const auto& target = targets[static_cast<size_t>(d)];
    int64_t valid = 0;
    for (size_t t = 0; t < target.size(); ++t) {
      const bool counts = t > 0 && target[t];
      valid += counts;
      ASSERT_EQ(file->mask()->is_target(d, static_cast<int64_t>(t)), counts) << d << " " << t;
    }
    ASSERT_EQ(file->mask()->valid_targets(d), valid);
    const auto n = static_cast<int64_t>(target.size());
    for (const auto& [begin, end] : {std::pair{int64_t{0}, n}, std::pair{n / 3, n}, std::pair{n / 5, n / 2}}) {
      int64_t expected = 0;
      for (int64_t t = std::max<int64_t>(1, begin); t < end; ++t) expected += target[static_cast<size_t>(t)];
      ASSERT_EQ(file->mask()->count(d, begin, end), expected);
    }
  }
}

TEST(LabelMask, HasTheDocumentedLayout) {
  TemporaryFolder folder;
  TokenWriter writer(folder.path("a"), {});
  writer.add(Document{5, 6, 7}, std::vector<uint8_t>{0, 1, 0});
  writer.add(Document{5, 6});
  writer.add(Document{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, std::vector<uint8_t>{1, 1, 0, 0, 0, 0, 0, 0, 1, 1});
  writer.finish();
  std::string expected = "SBLABELS" + bytes_of(1, 8) + bytes_of(3, 8) + bytes_of(15, 8);
  expected += bytes_of(1, 4) + bytes_of(1, 4) + bytes_of(3, 4) + bytes_of(0, 4);
  expected += bytes_of(0, 8) + bytes_of(1, 8) + bytes_of(1, 8) + bytes_of(3, 8);
  expected += std::string("\x02\x02\x03", 3);  // 0b010; nothing; tokens 1, 8 and 9 (the first token never counts)
  EXPECT_EQ(read_bytes(folder.path("a.mask")), expected);
}

TEST(LabelMask, DamagedOrForeignMasks) {
  TemporaryFolder folder;
  const auto write = [&](const char* name, size_t more) {
    TokenWriter writer(folder.path(name), {});
    writer.add(Document{5, 6, 7}, std::vector<uint8_t>{0, 1, 0});
    writer.add(Document(10 + more, 3), std::vector<uint8_t>(10 + more, 1));
    writer.add(Document(12, 3), std::vector<uint8_t>{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1});
    writer.finish();
  };
  write("a", 0);
  write("b", 1);
  const std::string mask = read_bytes(folder.path("a.mask"));
  const auto error_with = [&](const std::string& bytes) {
    write_bytes(folder.path("a.mask"), bytes);
    return user_error([&] { open_token_file(folder.path("a")); });
  };
  EXPECT_EQ(error_with(mask), "no error");
  for (size_t size = 0; size < mask.size(); ++size) EXPECT_NE(error_with(mask.substr(0, size)), "no error") << size;
  EXPECT_NE(error_with(mask + "x"), "no error");
  EXPECT_NE(error_with(read_bytes(folder.path("b.mask"))).find("from another token file"), std::string::npos);
  std::string none = mask;
  none.replace(32, 4, bytes_of(0, 4));
  EXPECT_NE(error_with(none).find("no target"), std::string::npos);
  std::string many = mask;
  many.replace(32, 4, bytes_of(3, 4));
  EXPECT_NE(error_with(many).find("3 targets"), std::string::npos);
  std::string version = mask;
  version[8] = 2;
  EXPECT_NE(error_with(version).find("version 2"), std::string::npos);
}

}  // namespace
}  // namespace sb
