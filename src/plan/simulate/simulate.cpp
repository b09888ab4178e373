#include "plan/simulate/simulate.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/errors.h"
#include "plan/simulate/compared_batchings.h"
#include "plan/simulate/length_pool.h"

namespace sb {

std::vector<SimulatedPolicy> standard_policies(const BatchingOptions& batching, double p, int64_t chunk) {
  std::vector<SimulatedPolicy> policies;
  const auto add = [&](const BatchingOptions& own, bool order, TuningPolicy tuning,
                       AnchorKind anchor = AnchorKind::mean, bool cut = false) {
    SimulatedPolicy next;
    next.options.batching = own;
    next.options.ordering = order;
    next.options.tuning.policy = tuning;
    next.options.tuning.anchor = anchor;
    next.options.tuning.p = p;
    next.name = own.name();
    if (order) next.name += "+order";
    if (cut) {
      next.name += "+chunk";
      next.options.chunk.tokens = chunk;
    }
    if (tuning == TuningPolicy::anchor) next.name += "+anchor:" + word_of(kAnchorWords, anchor);
    if (tuning == TuningPolicy::optimal) next.name += "+optimal";
    policies.push_back(std::move(next));
  };
  BatchingOptions in_order = batching, sab = batching;
  in_order.policy = BatchingPolicy::in_order;
  sab.policy = BatchingPolicy::sab;
  std::vector<BatchingOptions> others;
  for (const ComparedBatching& compared : compared_batchings()) {
    others.push_back(batching);
    others.back().policy = BatchingPolicy::compared;
    others.back().compared = &compared;
  }
  using T = TuningPolicy;
  add(in_order, false, T::none);
  add(in_order, true, T::none);
  add(in_order, false, T::anchor);
  add(in_order, false, T::optimal);
  add(in_order, true, T::optimal);
  for (const BatchingOptions& other : others) {
    add(other, false, T::none);
    add(other, true, T::none);
  }
  add(sab, false, T::none);
  add(sab, true, T::none);
  add(others.front(), false, T::anchor);
  add(sab, false, T::anchor);
  add(sab, false, T::optimal);
  for (AnchorKind anchor : {AnchorKind::mean, AnchorKind::min, AnchorKind::max}) add(sab, true, T::anchor, anchor);
  add(sab, true, T::optimal);
  add(sab, true, T::none, AnchorKind::mean, /*cut=*/true);
  add(sab, true, T::optimal, AnchorKind::mean, /*cut=*/true);
  return policies;
}

std::vector<SimulatedPolicy> frontier_policies(const BatchingOptions& batching, double p) {
  std::vector<SimulatedPolicy> policies;
  for (double target : {0.0, 0.1, 0.25, 0.5, 0.75, 1.0}) {
    SimulatedPolicy next;
    next.options.batching = batching;
    next.options.batching.policy = BatchingPolicy::sab;
    next.options.tuning.p = p;
    next.options.tuning.target = target;
    next.name = fmt::format("sab+order+optimal target={}", target);
    policies.push_back(std::move(next));
  }
  return policies;
}

std::vector<SimulatedPolicy> loss_policies(const BatchingOptions& batching) {
  std::vector<SimulatedPolicy> policies;
  for (double p : {0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3}) {
    SimulatedPolicy next;
    next.options.batching = batching;
    next.options.batching.policy = BatchingPolicy::sab;
    next.options.tuning.p = p;
    next.name = fmt::format("sab+order+optimal p={}", p);
    policies.push_back(std::move(next));
  }
  return policies;
}

SimulatedRow simulate_policy(const SimulateInput& input, const SimulatedPolicy& policy) {
  SimulatedRow row;
  row.name = policy.name;
  row.options = policy.options;
  LengthSampler sampler(input.pool, input.seed);
  ExpectedBudgets expected;
  double total = 0, baseline = 0, bound = 0, planner = 0;
  row.worst_step_speedup = 1e300;
  row.worst_mean_difference = 1e300;
  for (int64_t step = 0; step < input.steps; ++step) {
    const std::vector<Sequence> sequences = sampler.next(input.global_batch);
    const double start = input.seconds();
    const Plan plan = plan_step(step, input.cost, input.coverage, sequences, policy.options, expected, input.threads);
    planner += input.seconds() - start;
    learn_budgets(plan, input.cost.spec(), sequences, expected);
    total += plan.makespan_us;
    baseline += plan.baseline_us;
    bound += plan.lower_bound_us;
    row.imbalance += plan.imbalance;
    row.worker_imbalance += plan.worker_imbalance;
    row.bubble_share += plan.bubble_share;
    row.mean_coverage += plan.mean_coverage;
    row.relaxed_bound += plan.relaxed_bound;
    row.min_coverage = std::min(row.min_coverage, plan.min_coverage);
    row.worst_loss = std::max(row.worst_loss, plan.worst_loss);
    row.worst_step_speedup = std::min(row.worst_step_speedup, plan.baseline_us / plan.makespan_us);
    row.worst_mean_difference = std::min(row.worst_mean_difference, plan.mean_coverage - plan.base_coverage);
    int64_t largest = 0, longest_cut = 0;
    for (const PlannedRank& rank : plan.ranks)
      for (const PlannedMicroBatch& micro_batch : rank.micro_batches) {
        row.tokens += static_cast<double>(micro_batch.tokens);
        largest = std::max(largest, micro_batch.tokens);
        longest_cut = std::max(longest_cut, micro_batch.end);
      }
    int64_t& most = longest_cut > 0 ? row.largest_piece : row.largest_micro_batch;
    most = std::max(most, largest);
    row.longest_cut = std::max(row.longest_cut, longest_cut);
    if (longest_cut > 0) row.cut_share += 1;
    if (input.step_done) input.step_done();
  }
  const auto steps = static_cast<double>(input.steps);
  row.makespan_ms = total / steps / 1e3;
  row.speedup = baseline / total;
  row.lower_bound_share = bound / total;
  for (double* mean : {&row.imbalance, &row.worker_imbalance, &row.bubble_share, &row.mean_coverage, &row.relaxed_bound,
                       &row.tokens, &row.cut_share})
    *mean /= steps;
  row.planner_ms = planner / steps * 1e3;
  return row;
}

}  // namespace sb
