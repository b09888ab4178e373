#include <gtest/gtest.h>

#include <chrono>
#include <tuple>
#include <vector>

#include "comm/thread_communicator.h"
#include "train/sums/step_sums.h"

namespace sb {
namespace {

// The times by which the planner corrects its predictions, of two data-parallel ranks with two stages each.
TEST(StepTimes, OfABackwardAreThoseOfBothHalves) {
  Plan plan;
  plan.ranks.resize(2);
  plan.ranks[0].micro_batches.resize(2);
  plan.ranks[1].micro_batches.resize(1);
  StepMeasurement measured;
  run_thread_ranks(4, [&](Communicator& world) {
    Grid grid(world, {2, 2});
    std::vector<Pipeline::Operation> own;
    const auto ran = [&](int micro_batch, Pipeline::Pass pass, int64_t nanoseconds) {
      const std::chrono::steady_clock::time_point begin{};
      own.push_back({micro_batch, pass, begin, begin + std::chrono::nanoseconds(nanoseconds)});
    };
    using enum Pipeline::Pass;
    for (int i = 0; i < (grid.dp_rank() == 0 ? 2 : 1); ++i) {
      ran(i, forward, 10 * world.rank() + i);
      ran(i, backward, 100 * world.rank() + i);
      if (!grid.first_stage()) ran(i, weights, 1000);
    }
    const StepMeasurement gathered = gather_times(grid, plan, own);
    if (world.rank() == 0) measured = gathered;
  });
  ASSERT_EQ(measured.ranks.size(), 2U);
  ASSERT_EQ(measured.ranks[0].size(), 2U);
  ASSERT_EQ(measured.ranks[1].size(), 1U);
  using Times = std::vector<int64_t>;
  for (const auto& [times, forward, backward] : {std::tuple{measured.ranks[0][0], Times{0, 10}, Times{0, 1100}},
                                                 {measured.ranks[0][1], Times{1, 11}, Times{1, 1101}},
                                                 {measured.ranks[1][0], Times{20, 30}, Times{200, 1300}}}) {
    EXPECT_EQ(times.forward, forward);
    EXPECT_EQ(times.backward, backward);
  }
}

}  // namespace
}  // namespace sb
