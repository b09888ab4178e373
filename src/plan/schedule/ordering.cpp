#include "plan/schedule/ordering.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "core/errors.h"

namespace sb {
namespace {

constexpr double kGain = 1 - 1e-9;  // smaller differences are rounding

int64_t factorial(int n) {
  int64_t product = 1;
  for (int i = 2; i <= n; ++i) product *= i;
  return product;
}

// The same order in every lane but for two positions each.
class SwappedLanes {
 public:
  static constexpr size_t kLanes = Schedule::kLanes;

  // `order` may change where restore() is told.
  SwappedLanes(const Schedule& schedule, const PipelineTimes& times, const std::vector<int>& order)
      : schedule_(schedule), order_(order), stages_(static_cast<size_t>(times.stages)) {
    add(times.forward, lanes_.forward);
    add(times.backward, lanes_.backward);
    add(times.forward_transfer, lanes_.forward_transfer);
    add(times.backward_transfer, lanes_.backward_transfer);
    lanes_.tail = times.tail;
    lanes_.gather = times.gather;
    for (size_t position = 0; position < order.size(); ++position) restore(position);
  }

  void swap(size_t lane, size_t a, size_t b) {
    for (const auto& [from, to] : tables_)
      for (size_t s = 0; s < stages_; ++s) {
        (*to)[(a * stages_ + s) * kLanes + lane] = (*from)[static_cast<size_t>(order_[b]) * stages_ + s];
        (*to)[(b * stages_ + s) * kLanes + lane] = (*from)[static_cast<size_t>(order_[a]) * stages_ + s];
      }
  }
  // These positions as the order has them, in all lanes.
  void restore(size_t a, size_t b) {
    restore(a);
    restore(b);
  }
  std::array<double, kLanes> makespans() {
    std::array<double, kLanes> out;
    schedule_.makespans(lanes_, scratch_, out);
    return out;
  }

 private:
  void add(const std::vector<double>& from, std::vector<double>& to) {
    if (from.empty()) return;
    to.resize(from.size() * kLanes);
    tables_.emplace_back(&from, &to);
  }
  void restore(size_t position) {
    for (const auto& [from, to] : tables_)
      for (size_t s = 0; s < stages_; ++s)
        std::fill_n(to->begin() + static_cast<ptrdiff_t>((position * stages_ + s) * kLanes), kLanes,
                    (*from)[static_cast<size_t>(order_[position]) * stages_ + s]);
  }

  const Schedule& schedule_;
  const std::vector<int>& order_;
  size_t stages_;
  Schedule::LaneTimes lanes_;
  std::vector<std::pair<const std::vector<double>*, std::vector<double>*>> tables_;
  std::vector<double> scratch_;
};

class OrderSearch {
 public:
  OrderSearch(const Schedule& schedule, const PipelineTimes& times, int64_t trials, std::vector<int>& order)
      : schedule_(schedule),
        times_(times),
        best_(order),
        best_makespan_(schedule.makespan(times, order)),
        trials_(trials) {}

  double run() {
    const auto m = static_cast<int>(best_.size());
    if (m < 2 || schedule_.stages() == 1) return best_makespan_;
    constexpr int kAllOrders = 6;
    if (m <= kAllOrders && factorial(m) <= trials_) {
      try_all();
    } else {
      std::vector<double> load(best_.size(), 0.0);
      for (int i = 0; i < m; ++i)
        for (int s = 0; s < times_.stages; ++s)
          load[static_cast<size_t>(i)] += times_.forward[times_.at(i, s)] + times_.backward[times_.at(i, s)];
      for (bool first : {true, false}) consider(small_at_both_ends(load, first));
      swap_pairs();
    }
    return best_makespan_;
  }

 private:
  bool consider(const std::vector<int>& order) {
    --trials_;
    const double makespan = schedule_.makespan(times_, order);
    if (makespan >= best_makespan_ * kGain) return false;
    best_makespan_ = makespan;
    best_ = order;
    return true;
  }

  void try_all() {
    std::vector<int> order(best_.size());
    std::iota(order.begin(), order.end(), 0);
    do {
      consider(order);
    } while (std::next_permutation(order.begin(), order.end()));
  }

  // Two positions whose micro-batches change places. Distances first: neighbours are the most likely to help.
  struct Swap {
    size_t first = 0, distance = 1;
    Swap next(size_t positions) const {
      if (first + 1 + distance < positions) return {first + 1, distance};
      return {0, distance + 1 < positions ? distance + 1 : 1};
    }
  };

  // One swap after the other from the best order so far; a full round without gain ends the search. Several are tried
  // at once: those after one that helps count for nothing.
  void swap_pairs() {
    const size_t m = best_.size(), pairs = m * (m - 1) / 2;
    SwappedLanes lanes(schedule_, times_, best_);
    size_t since_better = 0;
    for (Swap next; trials_ > 0 && since_better < pairs;) {
      const size_t count =
          std::min({static_cast<size_t>(Schedule::kLanes), static_cast<size_t>(trials_), pairs - since_better});
      std::array<Swap, Schedule::kLanes> swaps;
      for (size_t lane = 0; lane < count; ++lane, next = next.next(m)) {
        swaps[lane] = next;
        lanes.swap(lane, next.first, next.first + next.distance);
      }
      const auto makespan = lanes.makespans();
      for (size_t lane = 0; lane < count; ++lane) {
        --trials_;
        ++since_better;
        if (makespan[lane] >= best_makespan_ * kGain) continue;
        best_makespan_ = makespan[lane];
        std::swap(best_[swaps[lane].first], best_[swaps[lane].first + swaps[lane].distance]);
        since_better = 0;
        next = swaps[lane].next(m);
        break;
      }
      for (size_t lane = 0; lane < count; ++lane)
        lanes.restore(swaps[lane].first, swaps[lane].first + swaps[lane].distance);
    }
  }

  const Schedule& schedule_;
  const PipelineTimes& times_;
  std::vector<int>& best_;
  double best_makespan_;
  int64_t trials_;
};

}  // namespace

std::vector<int> small_at_both_ends(std::span<const double> load, bool smallest_first) {
  std::vector<int> ascending(load.size());
  std::iota(ascending.begin(), ascending.end(), 0);
  std::stable_sort(ascending.begin(), ascending.end(), [&](int a, int b) { return load[a] < load[b]; });
  std::vector<int> order(load.size());
  size_t front = 0, back = load.size();
  bool to_front = smallest_first;
  for (int item : ascending) {
    order[to_front ? front++ : --back] = item;
    to_front = !to_front;
  }
  return order;
}

double improve_order(const Schedule& schedule, const PipelineTimes& times, int64_t trials, std::vector<int>& order) {
  SB_CHECK(static_cast<int>(order.size()) == schedule.micro_batches(), "{} positions, {} micro-batches", order.size(),
           schedule.micro_batches());
  return OrderSearch(schedule, times, trials, order).run();
}

}  // namespace sb
