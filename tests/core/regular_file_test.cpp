#include "core/files/regular_file.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>
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
  const std::pair<fs::path, const char*> cases[] = {{directory_, "it is a directory"},
                                                    {directory_ / "pipe", "it is a pipe"},
                                                    {"/dev/null", "it is a device"},
                                                    {directory_ / "none", "No such file or directory"}};
  for (const auto& test : cases) {
    const std::string message = message_of([&] { check_regular_file(test.first); });
    EXPECT_TRUE(message.starts_with(test.first.string() + ": ")) << message;
    EXPECT_NE(message.find(test.second), std::string::npos) << message;
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

TEST_F(RegularFileTest, SocketsAndLoopsOfLinks) {
  const fs::path socket_path = directory_ / "socket";
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  ASSERT_LT(socket_path.string().size(), sizeof address.sun_path);
  std::strcpy(address.sun_path, socket_path.c_str());
  const int descriptor = ::socket(AF_UNIX, SOCK_STREAM, 0);
  ASSERT_EQ(::bind(descriptor, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  EXPECT_EQ(message_of<UnreadableFile>([&] { check_regular_file(socket_path); }),
            socket_path.string() + ": not a regular file: it is a socket");
  ::close(descriptor);
  fs::create_symlink(directory_ / "loop", directory_ / "loop");
  try {
    check_regular_file(directory_ / "loop");
    FAIL();
  } catch (const UnreadableFile& error) {
    EXPECT_EQ(error.reason(), ELOOP);
  }
  std::ofstream(directory_ / "file") << "text";
  fs::create_symlink(directory_ / "file", directory_ / "link");
  EXPECT_EQ(read_regular_file(directory_ / "link"), "text");
}

TEST_F(RegularFileTest, ReadsAndSeeksInPieces) {
  std::ofstream(directory_ / "file") << "0123456789";
  RegularFile file(directory_ / "file");
  const auto take = [&](size_t bytes) {
    std::string text(bytes, '?');
    text.resize(file.read(text.data(), bytes));
    return text;
  };
  EXPECT_EQ(take(0), "");
  EXPECT_EQ(take(3), "012");
  EXPECT_EQ(take(3), "345");
  EXPECT_EQ(take(9), "6789") << "fewer at the end alone";
  EXPECT_EQ(take(9), "");
  file.seek(8);
  EXPECT_EQ(take(2), "89");
  file.seek(100);
  EXPECT_EQ(take(1), "") << "beyond its end there is nothing";
  file.seek(0);
  EXPECT_EQ(take(1), "0");
  const std::string path = (directory_ / "file").string();
  EXPECT_EQ(message_of<UnreadableFile>([&] { file.seek(-1); }), path + ": cannot be read: Invalid argument");
}

// The system's own files state no size.
TEST_F(RegularFileTest, FilesThatHoldMoreThanTheyState) {
  if (!fs::exists("/proc/self/status")) GTEST_SKIP() << "no /proc";
  EXPECT_NE(read_regular_file("/proc/self/status").find("Pid:"), std::string::npos);
  EXPECT_EQ(message_of([] { read_regular_file("/proc/self/status", 5); }),
            "/proc/self/status: larger than 5 bytes; is this the right file?");
}

TEST_F(RegularFileTest, RecordsOfManyThreadsStayWhole) {
  const fs::path path = directory_ / "log";
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      RecordFile file(path, RecordFile::Start::append);
      for (int i = 0; i < 50; ++i)
        file.write(std::string(static_cast<size_t>(20 + t), static_cast<char>('a' + t)) + "\n");
      file.close();
      file.close();  // a second time is nothing
    });
  for (std::thread& thread : threads) thread.join();
  std::istringstream lines(read_regular_file(path));
  std::map<std::string, int> seen;
  for (std::string line; std::getline(lines, line);) ++seen[line];
  ASSERT_EQ(seen.size(), 4u);
  for (int t = 0; t < 4; ++t)
    EXPECT_EQ(seen[std::string(static_cast<size_t>(20 + t), static_cast<char>('a' + t))], 50) << t;
}

TEST_F(RegularFileTest, RecordFilesThatCannotBeOpened) {
  const std::string missing = (directory_ / "missing" / "log").string();
  EXPECT_EQ(message_of([&] { RecordFile(missing, RecordFile::Start::anew); }),
            missing + ": cannot be created: No such file or directory");
  EXPECT_EQ(message_of([&] { RecordFile(directory_, RecordFile::Start::append); }),
            directory_.string() + ": cannot be opened: Is a directory");
  RecordFile file(directory_ / "log", RecordFile::Start::anew);
  EXPECT_EQ(file.path(), directory_ / "log");
  file.write("");
  EXPECT_EQ(fs::file_size(directory_ / "log"), 0u);
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
