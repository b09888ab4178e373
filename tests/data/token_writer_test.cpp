#include "data/files/token_writer.h"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include "core/errors.h"
#include "tests/data/temporary_folder.h"

namespace sb {
namespace {

using Document = std::vector<int32_t>;
namespace fs = std::filesystem;

Document document(int i) {
  return Document(static_cast<size_t>(2 + i % 7), i);
}
std::vector<uint8_t> targets(int i) {
  std::vector<uint8_t> flags(document(i).size(), 1);
  if (i % 3 == 0) flags[1] = flags.size() == 2;
  return flags;
}

void write_all(const std::string& prefix, int count) {
  TokenWriter writer(prefix, {});
  for (int i = 0; i < count; ++i) writer.add(document(i), targets(i));
  writer.finish();
}

TEST(TokenWriter, AnInterruptedRunGoesOnAndGivesTheSameFiles) {
  TemporaryFolder folder;
  write_all(folder.path("straight"), 50);
  TokenWriter::Options resume;
  resume.resume = true;
  {
    TokenWriter writer(folder.path("a"), resume);
    EXPECT_EQ(writer.note(), "");
    for (int i = 0; i < 20; ++i) writer.add(document(i), targets(i));
    writer.checkpoint("20 done");
    for (int i = 20; i < 31; ++i) writer.add(document(i), targets(i));  // lost with the writer
  }
  EXPECT_FALSE(fs::exists(folder.path("a.idx")));
  EXPECT_FALSE(fs::exists(folder.path("a.bin")));
  TokenWriter writer(folder.path("a"), resume);
  EXPECT_EQ(writer.note(), "20 done");
  EXPECT_EQ(writer.documents(), 20);
  for (int i = 20; i < 50; ++i) writer.add(document(i), targets(i));
  writer.finish();
  for (const char* suffix : {".bin", ".idx", ".mask"})
    EXPECT_EQ(read_bytes(folder.path("a") + suffix), read_bytes(folder.path("straight") + suffix)) << suffix;
  EXPECT_FALSE(fs::exists(folder.path("a.partial")));
}

// A process that dies between any two renames leaves either no index or a complete set, and the next run completes it.
TEST(TokenWriter, ARunThatDiesWhilePublishingIsCompletedByTheNext) {
  TemporaryFolder folder;
  write_all(folder.path("straight"), 20);
  for (const std::vector<std::string>& renamed :
       std::vector<std::vector<std::string>>{{}, {"bin"}, {"bin", "mask"}, {"bin", "mask", "idx"}}) {
    const std::string prefix = folder.path("a" + std::to_string(renamed.size()));
    // The state just before publishing: a finished run put back into its folder.
    write_all(prefix, 20);
    fs::create_directory(prefix + ".partial");
    for (const char* part : {"bin", "mask", "idx"})
      if (std::find(renamed.begin(), renamed.end(), part) == renamed.end())
        fs::rename(prefix + "." + part, prefix + ".partial/" + part);
    write_bytes(
        prefix + ".partial/state.json",
        R"({"version":1,"type":4,"documents":20,"tokens":98,"bitmap_bytes":7,"masked":true,"complete":true,"note":"n"})");
    TokenWriter::Options options;
    options.resume = true;
    TokenWriter writer(prefix, options);
    EXPECT_TRUE(writer.finished());
    EXPECT_EQ(writer.note(), "n");
    for (const char* suffix : {".bin", ".idx", ".mask"})
      EXPECT_EQ(read_bytes(prefix + suffix), read_bytes(folder.path("straight") + suffix)) << suffix;
    EXPECT_FALSE(fs::exists(prefix + ".partial"));
  }
}

TEST(TokenWriter, AKilledProcessLeavesNothingThatLooksComplete) {
  TemporaryFolder folder;
  const std::string prefix = folder.path("a");
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    TokenWriter writer(prefix, {});
    for (int i = 0; i < 30; ++i) writer.add(document(i), targets(i));
    writer.checkpoint("30");
    ::kill(::getpid(), SIGKILL);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  ASSERT_TRUE(WIFSIGNALED(status));
  EXPECT_THROW(open_token_file(prefix), UserError);
  EXPECT_FALSE(fs::exists(prefix + ".idx"));
  TokenWriter::Options options;
  options.resume = true;
  TokenWriter writer(prefix, options);  // the dead process's lock is gone
  EXPECT_EQ(writer.note(), "30");
}

TEST(TokenWriter, OneWriterAtATime) {
  TemporaryFolder folder;
  TokenWriter first(folder.path("a"), {});
  EXPECT_NE(user_error([&] { TokenWriter second(folder.path("a"), {}); }).find("another process"), std::string::npos);
}

TEST(TokenWriter, OverwritingHasToBeAllowed) {
  TemporaryFolder folder;
  write_all(folder.path("a"), 5);
  EXPECT_THROW(TokenWriter(folder.path("a"), {}), UserError);
  TokenWriter::Options options;
  options.overwrite = true;
  {
    TokenWriter writer(folder.path("a"), options);
    writer.add(document(1));
    // The old output stays whole until the new one is.
    EXPECT_EQ(open_token_file(folder.path("a"))->documents(), 5);
    writer.finish();
  }
  const auto file = open_token_file(folder.path("a"));
  EXPECT_EQ(file->documents(), 1);
  EXPECT_EQ(file->mask(), nullptr) << "the old mask is gone";
}

TEST(TokenWriter, RefusesBadDocumentsAndStates) {
  TemporaryFolder folder;
  TokenWriter::Options small;
  small.type = TokenType::u16;
  {
    TokenWriter writer(folder.path("a"), small);
    EXPECT_THROW(writer.add(Document{65536}), UserError);
    EXPECT_THROW(writer.add(Document{-1}), UserError);
    EXPECT_THROW(writer.add(Document{}), UserError);
    EXPECT_NE(user_error([&] {
                writer.add(Document{1, 2}, std::vector<uint8_t>{1, 0});
              }).find("no target"),
              std::string::npos);
    EXPECT_THROW(writer.finish(), UserError) << "nothing was added";
    writer.add(document(3));
    writer.checkpoint("x");
  }
  TokenWriter::Options resume = small;
  resume.resume = true;
  resume.type = TokenType::i32;
  EXPECT_NE(user_error([&] { TokenWriter w(folder.path("a"), resume); }).find("token type"), std::string::npos);
  resume.type = TokenType::u16;
  fs::resize_file(folder.path("a.partial/lengths"), 2);
  EXPECT_NE(user_error([&] { TokenWriter w(folder.path("a"), resume); }).find("shorter"), std::string::npos);
  write_bytes(folder.path("a.partial/state.json"), "{\"complete\": fal");
  EXPECT_NE(user_error([&] { TokenWriter w(folder.path("a"), resume); }).find("damaged"), std::string::npos);
  EXPECT_THROW(TokenWriter("/proc/nowhere/a", {}), UserError);
}

}  // namespace
}  // namespace sb
