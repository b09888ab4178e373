#include "parallel/ring/ring_travel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
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

// Scratch full of NaN, as large as planned.
struct TravelExec {
  explicit TravelExec(int64_t bytes) : scratch("scratch", bytes) {
    float* all = scratch.allocate_array<float>(bytes / 4);
    std::fill_n(all, bytes / 4, std::numeric_limits<float>::quiet_NaN());
    scratch.release(0);
  }
  ThreadPool pool{1};
  Arena scratch;
  Exec exec{DeviceKind::cpu, &pool, nullptr, &scratch};
};

TEST(RingShape, RefusesNodesThatDoNotFit) {
  EXPECT_THROW(RingShape(6, 4), UserError);
}

TEST(RingTravel, BringsEveryChunkPastEveryRankOnce) {
  for (const Case& c : kCases)
    run_thread_ranks(c.ranks, [&](Communicator& group) {
      RingTravel travel(group, c.node_size);
      const std::vector<int64_t> floats = sizes(c.ranks);
      const int64_t most = *std::max_element(floats.begin(), floats.end());
      TravelExec run(travel.forward_scratch_bytes(DType::f32, most));
      std::vector<float> keys(floats[group.rank()]), values(keys.size());
      std::iota(keys.begin(), keys.end(), 100.0f * group.rank());
      std::iota(values.begin(), values.end(), -100.0f * group.rank());
      for (int again = 0; again < 2; ++again) {
        std::vector<int> visited;
        travel.forward(run.exec, DType::f32, {keys.data(), values.data()}, floats,
                       [&](int chunk, const RingData& data) {
                         for (int64_t i = 0; i < floats[chunk]; ++i) {
                           ASSERT_EQ(static_cast<const float*>(data.keys)[i], 100.0f * chunk + i);
                           ASSERT_EQ(static_cast<const float*>(data.values)[i], -100.0f * chunk + i);
                         }
                         visited.push_back(chunk);
                       });
        EXPECT_EQ(visited.front(), group.rank());
        EXPECT_EQ(std::set<int>(visited.begin(), visited.end()).size(), static_cast<size_t>(c.ranks));
        EXPECT_EQ(static_cast<int>(visited.size()), c.ranks);
      }
      EXPECT_EQ(run.scratch.high_water(), run.scratch.capacity());
    });
}

TEST(RingTravel, BringsSumsHome) {
  for (const Case& c : kCases)
    run_thread_ranks(c.ranks, [&](Communicator& group) {
      RingTravel travel(group, c.node_size);
      const std::vector<int64_t> floats = sizes(c.ranks);
      const int64_t most = *std::max_element(floats.begin(), floats.end());
      TravelExec run(travel.backward_scratch_bytes(DType::f32, most));
      std::vector<float> own(floats[group.rank()], static_cast<float>(group.rank()));
      for (int again = 0; again < 2; ++again) {
        std::vector<float> dk(own.size(), 1000), dv(own.size(), 2000);
        travel.backward(run.exec, DType::f32, {own.data(), own.data()}, floats,
                        [&](int chunk, const RingData& data, const RingGradients& sum) {
                          for (int64_t i = 0; i < floats[chunk]; ++i) {
                            ASSERT_EQ(static_cast<const float*>(data.keys)[i], chunk);
                            ASSERT_EQ(static_cast<const float*>(data.values)[i], chunk);
                            sum.keys[i] += static_cast<float>((group.rank() + 1) * (chunk + 1) * (i + 1));
                            sum.values[i] += static_cast<float>((group.rank() + 1) * (chunk + 2) * (i + 1));
                          }
                        },
                        {dk.data(), dv.data()});
        const int ranks_sum = c.ranks * (c.ranks + 1) / 2;
        for (int64_t i = 0; i < floats[group.rank()]; ++i) {
          ASSERT_EQ(dk[i], 1000 + ranks_sum * (group.rank() + 1) * (i + 1)) << c.ranks << " " << c.node_size;
          ASSERT_EQ(dv[i], 2000 + ranks_sum * (group.rank() + 2) * (i + 1)) << c.ranks << " " << c.node_size;
        }
      }
      EXPECT_EQ(run.scratch.high_water(), run.scratch.capacity());
    });
}

}  // namespace
}  // namespace sb
