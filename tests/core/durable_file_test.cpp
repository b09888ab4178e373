#include "core/files/durable_file.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <iterator>
#include <thread>

#include "core/errors.h"
#include "core/files/crc32c.h"
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

TEST_F(DurableFileTest, TheChecksumIsThatOfEverythingWritten) {
  std::string content(100'001, 'x');
  for (size_t i = 0; i < content.size(); ++i) content[i] = static_cast<char>(i * 13 + i / 101);
  for (const size_t piece : {size_t{1009}, size_t{65536}, content.size()}) {
    DurableFile file(directory_ / "a");
    EXPECT_EQ(file.checksum(), 0u);
    for (size_t at = 0; at < content.size(); at += piece)
      file.write(content.data() + at, std::min(piece, content.size() - at));
    file.close();
    EXPECT_EQ(file.checksum(), crc32c(0, content.data(), content.size())) << piece;
    EXPECT_TRUE(content == this->content(directory_ / "a")) << piece;
  }
}

TEST_F(DurableFileTest, AShorterFileLeavesNothingOfTheLonger) {
  for (const std::string& text : {std::string(9000, 'a'), std::string("b"), std::string()}) {
    write_new_file(directory_ / "a", text);
    EXPECT_EQ(content(directory_ / "a"), text);
    replace_file(directory_ / "b", text);
    EXPECT_EQ(content(directory_ / "b"), text);
  }
}

// A reader at any moment has the one or the other, and never a half.
TEST_F(DurableFileTest, ReadersSeeTheOldOrTheNew) {
  const std::string texts[] = {std::string(30'000, 'a'), std::string(70'000, 'b')};
  replace_file(directory_ / "a", texts[0]);
  std::atomic<bool> done = false;
  int64_t reads = 0, halves = 0;
  std::thread reader([&] {
    while (!done || reads == 0) {
      const std::string seen = content(directory_ / "a");
      ++reads;
      halves += seen != texts[0] && seen != texts[1];
    }
  });
  for (int i = 1; i <= 20; ++i) replace_file(directory_ / "a", texts[i % 2]);
  done = true;
  reader.join();
  EXPECT_GT(reads, 0);
  EXPECT_EQ(halves, 0);
}

// The old file may be read while the new one is written from it.
TEST_F(DurableFileTest, AReplacementMayReadWhatItReplaces) {
  write_new_file(directory_ / "a", "one ");
  replace_file(directory_ / "a", [&](DurableFile& file) {
    const std::string before = content(directory_ / "a") + "two";
    file.write(before.data(), before.size());
    EXPECT_EQ(content(directory_ / "a"), "one ");
  });
  EXPECT_EQ(content(directory_ / "a"), "one two");
}

TEST_F(DurableFileTest, WhatCannotBeReplacedIsAUserErrorAndLeavesNothing) {
  fs::create_directory(directory_ / "folder");
  const std::string text = message_of([&] { replace_file(directory_ / "folder", "x"); });
  EXPECT_TRUE(text.starts_with((directory_ / "folder").string() + ": ")) << text;
  EXPECT_NE(text.find("Is a directory"), std::string::npos) << text;
  EXPECT_EQ(std::distance(fs::directory_iterator(directory_), fs::directory_iterator()), 1);
  EXPECT_TRUE(fs::is_directory(directory_ / "folder"));
  const fs::path missing = directory_ / "missing" / "a";
  EXPECT_TRUE(message_of([&] { replace_file(missing, "x"); }).starts_with(missing.string()));
  EXPECT_TRUE(message_of([&] { sync_entry(missing); }).starts_with(missing.string() + ": cannot open its directory"));
  EXPECT_EQ(message_of([&] { sync_entry(directory_ / "folder"); }), kNothingThrown);
}

TEST_F(DurableFileTest, ALinkIsReplacedAndNotWhatItPointsTo) {
  write_new_file(directory_ / "target", "kept");
  fs::create_symlink(directory_ / "target", directory_ / "link");
  replace_file(directory_ / "link", "new");
  EXPECT_EQ(content(directory_ / "target"), "kept");
  EXPECT_EQ(content(directory_ / "link"), "new");
}

}  // namespace
}  // namespace sb
