#include "core/thread_pool.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

namespace sb {
namespace {

class ThreadPoolTest : public testing::TestWithParam<int> {};

TEST_P(ThreadPoolTest, VisitsEverythingOnce) {
  ThreadPool pool(GetParam());
  for (const int64_t count : {0, 1, 2, 7, 64, 1000}) {
    for (const int64_t grain : {1, 3, 100}) {
      std::vector<std::atomic<int>> seen(count);
      pool.parallel_for(count, grain, [&](int64_t begin, int64_t end, int thread) {
        ASSERT_GE(thread, 0);
        ASSERT_LT(thread, GetParam());
        for (int64_t i = begin; i < end; ++i) ++seen[i];
      });
      for (auto& n : seen) EXPECT_EQ(n, 1);
    }
  }
}

TEST_P(ThreadPoolTest, SlicesAreContiguousAndFixed) {
  ThreadPool pool(GetParam());
  std::vector<int> owner(10, -1);
  std::atomic<int> pieces = 0;
  pool.parallel_slices(10, [&](int64_t begin, int64_t end, int) {
    ++pieces;
    for (int64_t i = begin; i < end; ++i) owner[i] = static_cast<int>(begin);
  });
  EXPECT_EQ(pieces, std::min(GetParam(), 10));
  for (const int o : owner) EXPECT_GE(o, 0);
}

TEST_P(ThreadPoolTest, RethrowsAndStaysUsable) {
  ThreadPool pool(GetParam());
  for (int round = 0; round < 20; ++round) {
    EXPECT_THROW(pool.parallel_for(100, 1,
                                   [](int64_t begin, int64_t, int) {
                                     if (begin == 37) throw std::runtime_error("37");
                                   }),
                 std::runtime_error);
    std::atomic<int64_t> sum = 0;
    pool.parallel_for(100, 1, [&](int64_t begin, int64_t, int) { sum += begin; });
    EXPECT_EQ(sum, 4950);
  }
}

TEST_P(ThreadPoolTest, ManySmallLoops) {
  ThreadPool pool(GetParam());
  std::atomic<int64_t> sum = 0;
  for (int i = 0; i < 5000; ++i) pool.parallel_for(4, 1, [&](int64_t, int64_t, int) { ++sum; });
  EXPECT_EQ(sum, 20000);
}

INSTANTIATE_TEST_SUITE_P(Threads, ThreadPoolTest, testing::Values(1, 2, 3, 8));

TEST(ThreadPool, CountsTheCoresThatItMayUse) {
  const std::vector<int> all = usable_cores();
  ASSERT_FALSE(all.empty());
  EXPECT_EQ(available_cores(), static_cast<int>(all.size()));
  int pinned = 0;
  std::vector<int> own;
  std::thread one([&] {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(all.back(), &set);
    ASSERT_EQ(sched_setaffinity(0, sizeof set, &set), 0);
    pinned = available_cores();
    own = usable_cores();
  });
  one.join();
  EXPECT_EQ(pinned, 1);
  EXPECT_EQ(own, std::vector<int>{all.back()});
}

}  // namespace
}  // namespace sb
