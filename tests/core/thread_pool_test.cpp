#include "core/thread_pool.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "core/errors.h"

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

// Pieces begin on multiples of the grain and only the last may be shorter; a grain below one counts as one.
TEST_P(ThreadPoolTest, PiecesAreOfTheGrain) {
  ThreadPool pool(GetParam());
  for (const int64_t count : {1, 5, 24, 25}) {
    for (const int64_t grain : {-3, 0, 1, 4, 5, 24, 1000}) {
      const int64_t size = std::max<int64_t>(grain, 1);
      std::mutex mutex;
      std::vector<std::pair<int64_t, int64_t>> pieces, expected;
      pool.parallel_for(count, grain, [&](int64_t begin, int64_t end, int) {
        const std::lock_guard lock(mutex);
        pieces.emplace_back(begin, end);
      });
      std::sort(pieces.begin(), pieces.end());
      for (int64_t begin = 0; begin < count; begin += size) expected.emplace_back(begin, std::min(begin + size, count));
      EXPECT_EQ(pieces, expected) << count << " by " << grain;
    }
  }
}

TEST_P(ThreadPoolTest, SlicesDifferByOneAtMostAndAreTheSameAgain) {
  ThreadPool pool(GetParam());
  for (const int64_t count : {0, 1, 2, 7, 8, 9, 1003}) {
    std::vector<std::pair<int64_t, int64_t>> before;
    for (int round = 0; round < 3; ++round) {
      std::mutex mutex;
      std::vector<std::pair<int64_t, int64_t>> slices;
      pool.parallel_slices(count, [&](int64_t begin, int64_t end, int) {
        const std::lock_guard lock(mutex);
        slices.emplace_back(begin, end);
      });
      std::sort(slices.begin(), slices.end());
      ASSERT_EQ(std::ssize(slices), std::min<int64_t>(GetParam(), count));
      int64_t at = 0;
      for (const auto& [begin, end] : slices) {
        EXPECT_EQ(begin, at);
        EXPECT_GE(end - begin, count / std::ssize(slices));
        EXPECT_LE(end - begin, count / std::ssize(slices) + 1);
        at = end;
      }
      EXPECT_EQ(at, count);
      if (round > 0) {
        EXPECT_EQ(slices, before);
      }
      before = slices;
    }
  }
}

// A thread's number is its own while a body runs: memory that is kept a thread needs no lock.
TEST_P(ThreadPoolTest, NoTwoBodiesRunUnderOneNumber) {
  ThreadPool pool(GetParam());
  std::vector<std::atomic<int>> inside(GetParam());
  std::atomic<int> clashes = 0;
  pool.parallel_for(2000, 1, [&](int64_t, int64_t, int thread) {
    if (inside[thread].fetch_add(1) != 0) ++clashes;
    sched_yield();
    inside[thread].fetch_sub(1);
  });
  EXPECT_EQ(clashes, 0);
}

// Everything that a body wrote is there when the loop has returned, and the other way round.
TEST_P(ThreadPoolTest, LoopsSeeEachOthersResults) {
  ThreadPool pool(GetParam());
  std::vector<int64_t> values(64, 0), next(64, 0);
  for (int round = 0; round < 200; ++round) {
    pool.parallel_for(64, 3, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) next[i] = values[(i + 1) % 64] + 1;
    });
    values.swap(next);
  }
  EXPECT_EQ(values, std::vector<int64_t>(64, 200));
}

TEST_P(ThreadPoolTest, WhenAllBodiesFailOneOfThemIsTold) {
  ThreadPool pool(GetParam());
  for (int round = 0; round < 50; ++round) {
    std::atomic<int> calls = 0;
    try {
      pool.parallel_for(64, 1, [&](int64_t begin, int64_t, int) {
        ++calls;
        throw static_cast<int>(begin);
      });
      FAIL();
    } catch (const int begin) {
      EXPECT_GE(begin, 0);
      EXPECT_LT(begin, 64);
    }
    EXPECT_GE(calls, 1);
    EXPECT_LE(calls, GetParam()) << "nobody begins another piece after a failure of its own";
  }
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

TEST(ThreadPool, NeedsAThreadAtLeast) {
  EXPECT_THROW(ThreadPool(0), InternalError);
  EXPECT_THROW(ThreadPool(-1), InternalError);
  EXPECT_EQ(ThreadPool(3).threads(), 3);
}

// A pool of one runs on the caller, in order.
TEST(ThreadPool, AloneItIsAPlainLoop) {
  ThreadPool pool(1);
  std::vector<int64_t> order;
  pool.parallel_for(7, 2, [&, self = std::this_thread::get_id()](int64_t begin, int64_t, int thread) {
    EXPECT_EQ(std::this_thread::get_id(), self);
    EXPECT_EQ(thread, 0);
    order.push_back(begin);
  });
  EXPECT_EQ(order, (std::vector<int64_t>{0, 2, 4, 6}));
}

// Ranks in one process have a pool each.
TEST(ThreadPool, PoolsBesideEachOther) {
  std::atomic<int64_t> sum = 0;
  std::vector<std::thread> ranks;
  for (int r = 0; r < 4; ++r)
    ranks.emplace_back([&] {
      ThreadPool pool(3);
      for (int i = 0; i < 100; ++i) pool.parallel_for(10, 1, [&](int64_t begin, int64_t, int) { sum += begin; });
    });
  for (std::thread& rank : ranks) rank.join();
  EXPECT_EQ(sum, 4 * 100 * 45);
}

}  // namespace
}  // namespace sb
