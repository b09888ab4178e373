#include "model/tensors/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "tests/model/model_fixture.h"

namespace sb::test {
namespace {

// A file from its header and data, with a header length that may lie.
std::string file_bytes(const std::string& header, const std::string& data, uint64_t length) {
  std::string bytes(sizeof length, '\0');
  std::memcpy(bytes.data(), &length, sizeof length);
  return bytes + header + data;
}

std::string file_bytes(const std::string& header, const std::string& data) {
  return file_bytes(header, data, header.size());
}

SafetensorsHeader parse_bytes(const std::string& bytes) {
  return parse_safetensors(std::as_bytes(std::span(bytes)), "weights.safetensors");
}

// The parser's complaint; it always starts with the file's name.
std::string complaint_of(const std::string& bytes) {
  const std::string text = user_error([&] { parse_bytes(bytes); });
  EXPECT_TRUE(text.starts_with("weights.safetensors: ")) << text;
  return text;
}

std::string complaint_of(const std::string& header, const std::string& data) {
  return complaint_of(file_bytes(header, data));
}

TEST(SafetensorsTest, ReadsAWellFormedFile) {
  const SafetensorsHeader header = parse_bytes(file_bytes(
      R"({"b":{"dtype":"F32","shape":[2,1],"data_offsets":[4,12]},"__metadata__":{"format":"pt"},)"
      R"("a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]},"scalar":{"dtype":"F32","shape":[],"data_offsets":[12,16]}}   )",
      std::string(16, 'x')));
  ASSERT_EQ(header.entries.size(), 3u);
  EXPECT_EQ(header.entries[0].name, "a");  // by place in the file
  EXPECT_EQ(header.entries[1].name, "b");
  EXPECT_EQ(header.entries[1].shape, (std::vector<int64_t>{2, 1}));
  EXPECT_EQ(header.entries[1].elements(), 2);
  EXPECT_EQ(header.entries[1].shape_text(), "[2, 1]");
  EXPECT_EQ(header.entries[2].elements(), 1);
  EXPECT_EQ(header.metadata.at("format"), "pt");
}

TEST(SafetensorsTest, NoTensorsAndEmptyTensorsAreFine) {
  EXPECT_TRUE(parse_bytes(file_bytes("{}", "")).entries.empty());
  EXPECT_EQ(parse_bytes(file_bytes(R"({"a":{"dtype":"F32","shape":[0,5],"data_offsets":[0,0]},)"
                                   R"("b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
                                   "x"))
                .entries.size(),
            2u);
}

TEST(SafetensorsTest, RefusesLyingLengths) {
  EXPECT_SAYS(complaint_of(std::string("1234567")), "too few");
  EXPECT_SAYS(complaint_of(file_bytes("{}", "", 3)), "cut short");
  EXPECT_SAYS(complaint_of(file_bytes("{}", "", 100'000'001)), "limit");
  EXPECT_SAYS(complaint_of(file_bytes("{}", "", std::numeric_limits<uint64_t>::max())), "limit");
  EXPECT_SAYS(complaint_of(file_bytes("{}", "", 0)), "not valid JSON");
  EXPECT_SAYS(complaint_of(file_bytes("{}", "", 1)), "not valid JSON");
}

