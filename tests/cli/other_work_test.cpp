// What is said of measurements that other processes disturb.
#include "cli/profile/other_work.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "core/thread_pool.h"

namespace sb {
namespace {

TEST(OtherWork, CountsTheCoresThatMayBeUsed) {
  const std::string stat =
      "cpu  1000 20 300 4000 50 6 7 8 900 0\n"
      "cpu0 100 10 30 4000 5 1 2 3 90 0\n"
      "cpu1 900 10 270 0 45 5 5 5 810 0\n"
      "cpu10 70 0 0 0 0 0 0 0 0 0\n"
      "intr 5 1 1\n";
  // Neither idle nor waiting for a disk; guests are part of user.
  EXPECT_DOUBLE_EQ(busy_seconds(stat, {0}, 100).value(), (100 + 10 + 30 + 1 + 2 + 3) / 100.0);
  EXPECT_DOUBLE_EQ(busy_seconds(stat, {0, 10}, 100).value(), (146 + 70) / 100.0);
  EXPECT_EQ(busy_seconds(stat, {0, 2}, 100), std::nullopt);  // a core that is not in there
  EXPECT_EQ(busy_seconds("", {0}, 100), std::nullopt);
  EXPECT_EQ(busy_seconds("cpu0 0 0 0 0 0 0 0 0 0 0\n", {0}, 100), std::nullopt);  // a system that does not tell
  EXPECT_EQ(busy_seconds("cpu0 nonsense\n", {0}, 100), std::nullopt);
}

TEST(OtherWork, IsSaidWhereItTakesMeasuredCores) {
  EXPECT_EQ(disturbed_by_processes(0.0, 2, 2), "");
  EXPECT_EQ(disturbed_by_processes(0.1, 2, 2), "");  // as on any idle machine
  EXPECT_EQ(disturbed_by_processes(3.0, 8, 4), "");  // there is room for both
  EXPECT_NE(disturbed_by_processes(1.3, 2, 2).find("1.3 of the 2 cores"), std::string::npos);
  EXPECT_NE(disturbed_by_processes(5.0, 8, 4).find("idle"), std::string::npos);
  EXPECT_EQ(disturbed_by_processes(0.0, 2, 16), "");  // its own threads, whatever their number
  EXPECT_EQ(disturbed_on_gpu(-1), "");
  EXPECT_EQ(disturbed_on_gpu(1), "");
  EXPECT_NE(disturbed_on_gpu(2).find("1 other process is"), std::string::npos);
  EXPECT_NE(disturbed_on_gpu(4).find("3 other processes are"), std::string::npos);
}

TEST(OtherWork, SeesAProcessThatComputes) {
  if (!read_processor_times()) GTEST_SKIP() << "the system does not tell what its cores do";
  const OtherWork watch(available_cores());
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    std::atomic<uint64_t> turns = 0;
    for (;;) ++turns;
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(600));
  EXPECT_NE(watch.disturbance(), "");
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

}  // namespace
}  // namespace sb
