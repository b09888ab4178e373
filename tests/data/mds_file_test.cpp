#include <cstring>

#include "data/files/token_file.h"
#include "tests/data/temporary_folder.h"

namespace sb {
namespace {

template <typename T>
std::string packed_bytes(const std::vector<T>& values) {
  std::string bytes(values.size() * sizeof(T), '\0');
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// As MDSWriter of mosaicml-streaming 0.13 writes a shard: samples of one column that has its size in the sample.
std::string shard_of(const std::vector<std::string>& columns, const std::string& between = "{}") {
  std::vector<uint32_t> head{static_cast<uint32_t>(columns.size())};
  auto at = static_cast<uint32_t>(4 * (columns.size() + 2) + between.size());
  std::string samples;
  head.push_back(at);
  for (const std::string& column : columns) {
    samples += packed_bytes<uint32_t>({static_cast<uint32_t>(column.size())}) + column;
    head.push_back(at + static_cast<uint32_t>(samples.size()));
  }
  return packed_bytes(head) + between + samples;
}

std::string index_of(const std::string& encoding, const std::string& file = "shard.00000.mds") {
  return R"({"version": 2, "shards": [{"format": "mds", "column_names": ["input_ids"], "column_encodings": [")" +
         encoding + R"("], "column_sizes": [null], "compression": null, "zip_data": null, "raw_data": {"basename": ")" +
         file + R"("}}]})";
}

void write_folder(const TemporaryFolder& folder, const std::string& index, const std::string& shard) {
  write_bytes(folder.path("index.json"), index);
  write_bytes(folder.path("shard.00000.mds"), shard);
}

std::vector<std::vector<int32_t>> read_all(const std::string& path) {
  const auto file = open_token_file(path);
  std::vector<std::vector<int32_t>> documents;
  for (int64_t d = 0; d < file->documents(); ++d) {
    documents.emplace_back(static_cast<size_t>(file->length(d)));
    file->read(d, 0, file->length(d), documents.back().data());
  }
  return documents;
}

template <typename T>
std::string array(const std::vector<T>& values, const std::string& type = "") {
  return type + std::string(1, static_cast<char>(1 << 2 | 1)) +
         packed_bytes<uint16_t>({static_cast<uint16_t>(values.size())}) + packed_bytes(values);
}

TEST(MdsFile, SamplesAreDocuments) {
  const TemporaryFolder folder;
  const std::vector<std::vector<int32_t>> expected = {{1, 2, 3}, {70000}, {5, 6}};
  const auto shard = [&]<typename T>(T, const std::string& type) {
    std::vector<std::string> columns;
    for (const auto& document : expected)
      columns.push_back(array(std::vector<T>(document.begin(), document.end()), type));
    return shard_of(columns, R"({"version": 2})");
  };
  write_folder(folder, index_of("ndarray:uint32"), shard(uint32_t{}, ""));
  EXPECT_EQ(read_all(folder.path("")), expected);
  write_folder(folder, index_of("ndarray:int64"), shard(int64_t{}, ""));
  EXPECT_EQ(read_all(folder.path("")), expected);
  write_folder(folder, index_of("ndarray"), shard(int32_t{}, std::string(1, '\x21')));  // the type is in the sample
  EXPECT_EQ(read_all(folder.path("")), expected);
  int32_t token = 0;
  open_token_file(folder.path(""))->read(0, 1, 1, &token);
  EXPECT_EQ(token, 2);
}

TEST(MdsFile, OtherColumnsArePassedOver) {
  const TemporaryFolder folder;
  // An integer of 8 bytes, tokens of a fixed shape, a text.
  write_bytes(folder.path("index.json"),
              R"({"version": 2, "shards": [{"column_names": ["id", "input_ids", "source"], "column_encodings":
              ["int", "ndarray:uint16:3", "str"], "column_sizes": [8, 6, null], "raw_data": {"basename": "s"}}]})");
  const std::string sample =
      packed_bytes<uint32_t>({4}) + packed_bytes<int64_t>({7}) + packed_bytes<uint16_t>({9, 8, 65535}) + "book";
  write_bytes(folder.path("s"), packed_bytes<uint32_t>({1, 12, static_cast<uint32_t>(12 + sample.size())}) + sample);
  EXPECT_EQ(read_all(folder.path("")), (std::vector<std::vector<int32_t>>{{9, 8, 65535}}));
}

TEST(MdsFile, WhatCannotBeReadIsNamed) {
  const TemporaryFolder folder;
  const std::string good = shard_of({array<uint32_t>({1, 2, 3})});
  const auto error = [&](const std::string& index, const std::string& shard) -> std::string {
    write_folder(folder, index, shard);
    try {
      read_all(folder.path(""));
    } catch (const UserError& problem) {
      return problem.what();
    }
    return "no error";
  };
  const std::string index = index_of("ndarray:uint32");
  EXPECT_EQ(error(index, good), "no error");
  EXPECT_NE(error("{", good).find("not an index"), std::string::npos);
  EXPECT_NE(error(R"({"shards": []})", good).find("not an index"), std::string::npos);
  EXPECT_NE(error(index_of("pkl"), good).find("encoded as pkl"), std::string::npos);
  EXPECT_NE(error(index_of("ndarray:float32"), good).find("float32"), std::string::npos);
  EXPECT_NE(error(index_of("ndarray:uint32", "../shard"), good).find("not the name of a file"), std::string::npos);
  std::string packed = index;
  packed.replace(packed.find(R"("zip_data": null)"), 16, R"("zip_data": {})");
  packed.replace(packed.find("shard.00000.mds"), 15, "shard.00001.mds");
  EXPECT_NE(error(packed, good).find("compressed"), std::string::npos);
  for (size_t size = 0; size < good.size(); ++size) EXPECT_NE(error(index, good.substr(0, size)), "no error") << size;
  std::string flat = array<uint32_t>({1});
  flat[0] = static_cast<char>(2 << 2 | 1);
  EXPECT_NE(error(index, shard_of({flat})).find("dimensions"), std::string::npos);
  EXPECT_NE(error(index, shard_of({array<uint32_t>({4000000000u})})).find("4000000000"), std::string::npos);
  EXPECT_NE(error(index, packed_bytes<uint32_t>({0, 8})).find("no sample"), std::string::npos);
}

// So that they are counted, and named with what to do, like those of other files.
TEST(MdsFile, NegativeIdsAreLeftToTheCheckOfTheVocabulary) {
  const TemporaryFolder folder;
  write_folder(folder, index_of("ndarray:int64"), shard_of({array<int64_t>({1, -5})}));
  EXPECT_EQ(read_all(folder.path("")), (std::vector<std::vector<int32_t>>{{1, -5}}));
}

}  // namespace
}  // namespace sb
