#include "plan/batching/partition.h"

#include <algorithm>
#include <numeric>
#include <queue>

#include "core/errors.h"

namespace sb {
namespace {

std::vector<int> heaviest_first(std::span<const double> weight) {
  std::vector<int> order(weight.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return weight[a] > weight[b]; });
  return order;
}

int64_t tokens_of(const PartitionProblem& problem, int item) {
  return problem.tokens.empty() ? 0 : problem.tokens[static_cast<size_t>(item)];
}

bool has_room(const PartitionProblem& problem, int64_t held_tokens, int held_items, int64_t more) {
  return (problem.cap == 0 || held_tokens + more <= problem.cap) &&
         (problem.max_items == 0 || held_items < problem.max_items);
}

// Best fit by tokens, longest first: finds room where balancing by weight does not.
Assignment best_fit(const PartitionProblem& problem) {
  const int n = static_cast<int>(problem.weight.size());
  std::vector<int> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return tokens_of(problem, a) > tokens_of(problem, b); });
  std::vector<int64_t> held(static_cast<size_t>(problem.bins), 0);
  std::vector<int> items(static_cast<size_t>(problem.bins), 0);
  Assignment bin(static_cast<size_t>(n), -1);
  int missing = problem.bins * problem.min_items;
  for (int rank = 0; rank < n; ++rank) {
    const int item = order[static_cast<size_t>(rank)];
    const int64_t size = tokens_of(problem, item);
    int best = -1;
    for (int b = 0; b < problem.bins; ++b) {
      const auto ub = static_cast<size_t>(b);
      // The last items must go where some are missing.
      if (missing >= n - rank && items[ub] >= problem.min_items) continue;
      if (!has_room(problem, held[ub], items[ub], size)) continue;
      if (best < 0 || held[ub] > held[static_cast<size_t>(best)]) best = b;
    }
    if (best < 0) return {};
    const auto ub = static_cast<size_t>(best);
    missing -= items[ub] < problem.min_items;
    held[ub] += size;
    ++items[ub];
    bin[static_cast<size_t>(item)] = best;
  }
  return bin;
}

}  // namespace

double partition_lower_bound(std::span<const double> weight, int bins) {
  std::vector<double> sorted(weight.begin(), weight.end());
  std::sort(sorted.begin(), sorted.end(), std::greater<>());
  const double total = std::accumulate(sorted.begin(), sorted.end(), 0.0);
  double bound = total / bins;
  if (!sorted.empty()) bound = std::max(bound, sorted[0]);
  // Of the j·bins + 1 heaviest items some j + 1 share a bin: at least the j + 1 lightest of them.
  for (size_t j = 1; j * static_cast<size_t>(bins) < sorted.size(); ++j) {
    const size_t last = j * static_cast<size_t>(bins);
    double sum = 0;
    for (size_t i = 0; i <= j; ++i) sum += sorted[last - i];
    bound = std::max(bound, sum);
  }
  return bound;
}

int64_t fewest_bins(std::vector<int64_t> tokens, int64_t cap) {
  std::sort(tokens.begin(), tokens.end(), std::greater<>());
  std::vector<int64_t> sum(1, 0);
  for (const int64_t size : tokens) sum.push_back(sum.back() + size);
  // How many have more than `size`.
  const auto above = [&](int64_t size) {
    return std::lower_bound(tokens.begin(), tokens.end(), size, std::greater<>()) - tokens.begin();
  };
  const auto large = above(cap / 2);  // one a bin
  int64_t most = large;
  for (auto end = large + 1; end <= std::ssize(tokens); ++end) {
    const int64_t least = tokens[static_cast<size_t>(end) - 1];
    // The small ones down to `least` go beside large ones that leave so much room, and into bins of their own.
    const auto alone = above(cap - least);
    const int64_t room = (large - alone) * cap - (sum[static_cast<size_t>(large)] - sum[static_cast<size_t>(alone)]);
    const int64_t small = sum[static_cast<size_t>(end)] - sum[static_cast<size_t>(large)];
    most = std::max(most, large + std::max<int64_t>(0, (small - room + cap - 1) / cap));
  }
  return most;
}

double heaviest_bin(const PartitionProblem& problem, const Assignment& assignment) {
  std::vector<double> load(static_cast<size_t>(problem.bins), 0.0);
  for (size_t i = 0; i < assignment.size(); ++i) load[static_cast<size_t>(assignment[i])] += problem.weight[i];
  return *std::max_element(load.begin(), load.end());
}

bool respects_limits(const PartitionProblem& problem, const Assignment& assignment) {
  std::vector<int64_t> held(static_cast<size_t>(problem.bins), 0);
  std::vector<int> items(static_cast<size_t>(problem.bins), 0);
  for (size_t i = 0; i < assignment.size(); ++i) {
    const auto b = static_cast<size_t>(assignment[i]);
    held[b] += tokens_of(problem, static_cast<int>(i));
    ++items[b];
  }
  for (size_t b = 0; b < held.size(); ++b) {
    if (items[b] < problem.min_items) return false;
    if (problem.cap > 0 && held[b] > problem.cap) return false;
    if (problem.max_items > 0 && items[b] > problem.max_items) return false;
  }
  return true;
}

