#include "parallel/ring_travel.h"

#include <gtest/gtest.h>

#include <numeric>
#include <set>

#include "comm/thread_communicator.h"

namespace sb {
namespace {

struct Case {
  int ranks, node_size;
};
constexpr Case kCases[] = {{1, 1}, {2, 2}, {2, 1}, {3, 3}, {4, 4}, {4, 2}, {6, 3}, {6, 2}, {8, 8}, {8, 4}};

std::vector<int64_t> sizes(int ranks) {
  std::vector<int64_t> floats;
  for (int r = 0; r < ranks; ++r) floats.push_back(r % 3 == 2 ? 0 : 5 + 7 * r);  // some have nothing
  return floats;
}

TEST(RingShape, RefusesNodesThatDoNotFit) {
  EXPECT_THROW(RingShape(6, 4), UserError);
}

TEST(RingTravel, BringsEveryChunkPastEveryRankOnce) {
  for (const Case& c : kCases)
    run_thread_ranks(c.ranks, [&](Communicator& group) {
      RingTravel travel(group, c.node_size);
      const std::vector<int64_t> floats = sizes(c.ranks);
      std::vector<float> own(floats[group.rank()]);
      std::iota(own.begin(), own.end(), 100.0f * group.rank());
      for (int again = 0; again < 2; ++again) {
        std::vector<int> visited;
        travel.forward(own.data(), floats, [&](int chunk, const float* data) {
          for (int64_t i = 0; i < floats[chunk]; ++i) ASSERT_EQ(data[i], 100.0f * chunk + i);
          visited.push_back(chunk);
        });
        EXPECT_EQ(visited.front(), group.rank());
        EXPECT_EQ(std::set<int>(visited.begin(), visited.end()).size(), static_cast<size_t>(c.ranks));
        EXPECT_EQ(static_cast<int>(visited.size()), c.ranks);
      }
    });
}

TEST(RingTravel, BringsSumsHome) {
  for (const Case& c : kCases)
    run_thread_ranks(c.ranks, [&](Communicator& group) {
      RingTravel travel(group, c.node_size);
      const std::vector<int64_t> floats = sizes(c.ranks);
      std::vector<float> own(floats[group.rank()], static_cast<float>(group.rank())), gradient(own.size(), -1);
      travel.backward(
          own.data(), floats,
          [&](int chunk, const float* data, float* out) {
            for (int64_t i = 0; i < floats[chunk]; ++i) {
              ASSERT_EQ(data[i], chunk);
              out[i] = static_cast<float>((group.rank() + 1) * (chunk + 1) * (i + 1));
            }
          },
          gradient.data());
      const int ranks_sum = c.ranks * (c.ranks + 1) / 2;
      for (int64_t i = 0; i < floats[group.rank()]; ++i)
        ASSERT_EQ(gradient[i], ranks_sum * (group.rank() + 1) * (i + 1)) << c.ranks << " " << c.node_size;
    });
}

// Four nodes of eight, times as published for one attention call (milliseconds).
TEST(RingSimulation, HidesTheOuterRing) {
  const RingTimes times{0.51, 0.13, 0.98};
  EXPECT_NEAR(simulate_ring(RingShape(32, 32), 8, times), 31 * 0.98 + 0.51, 1e-9);
  EXPECT_NEAR(simulate_ring(RingShape(32, 8), 8, times), 32 * 0.51, 1e-9);
  EXPECT_NEAR(simulate_ring(RingShape(8, 8), 8, times), 8 * 0.51, 1e-9);  // one node: nothing to hide
  // An outer link slower than a whole turn shows: 3 transfers, then the last turn.
  EXPECT_NEAR(simulate_ring(RingShape(32, 8), 8, {0.51, 0.13, 5.0}), 3 * 5.0 + 8 * 0.51, 1e-9);
}

}  // namespace
}  // namespace sb
