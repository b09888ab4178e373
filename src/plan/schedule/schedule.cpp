#include "plan/schedule/schedule.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <numeric>
#include <utility>

#include "core/errors.h"
#include "plan/schedule/vector_kernels.h"

namespace sb {

namespace {

// What every stage runs, stage by stage in its order: a position, and one's complement (~) of it for its backward.
// `waiting`: the most micro-batches whose backward has not run, of each stage.
std::vector<int32_t> stage_programs(int stages, std::span<const int> groups, int ahead, int warmup_depth,
                                    std::vector<int>& waiting) {
  std::vector<int> backward, needed;  // position of backward j, and how many forwards its group needs
  for (const int size : groups) {
    SB_CHECK(size > 0, "a group of {} micro-batches", size);
    const int end = static_cast<int>(backward.size()) + size;
    for (int i = end - 1; i >= end - size; --i) {
      backward.push_back(i);
      needed.push_back(end);
    }
  }
  const auto count = static_cast<int>(backward.size());
  std::vector<int32_t> programs(2 * static_cast<size_t>(stages) * backward.size());
  int32_t* next = programs.data();
  waiting.assign(static_cast<size_t>(stages), 0);
  for (int s = 0; s < stages; ++s) {
    int done = 0, most = 0;
    for (int j = 0; j < count; ++j) {
      const int64_t wanted = std::max<int64_t>(needed[static_cast<size_t>(j)], int64_t{j} + ahead) +
                             int64_t{warmup_depth} * (stages - 1 - s);
      while (done < std::min<int64_t>(count, wanted)) *next++ = done++;
      most = std::max(most, done - j);
      *next++ = ~backward[static_cast<size_t>(j)];
    }
    waiting[static_cast<size_t>(s)] = most;
  }
  return programs;
}

}  // namespace

Schedule::Schedule(int stages, int micro_batches, int warmup_depth)
    : Schedule(stages, std::vector<int>(static_cast<size_t>(std::max(micro_batches, 0)), 1), 1, warmup_depth) {}

Schedule::Schedule(int stages, std::span<const int> groups, int ahead, int warmup_depth)
    : stages_(stages), micro_batches_(std::accumulate(groups.begin(), groups.end(), 0)) {
  SB_CHECK(stages > 0 && micro_batches_ > 0 && ahead > 0 && warmup_depth > 0,
           "{} stages, {} micro-batches, {} ahead, warm-up depth {}", stages, micro_batches_, ahead, warmup_depth);
  // What each stage runs, in its own order; then merged into one order that respects the dependencies. It goes in
  // waves of operations that do not depend on each other, which a processor can run side by side.
  const std::vector<int32_t> program = stage_programs(stages, groups, ahead, warmup_depth, slots_);
  const auto m = static_cast<size_t>(micro_batches_), total = program.size();
  constexpr int32_t kNotYet = std::numeric_limits<int32_t>::max();
  std::vector<int32_t> forward_node(static_cast<size_t>(stages) * m, kNotYet), backward_node = forward_node;
  // The node that position i of a stage waits for: another stage's, or its own forward where gradients begin. The first
  // stage's forwards wait for none.
  const std::vector<int32_t> none(m, -1);
  struct Stage {
    const int32_t *next, *end, *forward_needs, *backward_needs;
    int32_t *forward, *backward;
  };
  std::vector<Stage> at(static_cast<size_t>(stages));
  for (size_t s = 0; s < at.size(); ++s) {
    int32_t *forward = forward_node.data() + s * m, *backward = backward_node.data() + s * m;
    at[s] = {program.data() + s * 2 * m,
             program.data() + (s + 1) * 2 * m,
             s > 0 ? forward - m : none.data(),
             s + 1 < at.size() ? backward + m : forward,
             forward,
             backward};
  }
  for (int s = 0; s < stages; ++s) last_node_.push_back(-1 - s);
  nodes_.resize(total);
  for (int32_t id = 0; id < static_cast<int32_t>(total);) {
    const int32_t before = id;
    for (size_t s = 0; s < at.size(); ++s) {
      Stage& stage = at[s];
      if (stage.next == stage.end) continue;
      const int32_t what = *stage.next;
      const bool is_backward = what < 0;
      const int32_t i = is_backward ? ~what : what;
      const int32_t dependency = (is_backward ? stage.backward_needs : stage.forward_needs)[i];
      if (dependency >= before) continue;
      nodes_[static_cast<size_t>(id)] = {last_node_[s], dependency, i, static_cast<int16_t>(s), is_backward};
      (is_backward ? stage.backward : stage.forward)[i] = id;
      last_node_[s] = id++;
      ++stage.next;
    }
    SB_CHECK(id > before, "the schedule of {} stages, {} micro-batches in {} groups, {} ahead has a cycle", stages,
             micro_batches_, groups.size(), ahead);
  }
}

template <bool kTransfers>
double Schedule::run(const PipelineTimes& times, std::span<const int> order, double* end) const {
  const double* duration[2] = {times.forward.data(), times.backward.data()};
  const double* transfer[2] = {times.forward_transfer.data(), times.backward_transfer.data()};
  const int* place = order.empty() ? nullptr : order.data();
  const Node* nodes = nodes_.data();
  const size_t count = nodes_.size();
  // What has no predecessor (-1 - stage) finds there when its stage may begin, without a branch. A missing dependency
  // (-1) is one of the first stage.
  double* ends = end + stages_;
  for (int s = 0; s < stages_; ++s) ends[-1 - s] = gathered(static_cast<size_t>(s), times, order);
  for (size_t id = 0; id < count; ++id) {
    const Node node = nodes[id];
    const int micro_batch = place == nullptr ? node.position : place[node.position];
    const size_t index = static_cast<size_t>(micro_batch * stages_ + node.stage);
    double ready = ends[node.dependency];
    if constexpr (kTransfers) {
      // The first stage receives nothing, and the last one turns from forward to backward without a transfer.
      ready += transfer[node.backward][index];
    }
    ends[id] = std::max(ends[node.previous], ready) + duration[node.backward][index];
  }
  double makespan = 0;
  for (size_t s = 0; s < last_node_.size(); ++s)
    makespan = std::max(makespan, ends[last_node_[s]] + tail_of(s, times, order));
  return makespan;
}

double Schedule::gathered(size_t stage, const PipelineTimes& times, std::span<const int> order) const {
  if (times.gather.empty()) return 0.0;
  return times.gather[stage].beside(times.forward[times.at(order.empty() ? 0 : order[0], static_cast<int>(stage))]);
}

double Schedule::tail_of(size_t stage, const PipelineTimes& times, std::span<const int> order) const {
  if (times.tail.empty()) return 0.0;
  const int position = nodes_[static_cast<size_t>(last_node_[stage])].position;
  const int micro_batch = order.empty() ? position : order[static_cast<size_t>(position)];
  return times.tail[stage].beside(times.backward[times.at(micro_batch, static_cast<int>(stage))]);
}

double Schedule::run(const PipelineTimes& times, std::span<const int> order, double* end) const {
  return times.forward_transfer.empty() ? run<false>(times, order, end) : run<true>(times, order, end);
}

double Schedule::makespan(const PipelineTimes& times, std::span<const int> order) const {
  constexpr size_t kOnStack = 2048;
  if (room() <= kOnStack) {
    double end[kOnStack];
    return run(times, order, end);
  }
  const auto end = std::make_unique_for_overwrite<double[]>(room());
  return run(times, order, end.get());
}

void Schedule::set_gathered(std::span<const double> forward, std::span<const Exposed> gather, double* end) const {
  for (size_t s = 0; s < last_node_.size(); ++s)
    for (size_t lane = 0; lane < kLanes; ++lane)
      end[(last_node_.size() - 1 - s) * kLanes + lane] =
          gather.empty() ? 0.0 : gather[s].beside(forward[s * kLanes + lane]);
}

void Schedule::latest_ends(const double* end, std::span<const double> backward, std::span<const Exposed> tail,
                           std::span<double, kLanes> out) const {
  std::fill(out.begin(), out.end(), 0.0);
  for (size_t s = 0; s < last_node_.size(); ++s) {
    const double* own = end + static_cast<size_t>(last_node_[s] + stages_) * kLanes;
    const auto position = static_cast<size_t>(nodes_[static_cast<size_t>(last_node_[s])].position);
    const double* took = backward.data() + (position * static_cast<size_t>(stages_) + s) * kLanes;
    for (size_t lane = 0; lane < kLanes; ++lane)
      out[lane] = std::max(out[lane], own[lane] + (tail.empty() ? 0.0 : tail[s].beside(took[lane])));
  }
}

void Schedule::makespans(const PipelineTimes& times, std::span<const double> forward, std::span<const double> backward,
                         std::vector<double>& scratch, std::span<double, kLanes> out) const {
  scratch.resize(room() * kLanes);
  set_gathered(forward, times.gather, scratch.data());
  const bool transfers = !times.forward_transfer.empty();
  run_lanes(nodes_.data(), nodes_.size(), stages_, forward.data(), backward.data(),
            transfers ? times.forward_transfer.data() : nullptr, transfers ? times.backward_transfer.data() : nullptr,
            /*transfers_by_lane=*/false, scratch.data());
  latest_ends(scratch.data(), backward, times.tail, out);
}

void Schedule::makespans(const LaneTimes& times, std::vector<double>& scratch, std::span<double, kLanes> out) const {
  scratch.resize(room() * kLanes);
  set_gathered(times.forward, times.gather, scratch.data());
  const bool transfers = !times.forward_transfer.empty();
  run_lanes(nodes_.data(), nodes_.size(), stages_, times.forward.data(), times.backward.data(),
            transfers ? times.forward_transfer.data() : nullptr, transfers ? times.backward_transfer.data() : nullptr,
            /*transfers_by_lane=*/true, scratch.data());
  latest_ends(scratch.data(), times.backward, times.tail, out);
}

double Schedule::critical_path(const PipelineTimes& times, std::span<const int> order, std::vector<int>& chain) const {
  std::vector<double> buffer(room());
  const double makespan = run(times, order, buffer.data());
  const double* end = buffer.data() + stages_;
  chain.clear();
  int32_t at = -1;
  double latest = -1;
  for (size_t s = 0; s < last_node_.size(); ++s) {
    const double finish = end[static_cast<size_t>(last_node_[s])] + tail_of(s, times, order);
    if (finish > latest) {
      latest = finish;
      at = last_node_[s];
    }
  }
  while (at >= 0) {
    chain.push_back(at);
    const Node& node = nodes_[static_cast<size_t>(at)];
    const int micro_batch = order.empty() ? node.position : order[static_cast<size_t>(node.position)];
    const size_t index = times.at(micro_batch, node.stage);
    double ready = -1;
    if (node.dependency >= 0) {
      ready = end[static_cast<size_t>(node.dependency)];
      if (!times.forward_transfer.empty())
        ready += (node.backward ? times.backward_transfer : times.forward_transfer)[index];
    }
    const double free = end[node.previous];
    at = ready > free ? node.dependency : node.previous;
  }
  std::reverse(chain.begin(), chain.end());
  return makespan;
}

void Schedule::slacks(const PipelineTimes& times, std::span<const int> order, double deadline,
                      std::span<double> slack) const {
  std::vector<double> buffer(room() + nodes_.size());
  run(times, order, buffer.data());
  const double* end = buffer.data() + stages_;
  double* latest = buffer.data() + room();
  std::fill_n(latest, nodes_.size(), deadline);
  for (size_t s = 0; s < last_node_.size(); ++s) latest[last_node_[s]] -= tail_of(s, times, order);
  std::fill(slack.begin(), slack.end(), deadline);
  for (size_t id = nodes_.size(); id-- > 0;) {
    const Node& node = nodes_[id];
    const int micro_batch = order.empty() ? node.position : order[static_cast<size_t>(node.position)];
    const size_t index = times.at(micro_batch, node.stage);
    const double start = latest[id] - (node.backward ? times.backward : times.forward)[index];
    if (node.previous >= 0) latest[node.previous] = std::min(latest[node.previous], start);
    if (node.dependency >= 0) {
      const double transfer = times.forward_transfer.empty()
                                  ? 0.0
                                  : (node.backward ? times.backward_transfer : times.forward_transfer)[index];
      latest[node.dependency] = std::min(latest[node.dependency], start - transfer);
    }
    slack[index] = std::min(slack[index], latest[id] - end[id]);
  }
}

ScheduleResult Schedule::analyze(const PipelineTimes& times, std::span<const int> order) const {
  std::vector<double> buffer(room());
  ScheduleResult result;
  result.makespan = run(times, order, buffer.data());
  const double* end = buffer.data() + stages_;
  // Latest ends, backwards through the graph.
  std::vector<double> latest(nodes_.size(), result.makespan);
  for (size_t s = 0; s < last_node_.size(); ++s) latest[static_cast<size_t>(last_node_[s])] -= tail_of(s, times, order);
  double busy = 0;
  result.operations.resize(nodes_.size());
  for (size_t id = nodes_.size(); id-- > 0;) {
    const Node& node = nodes_[id];
    const int micro_batch = order.empty() ? node.position : order[static_cast<size_t>(node.position)];
    const size_t index = times.at(micro_batch, node.stage);
    const double duration = (node.backward ? times.backward : times.forward)[index];
    const double latest_start = latest[id] - duration;
    if (node.previous >= 0)
      latest[static_cast<size_t>(node.previous)] = std::min(latest[static_cast<size_t>(node.previous)], latest_start);
    if (node.dependency >= 0) {
      double transfer = 0;
      if (!times.forward_transfer.empty())
        transfer = (node.backward ? times.backward_transfer : times.forward_transfer)[index];
      double& limit = latest[static_cast<size_t>(node.dependency)];
      limit = std::min(limit, latest_start - transfer);
    }
    result.operations[id] = {node.stage, node.position,      micro_batch, node.backward,
                             false,      end[id] - duration, end[id],     std::max(0.0, latest[id] - end[id])};
    busy += duration;
  }
  result.bubble_share = result.makespan > 0 ? 1.0 - busy / (result.makespan * stages_) : 0.0;
  critical_path(times, order, result.critical_path);
  for (int id : result.critical_path) result.operations[static_cast<size_t>(id)].critical = true;
  return result;
}

std::shared_ptr<const Schedule> shared_schedule(int stages, int micro_batches, int warmup_depth) {
  const std::vector<int> groups(static_cast<size_t>(std::max(micro_batches, 0)), 1);
  return shared_schedule(stages, groups, 1, warmup_depth);
}

std::shared_ptr<const Schedule> shared_schedule(int stages, std::span<const int> groups, int ahead, int warmup_depth) {
  constexpr size_t kKept = 32;
  static std::mutex mutex;
  static std::deque<std::pair<std::vector<int>, std::shared_ptr<const Schedule>>> kept;
  std::vector<int> key{stages, ahead, warmup_depth};
  key.insert(key.end(), groups.begin(), groups.end());
  const std::lock_guard lock(mutex);
  for (const auto& [known, schedule] : kept)
    if (known == key) return schedule;
  auto schedule = std::make_shared<const Schedule>(stages, groups, ahead, warmup_depth);
  kept.emplace_front(std::move(key), schedule);
  if (kept.size() > kKept) kept.pop_back();
  return schedule;
}

}  // namespace sb
