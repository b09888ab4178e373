#include "plan/simulate/compared_batchings.h"

#include <algorithm>
#include <numeric>

#include "plan/batching/partition.h"

namespace sb {
namespace {

std::vector<double> by_tokens(const CostModel&, std::span<const Sequence> sequences) {
  std::vector<double> weight;
  for (const Sequence& sequence : sequences) weight.push_back(static_cast<double>(sequence.tokens));
  return weight;
}

std::vector<double> by_squared_tokens(const CostModel& cost, std::span<const Sequence> sequences) {
  std::vector<double> weight = by_tokens(cost, sequences);
  for (double& tokens : weight) tokens *= tokens;
  return weight;
}

std::vector<double> by_dense_latency(const CostModel& cost, std::span<const Sequence> sequences) {
  std::vector<int64_t> whole;
  for (const Sequence& sequence : sequences) whole.push_back(sequence.tokens);
  std::vector<double> weight;
  for (const SequenceCost& dense : sequence_costs(cost, sequences, whole))
    weight.push_back(dense.layer.forward + dense.layer.backward);
  return weight;
}

Assignment differencing(const PartitionProblem& problem) {
  Assignment bin = karmarkar_karp(problem);
  return respects_limits(problem, bin) ? bin : Assignment{};
}

// WLB-LLM: heaviest document first, to the least loaded micro-batch if it fits, else to the shortest one.
Assignment wlb_greedy(const PartitionProblem& problem) {
  std::vector<int> order(problem.weight.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return problem.weight[a] > problem.weight[b]; });
  std::vector<double> load(static_cast<size_t>(problem.bins), 0.0);
  std::vector<int64_t> held(static_cast<size_t>(problem.bins), 0);
  std::vector<int> items(static_cast<size_t>(problem.bins), 0);
  Assignment bin(order.size(), -1);
  for (int item : order) {
    const auto ui = static_cast<size_t>(item);
    const auto full = [&](size_t b) {
      return (problem.cap > 0 && held[b] + problem.tokens[ui] > problem.cap) ||
             (problem.max_items > 0 && items[b] == problem.max_items);
    };
    auto b = static_cast<size_t>(std::min_element(load.begin(), load.end()) - load.begin());
    if (full(b)) b = static_cast<size_t>(std::min_element(held.begin(), held.end()) - held.begin());
    if (full(b)) return {};
    load[b] += problem.weight[ui];
    held[b] += problem.tokens[ui];
    ++items[b];
    bin[ui] = static_cast<int>(b);
  }
  return respects_limits(problem, bin) ? bin : Assignment{};
}

constexpr ComparedBatching kCompared[] = {{"length", by_tokens, longest_first},
                                          {"quadratic", by_squared_tokens, differencing},
                                          {"wlb", by_dense_latency, wlb_greedy}};

}  // namespace

std::span<const ComparedBatching> compared_batchings() {
  return kCompared;
}

}  // namespace sb
