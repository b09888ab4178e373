#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "core/errors.h"
#include "plan/batching/partition.h"

namespace sb {
namespace {

// Depth-first search, heaviest item first, into bins in order of load; equal bins are tried once.
class ExactSearch {
 public:
  explicit ExactSearch(const PartitionProblem& problem) : problem_(problem) {
    order_.resize(problem.weight.size());
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(), [&](int a, int b) { return problem.weight[a] > problem.weight[b]; });
    const auto bins = static_cast<size_t>(problem.bins);
    load_.assign(bins, 0.0);
    held_.assign(bins, 0);
    items_.assign(bins, 0);
    bin_.assign(order_.size(), -1);
    bound_ = partition_lower_bound(problem.weight, problem.bins);
    best_bin_ = longest_first(problem);
    if (!best_bin_.empty()) {
      improve_partition(problem, best_bin_, 10'000);
      best_ = heaviest_bin(problem, best_bin_);
    }
  }
  Assignment run() {
    search(0, problem_.bins * problem_.min_items);
    return best_bin_;
  }

 private:
  void search(size_t depth, int missing) {
    if (best_ <= bound_ * (1 + 1e-12)) return;
    if (depth == order_.size()) {
      const double heaviest = *std::max_element(load_.begin(), load_.end());
      if (heaviest < best_ * (1 - 1e-12)) {
        best_ = heaviest;
        best_bin_ = bin_;
      }
      return;
    }
    const auto item = static_cast<size_t>(order_[depth]);
    const double weight = problem_.weight[item];
    const int64_t tokens = problem_.tokens.empty() ? 0 : problem_.tokens[item];
    const bool must_fill = missing >= static_cast<int>(order_.size() - depth);
    for (size_t b = 0; b < load_.size(); ++b) {
      if (must_fill && items_[b] >= problem_.min_items) continue;
      if (load_[b] + weight >= best_ * (1 - 1e-12)) continue;
      if (problem_.cap > 0 && held_[b] + tokens > problem_.cap) continue;
      if (problem_.max_items > 0 && items_[b] >= problem_.max_items) continue;
      bool seen = false;
      for (size_t c = 0; c < b && !seen; ++c)
        seen = load_[c] == load_[b] && held_[c] == held_[b] && items_[c] == items_[b];
      if (seen) continue;
      load_[b] += weight;
      held_[b] += tokens;
      ++items_[b];
      bin_[item] = static_cast<int>(b);
      search(depth + 1, missing - (items_[b] <= problem_.min_items));
      load_[b] -= weight;
      held_[b] -= tokens;
      --items_[b];
      // An empty bin's load must be exactly zero again, or equal bins are no longer recognised.
      if (items_[b] == 0) load_[b] = 0;
    }
  }

  const PartitionProblem& problem_;
  std::vector<int> order_;
  std::vector<double> load_;
  std::vector<int64_t> held_;
  std::vector<int> items_;
  Assignment bin_, best_bin_;
  double best_ = std::numeric_limits<double>::infinity(), bound_ = 0;
};

// Local search on the heaviest bin.
class Improvement {
 public:
  Improvement(const PartitionProblem& problem, Assignment& assignment, int64_t trials)
      : problem_(problem), bin_(assignment), trials_(trials) {
    const auto bins = static_cast<size_t>(problem.bins);
    members_.resize(bins);
    load_.assign(bins, 0.0);
    held_.assign(bins, 0);
    for (size_t i = 0; i < assignment.size(); ++i) {
      const auto b = static_cast<size_t>(assignment[i]);
      members_[b].push_back(static_cast<int>(i));
      load_[b] += problem.weight[i];
      held_[b] += tokens(static_cast<int>(i));
    }
    bound_ = partition_lower_bound(problem.weight, problem.bins);
  }

  void run() {
    std::vector<size_t> order(load_.size());
    while (trials_ > 0) {
      const auto heaviest = static_cast<size_t>(std::max_element(load_.begin(), load_.end()) - load_.begin());
      if (load_[heaviest] <= bound_ * (1 + 1e-9)) return;
      // Lightest first; mostly one of the first few helps, so they are not sorted beforehand.
      const auto later = [&](size_t a, size_t b) { return load_[a] != load_[b] ? load_[a] > load_[b] : a > b; };
      std::iota(order.begin(), order.end(), size_t{0});
      std::make_heap(order.begin(), order.end(), later);
      bool better = false;
      for (auto end = order.end(); end != order.begin() && trials_ > 0 && !better; --end) {
        std::pop_heap(order.begin(), end, later);
        if (*(end - 1) != heaviest) better = resplit(heaviest, *(end - 1));
      }
      if (!better) return;
    }
  }

