#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <vector>

#include "core/random.h"
#include "plan/chunking.h"
#include "plan/schedule/ordering.h"
#include "plan/schedule/schedule.h"

namespace sb {
namespace {

// A pipeline of groups with times of its own.
struct Pieces {
  std::vector<int> groups;
  int ahead = 1, depth = 1;
  PipelineTimes times;

  Pieces(Random& random, bool whole_numbers) {
    times.stages = 1 + static_cast<int>(random.below(5));
    depth = 1 + static_cast<int>(random.below(2));
    const int count = 1 + static_cast<int>(random.below(4));
    for (int g = 0; g < count; ++g) groups.push_back(1 + static_cast<int>(random.below(4)));
    ahead = 1 + static_cast<int>(random.below(4));
    times.micro_batches = std::accumulate(groups.begin(), groups.end(), 0);
    // Whole numbers, zero among them: many operations end at the same time.
    const auto draw = [&] { return whole_numbers ? static_cast<double>(random.below(3)) : 10 * random.uniform(); };
    for (int i = 0; i < times.micro_batches; ++i)
      for (int s = 0; s < times.stages; ++s) {
        times.forward.push_back(draw());
        times.backward.push_back(draw());
        times.forward_transfer.push_back(s == 0 ? 0.0 : draw());
        times.backward_transfer.push_back(s + 1 == times.stages ? 0.0 : draw());
      }
    for (int s = 0; s < times.stages; ++s) times.tail.push_back(draw());
  }
  Schedule schedule() const { return {times.stages, groups, ahead, depth}; }
};

const ScheduledOperation& find(const ScheduleResult& result, int stage, int position, bool backward) {
  const auto found = std::find_if(result.operations.begin(), result.operations.end(), [&](const auto& op) {
    return op.stage == stage && op.position == position && op.backward == backward;
  });
  EXPECT_NE(found, result.operations.end());
  return *found;
}

// Nothing overlaps on a stage, nothing starts before what it needs has arrived, and nothing waits for no reason.
TEST(SchedulePieces, EveryOperationStartsAsSoonAsItCan) {
  Random random(31);
  for (int trial = 0; trial < 60; ++trial) {
    const Pieces in(random, trial % 2 == 0);
    const PipelineTimes& times = in.times;
    const ScheduleResult result = in.schedule().analyze(times, {});
    ASSERT_EQ(std::ssize(result.operations), 2 * times.stages * times.micro_batches);
    std::vector<double> free(static_cast<size_t>(times.stages), 0.0);
    double busy = 0, latest = 0;
    for (const ScheduledOperation& op : result.operations) {
      const auto stage = static_cast<size_t>(op.stage);
      const size_t at = times.at(op.position, op.stage);
      double ready = free[stage];
      if (!op.backward && op.stage > 0)
        ready = std::max(ready, find(result, op.stage - 1, op.position, false).end + times.forward_transfer[at]);
      if (op.backward && op.stage + 1 < times.stages)
        ready = std::max(ready, find(result, op.stage + 1, op.position, true).end + times.backward_transfer[at]);
      if (op.backward) ready = std::max(ready, find(result, op.stage, op.position, false).end);
      EXPECT_NEAR(op.start, ready, 1e-9) << "trial " << trial;
      EXPECT_NEAR(op.end - op.start, (op.backward ? times.backward : times.forward)[at], 1e-9);
      EXPECT_GE(op.slack, -1e-9);
      free[stage] = op.end;
      busy += op.end - op.start;
    }
    for (size_t s = 0; s < free.size(); ++s) latest = std::max(latest, free[s] + times.tail[s].least);
    EXPECT_NEAR(result.makespan, latest, 1e-9);
    if (latest > 0) {
      EXPECT_NEAR(result.bubble_share, 1 - busy / (latest * times.stages), 1e-9) << "trial " << trial;
    }
  }
}

TEST(SchedulePieces, BackwardsOfAGroupAreReversedAndGroupsAreNot) {
  Random random(32);
  for (int trial = 0; trial < 40; ++trial) {
    const Pieces in(random, false);
    std::vector<int> expected;
    for (int first = 0; const int size : in.groups) {
      for (int i = size - 1; i >= 0; --i) expected.push_back(first + i);
      first += size;
    }
    const Schedule schedule = in.schedule();
    for (int s = 0; s < in.times.stages; ++s) {
      std::vector<int> backwards, forwards;
      for (const Schedule::Node& node : schedule.nodes())
        if (node.stage == s) (node.backward ? backwards : forwards).push_back(node.position);
      EXPECT_EQ(backwards, expected);
      EXPECT_TRUE(std::is_sorted(forwards.begin(), forwards.end()));
    }
  }
}

// The chain is connected, takes the whole makespan together with its transfers and its tail, and is critical.
TEST(SchedulePieces, TheCriticalPathIsAsLongAsTheStep) {
  Random random(33);
  for (int trial = 0; trial < 60; ++trial) {
    const Pieces in(random, false);
    const PipelineTimes& times = in.times;
    const Schedule schedule = in.schedule();
    std::vector<int> chain;
    const double length = schedule.critical_path(times, {}, chain);
    EXPECT_NEAR(length, schedule.makespan(times, {}), 1e-9);
    ASSERT_FALSE(chain.empty());
    double sum = 0;
    for (size_t i = 0; i < chain.size(); ++i) {
      const Schedule::Node& node = schedule.nodes()[static_cast<size_t>(chain[i])];
      const size_t at = times.at(node.position, node.stage);
      sum += (node.backward ? times.backward : times.forward)[at];
      if (i == 0) continue;
      ASSERT_TRUE(chain[i - 1] == node.previous || chain[i - 1] == node.dependency) << "trial " << trial;
      const Schedule::Node& before = schedule.nodes()[static_cast<size_t>(chain[i - 1])];
      if (before.stage != node.stage) sum += (node.backward ? times.backward_transfer : times.forward_transfer)[at];
    }
    const Schedule::Node& last = schedule.nodes()[static_cast<size_t>(chain.back())];
    EXPECT_NEAR(sum + times.tail[static_cast<size_t>(last.stage)].least, length, 1e-9) << "trial " << trial;
  }
}

// By trying: both passes of a micro-batch on a stage may each take so much longer, and no more.
TEST(SchedulePieces, SlackAgainstADeadlineIsWhatMayBeAdded) {
  Random random(34);
  for (int trial = 0; trial < 12; ++trial) {
    const Pieces in(random, false);
    const Schedule schedule = in.schedule();
    const double makespan = schedule.makespan(in.times, {});
    for (const double room : {0.0, 3.5}) {
      std::vector<double> slack(in.times.forward.size());
      schedule.slacks(in.times, {}, makespan + room, slack);
      for (size_t at = 0; at < slack.size(); ++at) {
        double least = 1e300;
        for (const bool backward : {false, true}) {
          PipelineTimes longer = in.times;
          double& duration = (backward ? longer.backward : longer.forward)[at];
          duration += 1000;
          // Past its slack an operation lengthens the step one to one.
          least = std::min(least, makespan + room - (schedule.makespan(longer, {}) - 1000));
        }
        EXPECT_NEAR(slack[at], least, 1e-9) << "trial " << trial;
      }
    }
  }
}

TEST(SchedulePieces, LanesAreTheSameScheduleEightTimes) {
  Random random(35);
  for (int trial = 0; trial < 20; ++trial) {
    Pieces in(random, trial % 2 == 0);
    const Schedule schedule = in.schedule();
    constexpr size_t kLanes = Schedule::kLanes;
    const size_t count = in.times.forward.size();
    std::vector<double> forward(count * kLanes), backward(count * kLanes), scratch;
    for (double& t : forward) t = 5 * random.uniform();
    for (double& t : backward) t = 5 * random.uniform();
    std::array<double, kLanes> found;
    schedule.makespans(in.times, forward, backward, scratch, found);
    for (size_t lane = 0; lane < kLanes; ++lane) {
      for (size_t i = 0; i < count; ++i) {
        in.times.forward[i] = forward[i * kLanes + lane];
        in.times.backward[i] = backward[i * kLanes + lane];
      }
      EXPECT_NEAR(found[lane], schedule.makespan(in.times, {}), 1e-9);
    }
  }
}

TEST(SchedulePieces, TheSmallestPipelinesByHand) {
  // Two pieces on two stages, forward 1 and backward 2: F0 F1 | F0 F1 on the second a step later, then B1 B0.
  PipelineTimes times;
  times.stages = times.micro_batches = 2;
  times.forward.assign(4, 1.0);
  times.backward.assign(4, 2.0);
  const Schedule pair(2, std::vector<int>{2}, 1);
  EXPECT_EQ(pair.makespan(times, {}), 1 + 1 + 1 + 2 + 2 + 2);
  EXPECT_EQ(pair.slots(0), 2);
  EXPECT_EQ(pair.slots(1), 2);
  // As two of their own: F0 | F0 B0, F1 | F1 B1 with nothing held but one on the last stage.
  const Schedule two(2, std::vector<int>{1, 1}, 1);
  EXPECT_EQ(two.makespan(times, {}), 1 + (1 + 2) * 2 + 2);
  EXPECT_EQ(two.slots(1), 1);
  // One micro-batch: down and up again. Nothing that takes time: no time.
  times.micro_batches = 1;
  times.forward = {3, 4};
  times.backward = {5, 6};
  EXPECT_EQ(Schedule(2, 1).makespan(times, {}), 3 + 4 + 6 + 5);
  times.forward = times.backward = {0, 0};
  EXPECT_EQ(Schedule(2, 1).makespan(times, {}), 0);
  times.tail = {2, 7};
  EXPECT_EQ(Schedule(2, 1).makespan(times, {}), 7);
}

// Sums of the gradients run beside the backward that makes them: what is left over is the rest of them, or the last.
TEST(SchedulePieces, WhatHidesBehindTheLastBackwardIsNotPaidFor) {
  PipelineTimes times;
  times.stages = 1;
  times.micro_batches = 2;
  times.forward = {1, 1};
  times.backward = {10, 40};
  times.tail = {{3, 30, 0.75}};
  const std::vector<int> order{0, 1}, other{1, 0};
  // 30 less three quarters of 40 leaves less than 3; of 10, 22.5.
  EXPECT_EQ(Schedule(1, 2).makespan(times, order), 52 + 3);
  EXPECT_EQ(Schedule(1, 2).makespan(times, other), 52 + 22.5);
  EXPECT_EQ(Schedule(1, 2).analyze(times, other).makespan, 52 + 22.5);
  std::vector<int> chain;
  EXPECT_EQ(Schedule(1, 2).critical_path(times, other, chain), 52 + 22.5);
  times.tail = {7.0};
  EXPECT_EQ(Schedule(1, 2).makespan(times, other), 52 + 7);
}

// Weights come while the first forward gets to them, on a later stage while the stages before have it, too.
TEST(SchedulePieces, WhatHidesBehindTheFirstForwardIsNotPaidFor) {
  PipelineTimes times;
  times.stages = 1;
  times.micro_batches = 2;
  times.forward = {10, 40};
  times.backward = {1, 1};
  times.gather = {{3, 30, 0.75}};
  const std::vector<int> order{0, 1}, other{1, 0};
  EXPECT_EQ(Schedule(1, 2).makespan(times, order), 22.5 + 52);
  EXPECT_EQ(Schedule(1, 2).makespan(times, other), 3 + 52);
  EXPECT_EQ(Schedule(1, 2).analyze(times, order).operations.front().start, 22.5);
  // The second stage has its weights at 25, 12.5 or 5: F0 of the first ends at 3 + 4.
  times.stages = 2;
  times.micro_batches = 1;
  times.forward = {4, 10};
  times.backward = {1, 1};
  for (const auto& [all, start] : {std::pair{25.0 + 5, 25.0}, {12.5 + 5, 12.5}, {5.0 + 5, 7.0}}) {
    times.gather = {3.0, {1, all, 0.5}};
    EXPECT_EQ(Schedule(2, 1).makespan(times, {}), start + 10 + 1 + 1);
    std::vector<int> chain;
    EXPECT_EQ(Schedule(2, 1).critical_path(times, {}, chain), start + 10 + 1 + 1);
    EXPECT_EQ(chain.size(), start > 7 ? 3u : 4u);
  }
}

TEST(SchedulePieces, SchedulesThatAreAlikeAreShared) {
  const std::vector<int> groups{3, 1}, other{1, 3};
  const auto first = shared_schedule(2, groups, 2, 1);
  EXPECT_EQ(first, shared_schedule(2, groups, 2, 1));
  EXPECT_NE(first, shared_schedule(2, other, 2, 1));
  EXPECT_NE(first, shared_schedule(2, groups, 1, 1));
  EXPECT_NE(first, shared_schedule(2, groups, 2, 2));
  EXPECT_NE(first, shared_schedule(3, groups, 2, 1));
  EXPECT_EQ(shared_schedule(2, 4, 1), shared_schedule(2, 4, 1));
  EXPECT_NE(shared_schedule(2, 4, 1), shared_schedule(2, 5, 1));
}

// Every order of the groups, with every distance that forwards may run ahead.
TEST(SchedulePieces, NoOrderOfGroupsIsFasterThanTheBound) {
  Random random(36);
  const LatencyModel latency(analytic_profile("h200-analytic", find_model_shape("qwen2.5-0.5b")));
  for (int trial = 0; trial < 30; ++trial) {
    Pieces in(random, false);
    PipelineTimes& times = in.times;
    Layout layout;
    layout.pp = times.stages;
    layout.comm = false;  // as without tails
    const CostModel cost(latency, {}, layout);
    times.tail.clear();
    Batches batches;
    for (int sequence = 0; const int size : in.groups) {
      for (int i = 0; i < size; ++i) {
        batches.sequences.push_back(sequence);
        batches.micro_batch_begin.push_back(static_cast<int>(batches.sequences.size()));
        batches.pieces.push_back(size == 1 ? Piece{} : Piece{128 * i, 128 * (i + 1)});
      }
      ++sequence;
    }
    batches.rank_begin.push_back(times.micro_batches);
    ASSERT_EQ(batches.groups(0), in.groups);
    const double bound = pieces_lower_bound(cost, batches, {&times, 1});
    EXPECT_GT(bound, 0);
    std::vector<int> order(in.groups.size());
    std::iota(order.begin(), order.end(), 0);
    do {
      std::vector<int> groups, micro_batches;
      for (const int group : order) {
        groups.push_back(in.groups[static_cast<size_t>(group)]);
        const int first = std::accumulate(in.groups.begin(), in.groups.begin() + group, 0);
        for (int i = 0; i < groups.back(); ++i) micro_batches.push_back(first + i);
      }
      for (int ahead = 1; ahead <= times.micro_batches; ++ahead)
        EXPECT_GE(Schedule(times.stages, groups, ahead).makespan(times, micro_batches), bound * (1 - 1e-9))
            << "trial " << trial;
    } while (std::next_permutation(order.begin(), order.end()));
  }
}

TEST(Ordering, TiesAndSmallCounts) {
  EXPECT_EQ(small_at_both_ends({}, true), std::vector<int>{});
  EXPECT_EQ(small_at_both_ends(std::vector<double>{3}, false), std::vector<int>{0});
  for (const int count : {2, 5, 16}) {
    const std::vector<double> equal(static_cast<size_t>(count), 2.0);
    for (const bool first : {true, false}) {
      std::vector<int> order = small_at_both_ends(equal, first);
      std::sort(order.begin(), order.end());
      for (int i = 0; i < count; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], i);
    }
  }
  // Rises to the largest and falls again, whatever the loads.
  Random random(37);
  for (int trial = 0; trial < 50; ++trial) {
    std::vector<double> load(1 + random.below(20));
    for (double& l : load) l = static_cast<double>(random.below(6));
    const std::vector<int> order = small_at_both_ends(load, trial % 2 == 0);
    std::vector<double> along;
    for (const int i : order) along.push_back(load[static_cast<size_t>(i)]);
    const auto top = std::max_element(along.begin(), along.end());
    EXPECT_TRUE(std::is_sorted(along.begin(), top));
    EXPECT_TRUE(std::is_sorted(top, along.end(), std::greater<>()));
  }
  // Equal micro-batches: no order is better, and the one given stays.
  PipelineTimes times;
  times.stages = 3;
  times.micro_batches = 8;
  times.forward.assign(24, 1.0);
  times.backward.assign(24, 2.0);
  std::vector<int> order{7, 6, 5, 4, 3, 2, 1, 0}, given = order;
  EXPECT_EQ(improve_order(Schedule(3, 8), times, 1000, order), (8 + 2) * 3.0);
  EXPECT_EQ(order, given);
}

}  // namespace
}  // namespace sb
