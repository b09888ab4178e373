#include "core/files/file_lock.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <optional>
#include <thread>
#include <vector>

#include "core/files/mapped_file.h"
#include "core/files/regular_file.h"
#include "tests/core/message_of.h"
#include "tests/data/temporary_folder.h"

namespace sb {
namespace {

TEST(FileLock, OneAtATime) {
  const TemporaryFolder folder;
  const std::string path = folder.path("lock");
  const auto taken = [&] { return message_of([&] { const FileLock second(path, "another run {} writes there"); }); };
  {
    const FileLock first(path, "busy");
    for (int i = 0; i < 3; ++i) EXPECT_EQ(taken(), "another run {} writes there");
    EXPECT_EQ(message_of([&] { const FileLock other(folder.path("other"), "busy"); }), kNothingThrown);
  }
  EXPECT_EQ(taken(), kNothingThrown);
  EXPECT_EQ(taken(), kNothingThrown) << "it was let go of again";
}

TEST(FileLock, LeavesWhatIsInTheFile) {
  const TemporaryFolder folder;
  write_bytes(folder.path("lock"), "somebody's notes");
  const FileLock lock(folder.path("lock"), "busy");
  EXPECT_EQ(read_bytes(folder.path("lock")), "somebody's notes");
}

TEST(FileLock, NamesTheFileThatCannotBeCreated) {
  const TemporaryFolder folder;
  const std::string path = folder.path("missing/lock");
  EXPECT_EQ(message_of([&] { const FileLock lock(path, "busy"); }),
            path + ": cannot be created: No such file or directory");
  EXPECT_EQ(message_of([&] { const FileLock lock(folder.path(""), "busy"); }).find("busy"), std::string::npos);
}

// Of many that ask at once one gets it.
TEST(FileLock, ThreadsThatAskAtOnce) {
  const TemporaryFolder folder;
  std::atomic<int> holding = 0, refused = 0, answers = 0;
  constexpr int kThreads = 8;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i)
    threads.emplace_back([&] {
      std::optional<FileLock> lock;
      try {
        lock.emplace(folder.path("lock"), "busy");
        ++holding;
      } catch (const UserError&) {
        ++refused;
      }
      ++answers;
      while (answers < kThreads) std::this_thread::yield();
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(holding, 1);
  EXPECT_EQ(refused, kThreads - 1);
}

// A process that is killed has no time to let go.
TEST(FileLock, DiesWithItsProcess) {
  const TemporaryFolder folder;
  const std::string path = folder.path("lock");
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const FileLock lock(path, "busy");
    static_cast<void>(!::write(ready[1], "x", 1));
    while (true) ::pause();
  }
  ASSERT_GT(child, 0);
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  EXPECT_EQ(message_of([&] { const FileLock lock(path, "busy"); }), "busy");
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_EQ(message_of([&] { const FileLock lock(path, "busy"); }), kNothingThrown);
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST(MappedFile, HoldsWhatIsInTheFile) {
  const TemporaryFolder folder;
  for (const size_t bytes : {1u, 4095u, 4096u, 4097u, 100'001u}) {
    std::string content(bytes, '\0');
    for (size_t i = 0; i < bytes; ++i) content[i] = static_cast<char>(i * 7 + i / 256);
    write_bytes(folder.path("file"), content);
    const MappedFile file(folder.path("file"));
    EXPECT_EQ(file.size(), static_cast<int64_t>(bytes));
    EXPECT_EQ(file.path(), folder.path("file"));
    EXPECT_TRUE(file.text() == content) << bytes;
  }
}

TEST(MappedFile, EmptyAndDefaultOnesAreEmptyViews) {
  const TemporaryFolder folder;
  write_bytes(folder.path("empty"), "");
  const MappedFile empty(folder.path("empty")), nothing;
  for (const MappedFile* file : {&empty, &nothing}) {
    EXPECT_EQ(file->size(), 0);
    EXPECT_EQ(file->data(), nullptr);
    EXPECT_EQ(file->text(), "");
  }
}

TEST(MappedFile, MovesLeaveNothingBehind) {
  const TemporaryFolder folder;
  write_bytes(folder.path("a"), "first");
  write_bytes(folder.path("b"), "second one");
  MappedFile a(folder.path("a"));
  const unsigned char* const place = a.data();
  MappedFile moved(std::move(a));
  EXPECT_EQ(moved.data(), place) << "the same mapping, not a second one";
  EXPECT_EQ(a.data(), nullptr);
  EXPECT_EQ(a.size(), 0);
  MappedFile b(folder.path("b"));
  b = std::move(moved);
  EXPECT_EQ(b.text(), "first");
  EXPECT_EQ(b.path(), folder.path("a"));
  // A file that is gone from the folder is still mapped.
  std::filesystem::remove(folder.path("a"));
  EXPECT_EQ(b.text(), "first");
  b = MappedFile();
  EXPECT_EQ(b.size(), 0);
}

TEST(MappedFile, RefusesWhatIsNoFileWithItsName) {
  const TemporaryFolder folder;
  const std::pair<std::string, int> cases[] = {{folder.path("none"), ENOENT}, {folder.path(""), 0}, {"/dev/null", 0}};
  for (const auto& [path, reason] : cases) {
    try {
      const MappedFile file(path);
      FAIL() << path;
    } catch (const UnreadableFile& error) {
      EXPECT_EQ(error.reason(), reason) << path;
      EXPECT_TRUE(std::string(error.what()).starts_with(path + ": ")) << error.what();
    }
  }
}

// The place that a file had among the mapped ones is used again, with the name of the later one.
TEST(MappedFileDeathTest, TheOneThatGotShorterIsNamedAndNoOther) {
  const TemporaryFolder folder;
  const auto read_after_cut = [&] {
    for (const char* name : {"gone", "kept", "cut"}) write_bytes(folder.path(name), std::string(8 * 4096, 'x'));
    const MappedFile kept(folder.path("kept"));
    { const MappedFile gone(folder.path("gone")); }
    const MappedFile cut(folder.path("cut"));
    std::filesystem::resize_file(folder.path("cut"), 4096);
    volatile unsigned char sum = kept.data()[kept.size() - 1];
    sum = static_cast<unsigned char>(sum + cut.data()[cut.size() - 1]);
  };
  EXPECT_EXIT(read_after_cut(), testing::ExitedWithCode(2), "^error: .*cut: was truncated while it was being read");
}

}  // namespace
}  // namespace sb