 private:
  int64_t tokens(int item) const { return problem_.tokens.empty() ? 0 : problem_.tokens[static_cast<size_t>(item)]; }

  bool fits(int64_t held, size_t count) const {
    return count >= static_cast<size_t>(problem_.min_items) && (problem_.cap == 0 || held <= problem_.cap) &&
           (problem_.max_items == 0 || count <= static_cast<size_t>(problem_.max_items));
  }

  // Shares the items of two bins anew; true if the heavier of the two became lighter than the heaviest was.
  bool resplit(size_t heavy, size_t light) {
    constexpr size_t kExhaustive = 10;
    return members_[heavy].size() + members_[light].size() <= kExhaustive ? split_all_ways(heavy, light)
                                                                          : move_or_swap(heavy, light);
  }

  bool split_all_ways(size_t heavy, size_t light) {
    items_ = members_[heavy];
    items_.insert(items_.end(), members_[light].begin(), members_[light].end());
    const size_t n = items_.size();
    const double total = load_[heavy] + load_[light];
    const int64_t total_held = held_[heavy] + held_[light];
    // Gray code: one item changes sides at a time. The last item stays, for symmetry.
    double best = load_[heavy] * (1 - 1e-9);
    uint32_t best_side = 0, side = 0;
    double load = 0;
    int64_t held = 0;
    size_t count = 0;
    const uint32_t ways = uint32_t{1} << (n - 1);
    for (uint32_t step = 1; step < ways; ++step) {
      const auto flip = static_cast<size_t>(__builtin_ctz(step));
      const int item = items_[flip];
      const bool in = (side >> flip & 1) != 0;
      const double weight = problem_.weight[static_cast<size_t>(item)];
      load += in ? -weight : weight;
      held += in ? -tokens(item) : tokens(item);
      count += in ? size_t(-1) : size_t(1);
      side ^= uint32_t{1} << flip;
      const double worse = std::max(load, total - load);
      if (worse < best && fits(held, count) && fits(total_held - held, n - count)) {
        best = worse;
        best_side = side;
      }
    }
    trials_ -= ways / 4 + 1;
    if (best_side == 0) return false;
    members_[heavy].clear();
    members_[light].clear();
    for (size_t i = 0; i < n; ++i) place(items_[i], (best_side >> i & 1) != 0 ? heavy : light);
    recount(heavy);
    recount(light);
    return true;
  }

  bool move_or_swap(size_t heavy, size_t light) {
    const double gap = load_[heavy] - load_[light];
    double best = gap * (1 - 1e-9);
    int give = -1, take = -1;
    const auto consider = [&](int out, int in) {
      --trials_;
      const double shift =
          problem_.weight[static_cast<size_t>(out)] - (in < 0 ? 0.0 : problem_.weight[static_cast<size_t>(in)]);
      const double left = std::abs(gap - 2 * shift);
      if (shift <= 0 || left >= best) return;
      const int64_t moved = tokens(out) - (in < 0 ? 0 : tokens(in));
      const size_t back = in < 0 ? 0 : 1;
      if (!fits(held_[heavy] - moved, members_[heavy].size() - 1 + back) ||
          !fits(held_[light] + moved, members_[light].size() + 1 - back))
        return;
      best = left;
      give = out;
      take = in;
    };
    for (int out : members_[heavy]) {
      consider(out, -1);
      for (int in : members_[light]) consider(out, in);
    }
    if (give < 0) return false;
    std::erase(members_[heavy], give);
    place(give, light);
    if (take >= 0) {
      std::erase(members_[light], take);
      place(take, heavy);
    }
    recount(heavy);
    recount(light);
    return true;
  }

  void place(int item, size_t bin) {
    members_[bin].push_back(item);
    bin_[static_cast<size_t>(item)] = static_cast<int>(bin);
  }

  void recount(size_t bin) {
    load_[bin] = 0;
    held_[bin] = 0;
    for (int item : members_[bin]) {
      load_[bin] += problem_.weight[static_cast<size_t>(item)];
      held_[bin] += tokens(item);
    }
  }

  const PartitionProblem& problem_;
  Assignment& bin_;
  int64_t trials_;
  std::vector<std::vector<int>> members_;
  std::vector<double> load_;
  std::vector<int64_t> held_;
  std::vector<int> items_;
  double bound_;
};

}  // namespace

Assignment exact_partition(const PartitionProblem& problem) {
  SB_CHECK(problem.weight.size() <= kExactItems, "exact partition of {} items", problem.weight.size());
  if (problem.weight.size() < static_cast<size_t>(problem.bins * problem.min_items)) return {};
  return ExactSearch(problem).run();
}

void improve_partition(const PartitionProblem& problem, Assignment& assignment, int64_t trials) {
  Improvement(problem, assignment, trials).run();
}

}  // namespace sb
