#include "core/files/regular_file.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <fstream>
#include <vector>

#include "core/files/crc32c.h"
#include "core/files/record_file.h"
#include "tests/core/message_of.h"

namespace sb {
namespace {

namespace fs = std::filesystem;

class RegularFileTest : public testing::Test {
 protected:
  RegularFileTest() {
    std::string pattern = (fs::temp_directory_path() / "sb_regular_XXXXXX").string();
    directory_ = ::mkdtemp(pattern.data());
  }
  ~RegularFileTest() override { fs::remove_all(directory_); }

  fs::path directory_;
};

TEST_F(RegularFileTest, ReadsWhatIsThere) {
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{65535}, size_t{65536}, size_t{200001}}) {
    std::string content(bytes, 'x');
    for (size_t i = 0; i < bytes; ++i) content[i] = static_cast<char>(i * 31 + i / 251);
    std::ofstream(directory_ / "file", std::ios::binary) << content;
    EXPECT_EQ(read_regular_file(directory_ / "file"), content);
    EXPECT_EQ(read_regular_file(directory_ / "file", static_cast<int64_t>(bytes)), content);
    if (bytes == 0) continue;
    EXPECT_NE(message_of([&] {
                read_regular_file(directory_ / "file", static_cast<int64_t>(bytes) - 1);
              }).find("file: larger than"),
              std::string::npos);
    RegularFile file(directory_ / "file");
    EXPECT_EQ(file.size(), static_cast<int64_t>(bytes));
    file.seek(static_cast<int64_t>(bytes) - 1);
    char last[2];
    EXPECT_EQ(file.read(last, 2), 1u);
    EXPECT_EQ(last[0], content.back());
  }
}

TEST_F(RegularFileTest, OtherKindsAreRefusedAtOnce) {
  ASSERT_EQ(::mkfifo((directory_ / "pipe").c_str(), 0600), 0);
  const std::pair<fs::path, const char*> cases[] = {{directory_, "it is a folder"},
                                                    {directory_ / "pipe", "it is a pipe"},
                                                    {"/dev/null", "it is a device"},
                                                    {directory_ / "none", "No such file or directory"}};
  for (const auto& [path, reason] : cases) {
    const std::string message = message_of([&] { check_regular_file(path); });
    EXPECT_TRUE(message.starts_with(path.string() + ": ")) << message;
    EXPECT_NE(message.find(reason), std::string::npos) << message;
  }
}

TEST_F(RegularFileTest, RecordsAreAppendedOrBegunAnew) {
  const fs::path path = directory_ / "log";
  {
    RecordFile file(path, RecordFile::Start::anew);
    file.write("one\n");
  }
  {
    RecordFile file(path, RecordFile::Start::append);
    file.write("two\n");
    EXPECT_EQ(read_regular_file(path), "one\ntwo\n");  // at once
    file.close();
  }
  RecordFile(path, RecordFile::Start::anew).write("three\n");
  EXPECT_EQ(read_regular_file(path), "three\n");
  EXPECT_NE(message_of([] { RecordFile("/dev/full", RecordFile::Start::append).write("x"); }).find("/dev/full"),
            std::string::npos);
}

TEST(Crc32c, OfPiecesIsThatOfTheWhole) {
  EXPECT_EQ(crc32c(0, "123456789", 9), 0xe3069283u);  // the standard's own example
  std::vector<char> data(70001);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<char>(i * i + 7 * i);
  const uint32_t whole = crc32c(0, data.data(), data.size());
  for (const size_t cut : {size_t{0}, size_t{1}, size_t{8}, size_t{4096}, size_t{65537}, data.size()}) {
    const size_t rest = data.size() - cut;
    EXPECT_EQ(crc32c_joined(crc32c(0, data.data(), cut), crc32c(0, data.data() + cut, rest), rest), whole) << cut;
  }
}

}  // namespace
}  // namespace sb