TEST(SafetensorsTest, RefusesHeadersThatAreNoSuchJson) {
  EXPECT_SAYS(complaint_of("[]", ""), "not a JSON object");
  EXPECT_SAYS(complaint_of("7", ""), "not a JSON object");
  EXPECT_SAYS(complaint_of("{} {}", ""), "not valid JSON");
  EXPECT_SAYS(complaint_of("{\"\xff\":1}", ""), "not valid JSON");
  EXPECT_SAYS(complaint_of(std::string(100'000, '['), ""), "nests deeper");
  std::string deep;
  for (int i = 0; i < 100'000; ++i) deep += "{\"a\":";
  EXPECT_SAYS(complaint_of(deep, ""), "nests deeper");
  EXPECT_SAYS(complaint_of(R"({"__metadata__":3})", ""), "__metadata__");
  EXPECT_SAYS(complaint_of(R"({"__metadata__":{"format":3}})", ""), "'format'");
}

TEST(SafetensorsTest, RefusesDuplicateNames) {
  EXPECT_SAYS(complaint_of(R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                           R"("w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
                           "x"),
              "'w' appears twice");
  EXPECT_SAYS(complaint_of(R"({"w":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})", "x"),
              "'dtype' appears twice");
  // The same name inside different tensors is what every file has.
  EXPECT_NO_THROW(parse_bytes(file_bytes(R"({"v":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                                         R"("w":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
                                         "xx")));
}

TEST(SafetensorsTest, RefusesBadFields) {
  const auto tensor = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return complaint_of(
        R"({"layer.w":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}", "abcd");
  };
  EXPECT_SAYS(tensor(R"("F33")", "[1]", "[0,4]"), "tensor 'layer.w' has the unknown type 'F33'");
  EXPECT_SAYS(tensor("3", "[1]", "[0,4]"), "tensor 'layer.w' has no valid 'dtype'");
  EXPECT_SAYS(tensor(R"("F32")", "1", "[0,4]"), "tensor 'layer.w' has no valid 'shape'");
  EXPECT_SAYS(tensor(R"("F32")", "[-1]", "[0,4]"), "tensor 'layer.w': dimensions");
  EXPECT_SAYS(tensor(R"("F32")", "[1.5]", "[0,4]"), "tensor 'layer.w': dimensions");
  EXPECT_SAYS(tensor(R"("F32")", R"(["1"])", "[0,4]"), "tensor 'layer.w': dimensions");
  EXPECT_SAYS(tensor(R"("F32")", "[18446744073709551615]", "[0,4]"), "tensor 'layer.w': dimensions");
  EXPECT_SAYS(tensor(R"("F32")", "[1]", "[0]"), "two numbers");
  EXPECT_SAYS(tensor(R"("F32")", "[1]", "[0,4,4]"), "two numbers");
  EXPECT_SAYS(tensor(R"("F32")", "[1]", "{}"), "no valid 'data_offsets'");
  EXPECT_SAYS(tensor(R"("F32")", "[1]", "[-4,0]"), "tensor 'layer.w': data_offsets");
  EXPECT_SAYS(complaint_of(R"({"layer.w":5})", ""), "tensor 'layer.w' has no valid 'dtype'");
  EXPECT_SAYS(complaint_of(R"({"layer.w":{"dtype":"F32","shape":[1]}})", "abcd"), "no valid 'data_offsets'");
}

TEST(SafetensorsTest, RefusesSizesThatDoNotFit) {
  const auto tensor = [](const std::string& shape, const std::string& offsets) {
    return complaint_of(R"({"w":{"dtype":"F32","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}", "abcdefgh");
  };
  EXPECT_SAYS(tensor("[3]", "[0,8]"), "takes 12 bytes");
  EXPECT_SAYS(tensor("[1]", "[0,8]"), "takes 4 bytes");
  EXPECT_SAYS(tensor("[2]", "[8,0]"), "takes 8 bytes");
  EXPECT_SAYS(tensor("[4611686018427387904]", "[0,0]"), "overflows");  // 4 · 2^62 would wrap to 0
  EXPECT_SAYS(tensor("[4294967296,4294967296]", "[0,0]"), "overflows");
  EXPECT_SAYS(tensor("[4]", "[0,16]"), "cut short");
  EXPECT_SAYS(tensor("[1]", "[0,4]"), "4 bytes after the last tensor");
  EXPECT_SAYS(tensor("[1]", "[4,8]"), "4 bytes before tensor 'w'");
  EXPECT_SAYS(tensor("[2305843009213693951]", "[0,9223372036854775804]"), "cut short");
  EXPECT_SAYS(complaint_of("{}", "x"), "1 bytes after");
}

TEST(SafetensorsTest, RefusesOverlapAndHoles) {
  const auto two = [](const std::string& first, const std::string& second) {
    return complaint_of(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)" + first +
                            R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + second + "}}",
                        "abcdefgh");
  };
  EXPECT_SAYS(two("[0,4]", "[3,7]"), "tensor 'b' overlaps");
  EXPECT_SAYS(two("[0,4]", "[0,4]"), "overlaps");
  EXPECT_SAYS(two("[4,8]", "[1,5]"), "before tensor 'b'");
  EXPECT_SAYS(two("[0,4]", "[5,9]"), "1 bytes before tensor 'b'");
}

TEST(SafetensorsTest, LongNamesDoNotDrownTheMessage) {
  const std::string text = complaint_of("{\"" + std::string(100'000, 'n') + "\":1}", "");
  EXPECT_LT(text.size(), 300u);
}

// Any prefix of a good file is refused with a message, never read beyond its end.
TEST(SafetensorsTest, RefusesEveryTruncation) {
  const std::string whole = file_bytes(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "abcdefgh");
  EXPECT_NO_THROW(parse_bytes(whole));
  for (size_t size = 0; size < whole.size(); ++size) EXPECT_NE(complaint_of(whole.substr(0, size)), "");
}

class SafetensorsFileTest : public testing::Test {
 protected:
  TemporaryDirectory directory_;
};

TEST_F(SafetensorsFileTest, ReadsTheThreeTypesFromUnalignedData) {
  // The data starts at an odd byte.
  const std::string header =
      R"({"f":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"BF16","shape":[2],"data_offsets":[8,12]},)"
      R"("h":{"dtype":"F16","shape":[1,2],"data_offsets":[12,16]},"i":{"dtype":"I32","shape":[1],"data_offsets":[16,20]}})";
  const float floats[] = {1.5f, -3.25f};
  const uint16_t bf16[] = {0x3f80, 0xc000}, f16[] = {0x3c00, 0xc100};
  std::string data(20, '\0');
  std::memcpy(data.data(), floats, 8);
  std::memcpy(data.data() + 8, bf16, 4);
  std::memcpy(data.data() + 12, f16, 4);
  const std::string padding((8 + header.size()) % 2 == 0 ? 1 : 0, ' ');
  write_file(directory_.path() / "x.safetensors", file_bytes(header + padding, data));

  const SafetensorsFile file(directory_.path() / "x.safetensors");
  const auto values = [&](const char* name) {
    std::vector<float> result(2);
    file.read_f32(*file.find(name), result);
    return result;
  };
  EXPECT_EQ(values("f"), (std::vector<float>{1.5f, -3.25f}));
  EXPECT_EQ(values("b"), (std::vector<float>{1.0f, -2.0f}));
  EXPECT_EQ(values("h"), (std::vector<float>{1.0f, -2.5f}));
  EXPECT_EQ(file.find("nothing"), nullptr);
  std::vector<float> one(1);
  const std::string text = user_error([&] { file.read_f32(*file.find("i"), one); });
  EXPECT_SAYS(text, "x.safetensors");
  EXPECT_SAYS(text, "tensor 'i' has the type I32");
  EXPECT_THROW(file.read_f32(*file.find("f"), one), InternalError);
}

TEST_F(SafetensorsFileTest, NamesFilesItCannotRead) {
  const auto opening = [&](const std::filesystem::path& path) {
    const std::string text = user_error([&] { SafetensorsFile file(path); });
    EXPECT_TRUE(text.starts_with(path.string())) << text;
    return text;
  };
  EXPECT_SAYS(opening(directory_.path() / "missing.safetensors"), "cannot be opened");
  EXPECT_SAYS(opening(directory_.path()), "not a regular file");
  write_file(directory_.path() / "empty.safetensors", "");
  EXPECT_SAYS(opening(directory_.path() / "empty.safetensors"), "empty");
  write_file(directory_.path() / "bad.safetensors", "not a safetensors file at all");
  EXPECT_SAYS(opening(directory_.path() / "bad.safetensors"), "limit");
}

TEST_F(SafetensorsFileTest, WritesWhatItReads) {
  const std::vector<float> a = {1, 2, 3, 4, 5, 6}, b = {0.1f, -1e30f, 1e-40f};
  const std::vector<SafetensorsTensor> tensors = {{"second", {2, 3}, a.data()}, {"first", {3}, b.data()}};
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const auto path = directory_.path() / "w.safetensors";
    write_safetensors(path, tensors, dtype);
    const SafetensorsFile file(path);
    EXPECT_EQ(file.header().metadata.at("format"), "pt");
    EXPECT_EQ(file.header().data_offset % 8, 0);
    ASSERT_EQ(file.header().entries.size(), 2u);
    EXPECT_EQ(file.find("second")->shape, (std::vector<int64_t>{2, 3}));
    std::vector<float> got_a(6), got_b(3);
    file.read_f32(*file.find("second"), got_a);
    file.read_f32(*file.find("first"), got_b);
    EXPECT_EQ(got_a, a);  // small whole numbers are exact in bf16
    if (dtype == DType::f32) {
      EXPECT_EQ(got_b, b);
    } else {
      EXPECT_EQ(file.find("first")->dtype, "BF16");
      EXPECT_NEAR(got_b[0], 0.1f, 0.1f / 256);
    }
  }
}

TEST_F(SafetensorsFileTest, WritesLargeBf16InPieces) {
  std::vector<float> values((1 << 20) + 3);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 200);
  write_safetensors(directory_.path() / "w.safetensors",
                    std::vector<SafetensorsTensor>{{"w", {std::ssize(values)}, values.data()}}, DType::bf16);
  const SafetensorsFile file(directory_.path() / "w.safetensors");
  std::vector<float> got(values.size());
  file.read_f32(*file.find("w"), got);
  EXPECT_EQ(got, values);
}

TEST_F(SafetensorsFileTest, RefusesOtherTypesAndNamesPathsItCannotWrite) {
  const float one = 1;
  const std::vector<SafetensorsTensor> tensors = {{"a", {1}, &one}};
  EXPECT_THROW(write_safetensors(directory_.path() / "w", tensors, DType::f16), InternalError);
  const std::string text = user_error([&] { write_safetensors(directory_.path() / "no" / "w", tensors, DType::f32); });
  EXPECT_SAYS(text, (directory_.path() / "no" / "w").string());
}

// A device that is always full stands for a full disk.
TEST_F(SafetensorsFileTest, AFullDiskIsReported) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full";
  const auto link = directory_.path() / "w.safetensors";
  std::filesystem::create_symlink("/dev/full", link);
  const float one = 1;
  const std::string text = user_error([&] {
    write_safetensors(link, std::vector<SafetensorsTensor>{{"a", {1}, &one}}, DType::f32);
  });
  EXPECT_SAYS(text, "No space left");
  EXPECT_SAYS(text, "w.safetensors");
  EXPECT_FALSE(std::filesystem::exists(std::filesystem::symlink_status(link)));  // nothing half-written stays
}

}  // namespace
}  // namespace sb::test