Assignment longest_first(const PartitionProblem& problem) {
  const auto n = problem.weight.size();
  if (n < static_cast<size_t>(problem.bins * problem.min_items)) return {};
  std::vector<int64_t> held(static_cast<size_t>(problem.bins), 0);
  std::vector<int> items(static_cast<size_t>(problem.bins), 0);
  Assignment bin(n, -1);
  using Bin = std::pair<double, int>;  // least load first, then lowest number
  std::priority_queue<Bin, std::vector<Bin>, std::greater<>> queue;
  for (int b = 0; b < problem.bins; ++b) queue.emplace(0.0, b);
  std::vector<Bin> aside;
  int missing = problem.bins * problem.min_items;
  auto left = static_cast<int>(n);
  for (int item : heaviest_first(problem.weight)) {
    aside.clear();
    bool placed = false;
    while (!queue.empty() && !placed) {
      const auto [load, b] = queue.top();
      queue.pop();
      const auto ub = static_cast<size_t>(b);
      const bool wanted = missing < left || items[ub] < problem.min_items;
      if (wanted && has_room(problem, held[ub], items[ub], tokens_of(problem, item))) {
        missing -= items[ub] < problem.min_items;
        held[ub] += tokens_of(problem, item);
        ++items[ub];
        bin[static_cast<size_t>(item)] = b;
        queue.emplace(load + problem.weight[static_cast<size_t>(item)], b);
        placed = true;
      } else if (problem.max_items == 0 || items[ub] < problem.max_items) {
        // A full bin never comes back.
        aside.emplace_back(load, b);
      }
    }
    for (const Bin& b : aside) queue.push(b);
    if (!placed) return best_fit(problem);
    --left;
  }
  return bin;
}

Assignment karmarkar_karp(const PartitionProblem& problem) {
  // A partial solution is the loads of the bins that are not empty, in descending order, with their items; the two with
  // the largest spread are merged, heaviest bin to lightest, until one is left.
  struct Partial {
    double spread;
    int first_item;  // breaks ties
    std::vector<std::pair<double, std::vector<int>>> bins;
  };
  const auto less = [](const Partial* a, const Partial* b) {
    return a->spread != b->spread ? a->spread < b->spread : a->first_item > b->first_item;
  };
  const auto bins = static_cast<size_t>(problem.bins);
  const auto n = problem.weight.size();
  std::vector<Partial> pool(n);
  std::priority_queue<Partial*, std::vector<Partial*>, decltype(less)> queue(less);
  for (size_t i = 0; i < n; ++i) {
    pool[i].spread = problem.weight[i];
    pool[i].first_item = static_cast<int>(i);
    pool[i].bins.push_back({problem.weight[i], {static_cast<int>(i)}});
    queue.push(&pool[i]);
  }
  while (queue.size() > 1) {
    Partial* a = queue.top();
    queue.pop();
    Partial* b = queue.top();
    queue.pop();
    const size_t same = std::min(a->bins.size(), bins - b->bins.size());  // those that meet an empty bin
    for (size_t j = b->bins.size(); j-- > 0;) {
      auto& from = b->bins[j];
      const size_t i = bins - 1 - j;
      if (i < a->bins.size()) {
        a->bins[i].first += from.first;
        a->bins[i].second.insert(a->bins[i].second.end(), from.second.begin(), from.second.end());
      } else {
        a->bins.push_back(std::move(from));
      }
    }
    b->bins = {};
    const auto heavier = [](const auto& x, const auto& y) { return x.first > y.first; };
    const auto changed = a->bins.begin() + static_cast<ptrdiff_t>(same);
    std::stable_sort(changed, a->bins.end(), heavier);
    std::inplace_merge(a->bins.begin(), changed, a->bins.end(), heavier);
    a->spread = a->bins.front().first - (a->bins.size() == bins ? a->bins.back().first : 0.0);
    a->first_item = std::min(a->first_item, b->first_item);
    queue.push(a);
  }
  auto& result = queue.top()->bins;
  result.resize(bins);
  // Differencing may leave bins empty when few items dwarf the rest: the fullest bin gives its lightest item away.
  for (auto& empty : result) {
    if (!empty.second.empty()) continue;
    auto fullest = std::max_element(result.begin(), result.end(),
                                    [](const auto& x, const auto& y) { return x.second.size() < y.second.size(); });
    auto lightest = std::min_element(fullest->second.begin(), fullest->second.end(), [&](int x, int y) {
      return problem.weight[static_cast<size_t>(x)] < problem.weight[static_cast<size_t>(y)];
    });
    empty.second.push_back(*lightest);
    fullest->second.erase(lightest);
  }
  Assignment bin(n, -1);
  for (size_t b = 0; b < result.size(); ++b)
    for (int item : result[b].second) bin[static_cast<size_t>(item)] = static_cast<int>(b);
  return bin;
}

Assignment balanced_partition(const PartitionProblem& problem, int64_t trials) {
  const auto n = problem.weight.size();
  if (n < static_cast<size_t>(problem.bins * problem.min_items)) return {};
  if (n <= kExactItems) return exact_partition(problem);
  Assignment assignment = longest_first(problem);
  if (!assignment.empty()) improve_partition(problem, assignment, trials);
  return assignment;
}

}  // namespace sb
