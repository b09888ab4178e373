#include "plan/schedule/ordering.h"

#include <algorithm>
#include <numeric>

#include "core/errors.h"

namespace sb {
namespace {

constexpr double kGain = 1 - 1e-9;  // smaller differences are rounding

int64_t factorial(int n) {
  int64_t product = 1;
  for (int i = 2; i <= n; ++i) product *= i;
  return product;
}

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

  void swap_pairs() {
    const size_t m = best_.size();
    std::vector<int> order = best_;
    size_t since_better = 0;
    const size_t pairs = m * (m - 1) / 2;
    // Distances first: neighbours are the most likely to help, and a full round without gain ends the search.
    for (size_t distance = 1, i = 0; trials_ > 0 && since_better < pairs;) {
      order = best_;
      std::swap(order[i], order[i + distance]);
      since_better = consider(order) ? 0 : since_better + 1;
      if (++i + distance >= m) {
        i = 0;
        distance = distance + 1 < m ? distance + 1 : 1;
      }
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
