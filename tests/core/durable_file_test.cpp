#include "core/files/durable_file.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <fstream>
#include <iterator>

#include "core/errors.h"
#include "tests/core/message_of.h"

namespace sb {
namespace {

namespace fs = std::filesystem;

class DurableFileTest : public testing::Test {
 protected:
  DurableFileTest() {
    std::string pattern = (fs::temp_directory_path() / "sb_durable_XXXXXX").string();
    directory_ = ::mkdtemp(pattern.data());
  }
  ~DurableFileTest() override {
    std::error_code ignored;
    fs::remove_all(directory_, ignored);
  }
  static std::string content(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }

  fs::path directory_;
};

TEST_F(DurableFileTest, WritesInPieces) {
  DurableFile file(directory_ / "a");
  file.write("one ", 4);
  file.write("", 0);
  file.write("two", 3);
  file.close();
  EXPECT_EQ(content(directory_ / "a"), "one two");
}

TEST_F(DurableFileTest, NewAndReplacedFiles) {
  write_new_file(directory_ / "a", "first and longer");
  EXPECT_EQ(content(directory_ / "a"), "first and longer");
  replace_file(directory_ / "a", "second");
  EXPECT_EQ(content(directory_ / "a"), "second");
  EXPECT_EQ(std::distance(fs::directory_iterator(directory_), fs::directory_iterator()), 1);  // no temporary stays
  EXPECT_NO_THROW(sync_file(directory_ / "a"));
  EXPECT_NO_THROW(sync_directory(directory_));
}

TEST_F(DurableFileTest, AReplacementThatFailsLeavesTheFileAsItWas) {
  write_new_file(directory_ / "a", "first");
  EXPECT_THROW(replace_file(directory_ / "a",
                            [](DurableFile& file) {
                              file.write("half", 4);
                              throw UserError("no room");
                            }),
               UserError);
  EXPECT_EQ(content(directory_ / "a"), "first");
  EXPECT_EQ(std::distance(fs::directory_iterator(directory_), fs::directory_iterator()), 1);  // no temporary stays
}

TEST_F(DurableFileTest, NamesThePathThatFails) {
  const fs::path missing = directory_ / "missing" / "a";
  EXPECT_TRUE(message_of([&] { DurableFile file(missing); }).starts_with(missing.string()));
  EXPECT_TRUE(message_of([&] { sync_file(missing); }).starts_with(missing.string()));
  EXPECT_TRUE(
      message_of([&] { sync_directory(directory_ / "missing"); }).starts_with((directory_ / "missing").string()));
}

// A device that is always full stands for a full disk.
TEST_F(DurableFileTest, AFullDiskIsReported) {
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "no /dev/full";
  const std::string text = message_of([] {
    DurableFile file("/dev/full");
    file.write("x", 1);
  });
  EXPECT_NE(text.find("/dev/full"), std::string::npos) << text;
  EXPECT_NE(text.find("No space left"), std::string::npos) << text;
}

}  // namespace
}  // namespace sb
