#include "plan/schedule/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "core/random.h"

namespace sb {
namespace {

PipelineTimes equal_times(int stages, int micro_batches, double forward, double backward) {
  PipelineTimes times;
  times.stages = stages;
  times.micro_batches = micro_batches;
  times.forward.assign(static_cast<size_t>(stages * micro_batches), forward);
  times.backward.assign(static_cast<size_t>(stages * micro_batches), backward);
  return times;
}

PipelineTimes random_times(Random& random, int stages, int micro_batches, bool transfers) {
  PipelineTimes times = equal_times(stages, micro_batches, 0, 0);
  for (double& t : times.forward) t = 1 + 9 * random.uniform();
  for (double& t : times.backward) t = 2 + 18 * random.uniform();
  if (transfers) {
    for (int i = 0; i < micro_batches; ++i)
      for (int s = 0; s < stages; ++s) {
        times.forward_transfer.push_back(s == 0 ? 0.0 : 3 * random.uniform());
        times.backward_transfer.push_back(s + 1 == stages ? 0.0 : 3 * random.uniform());
      }
    for (int s = 0; s < stages; ++s) {
      times.tail.push_back(5 * random.uniform());
      times.gather.push_back(20 * random.uniform());
    }
  }
  return times;
}

// The whole operation graph, built from the definition and solved by memoised recursion: nothing shared with the
// simulator but the durations.
class LongestPath {
 public:
  // Groups: by the definition in schedule.h, and most_waiting of every stage beside it.
  LongestPath(const PipelineTimes& times, const std::vector<int>& groups, int ahead, int depth) : times_(times) {
    std::vector<int> first_of_group, group_of;
    for (const int size : groups) {
      first_of_group.push_back(static_cast<int>(group_of.size()));
      for (int i = 0; i < size; ++i) group_of.push_back(static_cast<int>(first_of_group.size()) - 1);
    }
    first_of_group.push_back(times.micro_batches);
    for (int s = 0; s < times.stages; ++s) {
      std::vector<std::pair<bool, int>> program;
      int forwards = 0, most = 0;
      for (int j = 0; j < times.micro_batches; ++j) {
        const int group = group_of[static_cast<size_t>(j)];
        const int begin = first_of_group[static_cast<size_t>(group)],
                  end = first_of_group[static_cast<size_t>(group) + 1];
        const int until = std::max(end, j + ahead) + depth * (times.stages - 1 - s);
        for (; forwards < std::min(until, times.micro_batches); ++forwards) program.emplace_back(false, forwards);
        most = std::max(most, forwards - j);
        program.emplace_back(true, begin + end - 1 - j);
      }
      programs_.push_back(program);
      most_waiting.push_back(most);
    }
  }
  std::vector<int> most_waiting;

  LongestPath(const PipelineTimes& times, int depth) : times_(times) {
    for (int s = 0; s < times.stages; ++s) {
      std::vector<std::pair<bool, int>> program;
      int forwards = 0, backwards = 0;
      const int ahead = std::min(times.micro_batches, depth * (times.stages - 1 - s));
      while (forwards < ahead) program.emplace_back(false, forwards++);
      while (backwards < times.micro_batches) {
        if (forwards < times.micro_batches) program.emplace_back(false, forwards++);
        program.emplace_back(true, backwards++);
      }
      programs_.push_back(program);
    }
  }
  double makespan() {
    double latest = 0;
    for (int s = 0; s < times_.stages; ++s) {
      const auto [backward, i] = programs_[static_cast<size_t>(s)].back();
      latest = std::max(latest, end(s, backward, i) + after(s, i));
    }
    return latest;
  }

