#include "plan/schedule/ordering.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/random.h"

namespace sb {
namespace {

PipelineTimes random_pipeline(Random& random, int stages, int micro_batches) {
  PipelineTimes times;
  times.stages = stages;
  times.micro_batches = micro_batches;
  for (int i = 0; i < micro_batches; ++i) {
    const double size = std::exp(0.6 * random.normal());
    for (int s = 0; s < stages; ++s) {
      times.forward.push_back(size);
      times.backward.push_back(2 * size);
    }
  }
  return times;
}

std::vector<int> identity(int n) {
  std::vector<int> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  return order;
}

TEST(Ordering, SmallAtBothEnds) {
  const std::vector<double> load{5, 1, 4, 2, 3};
  EXPECT_EQ(small_at_both_ends(load, true), (std::vector<int>{1, 4, 0, 2, 3}));
  EXPECT_EQ(small_at_both_ends(load, false), (std::vector<int>{3, 2, 0, 4, 1}));
}

TEST(Ordering, FewMicroBatchesGetTheBestOrderThereIs) {
  Random random(1);
  for (int trial = 0; trial < 30; ++trial) {
    const int p = 2 + static_cast<int>(random.below(4)), m = 2 + static_cast<int>(random.below(4));
    const PipelineTimes times = random_pipeline(random, p, m);
    const Schedule schedule(p, m);
    double best = 1e300;
    std::vector<int> order = identity(m);
    do best = std::min(best, schedule.makespan(times, order));
    while (std::next_permutation(order.begin(), order.end()));
    std::vector<int> found = identity(m);
    EXPECT_NEAR(improve_order(schedule, times, 1000, found), best, 1e-9);
    EXPECT_NEAR(schedule.makespan(times, found), best, 1e-9);
  }
}

// Swap by swap, each from the best order so far.
double swapped_one_by_one(const Schedule& schedule, const PipelineTimes& times, int64_t trials,
                          std::vector<int>& order) {
  double best = schedule.makespan(times, order);
  const auto consider = [&](const std::vector<int>& other) {
    --trials;
    const double makespan = schedule.makespan(times, other);
    if (makespan >= best * (1 - 1e-9)) return false;
    best = makespan;
    order = other;
    return true;
  };
  std::vector<double> load(order.size(), 0.0);
  for (size_t i = 0; i < times.forward.size(); ++i)
    load[i / static_cast<size_t>(times.stages)] += times.forward[i] + times.backward[i];
  for (const bool first : {true, false}) consider(small_at_both_ends(load, first));
  const size_t m = order.size(), pairs = m * (m - 1) / 2;
  for (size_t distance = 1, i = 0, since_better = 0; trials > 0 && since_better < pairs;) {
    std::vector<int> other = order;
    std::swap(other[i], other[i + distance]);
    since_better = consider(other) ? 0 : since_better + 1;
    if (++i + distance >= m) {
      i = 0;
      distance = distance + 1 < m ? distance + 1 : 1;
    }
  }
  return best;
}

// Eight at once find what one after the other does, to the last bit.
TEST(Ordering, SwapsAreTriedOneAfterTheOther) {
  Random random(4);
  for (int trial = 0; trial < 60; ++trial) {
    const int p = 2 + static_cast<int>(random.below(6)), m = 7 + static_cast<int>(random.below(70));
    PipelineTimes times = random_pipeline(random, p, m);
    if (trial % 3 > 0)
      for (size_t i = 0; i < times.forward.size(); ++i) {
        const bool first = i % static_cast<size_t>(p) == 0,
                   last = i % static_cast<size_t>(p) + 1 == static_cast<size_t>(p);
        times.forward_transfer.push_back(first ? 0.0 : 0.2 * times.forward[i]);
        times.backward_transfer.push_back(last ? 0.0 : 0.2 * times.forward[i]);
      }
    if (trial % 3 > 1)
      for (int s = 0; s < p; ++s) {
        times.tail.push_back(random.uniform());
        times.gather.push_back({0, 9 * random.uniform(), random.uniform()});
      }
    const Schedule schedule(p, m);
    const auto trials = static_cast<int64_t>(random.below(400));
    std::vector<int> found = identity(m), expected = identity(m);
    EXPECT_EQ(improve_order(schedule, times, trials, found), swapped_one_by_one(schedule, times, trials, expected));
    EXPECT_EQ(found, expected);
  }
}

TEST(Ordering, NeverWorseAndBoundedInTrials) {
  Random random(2);
  double before = 0, after = 0;
  for (int trial = 0; trial < 60; ++trial) {
    const int m = 8 + static_cast<int>(random.below(24));
    const PipelineTimes times = random_pipeline(random, 4, m);
    const Schedule schedule(4, m);
    for (int64_t trials : {0, 1, 5, 300}) {
      std::vector<int> order = identity(m);
      const double start = schedule.makespan(times, order);
      const double end = improve_order(schedule, times, trials, order);
      EXPECT_LE(end, start);
      std::vector<int> sorted = order;
      std::sort(sorted.begin(), sorted.end());
      EXPECT_EQ(sorted, identity(m));
      if (trials == 300) {
        before += start;
        after += end;
      }
    }
  }
  EXPECT_LT(after, 0.85 * before);
}

}  // namespace
}  // namespace sb