 private:
  double after(int s, int i) const {
    if (times_.tail.empty()) return 0;
    const Exposed& tail = times_.tail[static_cast<size_t>(s)];
    return std::max(tail.least, tail.all - tail.hidden * times_.backward[times_.at(i, s)]);
  }
  double end(int s, bool backward, int i) {
    const auto key = std::make_tuple(s, backward, i);
    if (const auto found = memo_.find(key); found != memo_.end()) return found->second;
    const size_t at = times_.at(i, s);
    double start = 0;
    const auto& program = programs_[static_cast<size_t>(s)];
    const auto place = std::find(program.begin(), program.end(), std::pair(backward, i));
    if (place != program.begin()) start = end(s, std::prev(place)->first, std::prev(place)->second);
    if (place == program.begin() && !times_.gather.empty()) {
      const Exposed& gather = times_.gather[static_cast<size_t>(s)];
      start = std::max(gather.least, gather.all - gather.hidden * times_.forward[at]);
    }
    const bool transfers = !times_.forward_transfer.empty();
    if (!backward && s > 0)
      start = std::max(start, end(s - 1, false, i) + (transfers ? times_.forward_transfer[at] : 0));
    if (backward && s + 1 < times_.stages)
      start = std::max(start, end(s + 1, true, i) + (transfers ? times_.backward_transfer[at] : 0));
    if (backward && s + 1 == times_.stages) start = std::max(start, end(s, false, i));
    return memo_[key] = start + (backward ? times_.backward : times_.forward)[at];
  }
  const PipelineTimes& times_;
  std::vector<std::vector<std::pair<bool, int>>> programs_;
  std::map<std::tuple<int, bool, int>, double> memo_;
};

TEST(Schedule, EqualMicroBatchesHaveTheClosedForm) {
  for (int p : {1, 2, 3, 4, 8})
    for (int m : {1, 2, 3, 4, 7, 8, 16, 33}) {
      const PipelineTimes times = equal_times(p, m, 2.0, 4.0);
      const ScheduleResult result = Schedule(p, m).analyze(times, {});
      EXPECT_NEAR(result.makespan, (m + p - 1) * 6.0, 1e-9) << p << " stages, " << m << " micro-batches";
      EXPECT_NEAR(result.bubble_share, (p - 1.0) / (m + p - 1.0), 1e-12) << p << " stages, " << m << " micro-batches";
    }
}

// Two stages, forwards of 1 and backwards of 3, whose gradient leaves 1 before their end: by hand.
//   stage 0: F0 0-1, F1 1-2, B0 4-7, B1 8-11
//   stage 1: F0 1-2, B0 2-5, F1 5-6, B1 6-9
TEST(Schedule, AGradientMayLeaveBeforeItsBackwardEnds) {
  PipelineTimes times = equal_times(2, 2, 1.0, 3.0);
  const Schedule schedule(2, 2);
  EXPECT_EQ(schedule.makespan(times, {}), 12);
  times.forward_transfer.assign(4, 0.0);
  times.backward_transfer = {-1, 0, -1, 0};
  EXPECT_EQ(schedule.makespan(times, {}), 11);
  std::vector<std::pair<double, double>> last;
  for (const ScheduledOperation& operation : schedule.analyze(times, {}).operations)
    if (operation.backward && operation.micro_batch == 1) {
      last.emplace_back(operation.start, operation.end);
      EXPECT_EQ(operation.slack, 0);
    }
  std::ranges::sort(last);
  EXPECT_EQ(last, (std::vector<std::pair<double, double>>{{6, 9}, {8, 11}}));
}

TEST(Schedule, EqualsTheLongestPathOfTheWholeGraph) {
  Random random(7);
  for (int trial = 0; trial < 200; ++trial) {
    const int p = 1 + static_cast<int>(random.below(6)), m = 1 + static_cast<int>(random.below(12));
    const int depth = 1 + static_cast<int>(random.below(3));
    PipelineTimes times = random_times(random, p, m, trial % 2 == 0);
    if (trial % 4 == 0)
      for (Exposed& gather : times.gather) gather = {gather.least / 4, gather.all, random.uniform()};
    const Schedule schedule(p, m, depth);
    EXPECT_NEAR(schedule.makespan(times, {}), LongestPath(times, depth).makespan(), 1e-9);
    const ScheduleResult result = schedule.analyze(times, {});
    EXPECT_DOUBLE_EQ(result.makespan, schedule.makespan(times, {}));
    // The critical path has no slack and starts at zero, or with the weights of its stage.
    const ScheduledOperation& first = result.operations[static_cast<size_t>(result.critical_path.front())];
    const auto stage = static_cast<size_t>(first.stage);
    EXPECT_NEAR(first.start, times.gather.empty() ? 0 : times.gather[stage].beside(times.forward[stage]), 1e-9);
    for (int id : result.critical_path) EXPECT_NEAR(result.operations[static_cast<size_t>(id)].slack, 0, 1e-9);
  }
}

TEST(Schedule, GroupsEqualTheLongestPathAndHoldNoMoreThanTheyMust) {
  Random random(19);
  for (int trial = 0; trial < 300; ++trial) {
    const int p = 1 + static_cast<int>(random.below(6)), depth = 1 + static_cast<int>(random.below(2));
    std::vector<int> groups;
    int m = 0, longest = 0;
    for (uint64_t g = 0; g < 1 + random.below(5); ++g) {
      groups.push_back(1 + static_cast<int>(random.below(5)));
      m += groups.back();
      longest = std::max(longest, groups.back());
    }
    const int ahead = 1 + static_cast<int>(random.below(static_cast<uint64_t>(longest)));
    const PipelineTimes times = random_times(random, p, m, trial % 2 == 0);
    const Schedule schedule(p, groups, ahead, depth);
    LongestPath expected(times, groups, ahead, depth);
    EXPECT_EQ(schedule.micro_batches(), m);
    EXPECT_NEAR(schedule.makespan(times, {}), expected.makespan(), 1e-9);
    for (int s = 0; s < p; ++s) {
      EXPECT_EQ(schedule.slots(s), expected.most_waiting[static_cast<size_t>(s)]);
      EXPECT_LE(schedule.slots(s), longest + depth * (p - 1 - s));
    }
    // Messages of a link arrive in the order they are sent: all stages have one order of forwards and one of backwards.
    std::vector<std::vector<int>> order[2] = {std::vector<std::vector<int>>(static_cast<size_t>(p)),
                                              std::vector<std::vector<int>>(static_cast<size_t>(p))};
    for (const Schedule::Node& node : schedule.nodes())
      order[node.backward][static_cast<size_t>(node.stage)].push_back(node.position);
    for (const auto& direction : order)
      for (const auto& stage : direction) EXPECT_EQ(stage, direction[0]);
  }
}

TEST(Schedule, GroupsOfOneAreOneForwardOneBackward) {
  for (int p : {1, 2, 4})
    for (int m : {1, 3, 9})
      for (int depth : {1, 2}) {
        const Schedule plain(p, m, depth), grouped(p, std::vector<int>(static_cast<size_t>(m), 1), 1, depth);
        ASSERT_EQ(plain.nodes().size(), grouped.nodes().size());
        for (size_t i = 0; i < plain.nodes().size(); ++i) {
          EXPECT_EQ(plain.nodes()[i].position, grouped.nodes()[i].position);
          EXPECT_EQ(plain.nodes()[i].stage, grouped.nodes()[i].stage);
          EXPECT_EQ(plain.nodes()[i].backward, grouped.nodes()[i].backward);
        }
        for (int s = 0; s < p; ++s) EXPECT_EQ(plain.slots(s), std::min(m, depth * (p - 1 - s) + 1));
      }
}

TEST(Schedule, EqualPiecesThatRunAheadFillThePipeline) {
  // One sequence of m pieces: all forwards, then all backwards, and nothing between but the way through the stages.
  for (int p : {1, 3, 4})
    for (int m : {1, 5, 12}) {
      const PipelineTimes times = equal_times(p, m, 2.0, 4.0);
      EXPECT_NEAR(Schedule(p, std::vector<int>{m}, m).makespan(times, {}), (m + p - 1) * 6.0, 1e-9);
    }
}

TEST(Schedule, AnOrderIsARelabelling) {
  Random random(3);
  const PipelineTimes times = random_times(random, 4, 6, true);
  const std::vector<int> order{3, 1, 5, 0, 2, 4};
  PipelineTimes moved = times;
  for (int i = 0; i < 6; ++i)
    for (int s = 0; s < 4; ++s) {
      const size_t to = times.at(i, s), from = times.at(order[static_cast<size_t>(i)], s);
      moved.forward[to] = times.forward[from];
      moved.backward[to] = times.backward[from];
      moved.forward_transfer[to] = times.forward_transfer[from];
      moved.backward_transfer[to] = times.backward_transfer[from];
    }
  const Schedule schedule(4, 6);
  EXPECT_DOUBLE_EQ(schedule.makespan(times, order), schedule.makespan(moved, {}));
}

TEST(Schedule, ALongerOperationNeverShortensTheStep) {
  Random random(11);
  for (int trial = 0; trial < 100; ++trial) {
    const int p = 1 + static_cast<int>(random.below(5)), m = 1 + static_cast<int>(random.below(9));
    PipelineTimes times = random_times(random, p, m, true);
    const Schedule schedule(p, m);
    double before = schedule.makespan(times, {});
    for (int change = 0; change < 20; ++change) {
      auto& list = random.below(2) == 0 ? times.forward : times.backward;
      list[random.below(list.size())] += random.uniform();
      const double after = schedule.makespan(times, {});
      EXPECT_GE(after, before - 1e-9);
      before = after;
    }
  }
}

TEST(Schedule, SlackIsExactlyHowMuchLongerAnOperationMayTake) {
  Random random(5);
  const PipelineTimes times = random_times(random, 4, 6, true);
  const Schedule schedule(4, 6);
  const ScheduleResult result = schedule.analyze(times, {});
  for (const ScheduledOperation& op : result.operations) {
    PipelineTimes longer = times;
    double& duration = (op.backward ? longer.backward : longer.forward)[times.at(op.micro_batch, op.stage)];
    duration += op.slack;
    EXPECT_NEAR(schedule.makespan(longer, {}), result.makespan, 1e-9);
    duration += 0.5;
    EXPECT_NEAR(schedule.makespan(longer, {}), result.makespan + 0.5, 1e-9);
  }
}

TEST(Schedule, ADeeperWarmUpHidesTransfers) {
  const int p = 4, m = 16;
  PipelineTimes times = equal_times(p, m, 10.0, 20.0);
  const double free = Schedule(p, m, 1).makespan(times, {});
  for (int i = 0; i < m; ++i)
    for (int s = 0; s < p; ++s) {
      times.forward_transfer.push_back(s == 0 ? 0.0 : 4.0);
      times.backward_transfer.push_back(s + 1 == p ? 0.0 : 4.0);
    }
  const double plain = Schedule(p, m, 1).makespan(times, {}), deep = Schedule(p, m, 2).makespan(times, {});
  EXPECT_GT(plain, free);
  EXPECT_LT(deep, plain);
  // What is left is the first way down and the last way up.
  EXPECT_NEAR(deep, free + 2 * (p - 1) * 4.0, 1e-9);
}

}  // namespace
}  // namespace sb
