#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/thread_pool.h"
#include "plan/batching/batching.h"
#include "plan/coverage/coverage.h"
#include "plan/latency/cost_model.h"
#include "plan/tuning/budget_curves.h"
#include "plan/tuning/tuning_policy.h"

namespace sb {

inline constexpr double kEqualCoverage = -1.0;

struct TuningOptions {
  TuningPolicy policy = TuningPolicy::optimal;
  AnchorKind anchor = AnchorKind::mean;
  double p = 0.1;  // share of its base coverage that no (sequence, layer) may lose more of
  // optimal: kEqualCoverage, or where the deadline lies between the fastest possible (0) and the base makespan (1).
  double target = kEqualCoverage;
  int64_t pivots = 0;  // optimal: most pivots of one solution of a rank's programme; 0: 50 and 20 a row
};

// Budgets [sequence · layers + layer], keys per query.
using Budgets = std::vector<int32_t>;
Budgets base_budgets(const AttentionSpec& spec, std::span<const Sequence> sequences, int layers);

// Order of the micro-batches of every rank, as places in the rank: position i of rank r runs orders[r][i].
using Orders = std::vector<std::vector<int>>;
Orders given_orders(const Batches& batches);

// The schedules of a plan's ranks.
class ScheduleSet {
 public:
  ScheduleSet(int stages, int warmup_depth) : stages_(stages), warmup_depth_(warmup_depth) {}
  void prepare(const Batches& batches);
  const Schedule& of(int rank) const { return *schedules_[static_cast<size_t>(rank)]; }

 private:
  int stages_, warmup_depth_;
  std::vector<std::shared_ptr<const Schedule>> schedules_;  // ranks that are alike share one
};

// Stage times of a rank at these budgets, as the latency model says.
PipelineTimes stage_times(const CostModel& cost, std::span<const Sequence> sequences, const Batches& batches, int rank,
                          std::span<const int32_t> budgets);
// Slowest rank.
double step_makespan(const CostModel& cost, const ScheduleSet& schedules, std::span<const Sequence> sequences,
                     const Batches& batches, const Orders& orders, std::span<const int32_t> budgets);

struct CoverageSummary {
  double mean = 0;        // Σ tokens · coverage ÷ Σ tokens, over layers
  double base_mean = 0;   // the same at the base budgets
  double min = 1;         // over (sequence, layer)
  double worst_loss = 0;  // largest relative loss against the base budget, over (sequence, layer)
};
CoverageSummary summarize_coverage(const CoverageModel& coverage, const AttentionSpec& spec,
                                   std::span<const Sequence> sequences, int layers, std::span<const int32_t> budgets,
                                   ThreadPool* pool = nullptr);

// What a plan is tuned from.
struct TuningInput {
  const CostModel& cost;
  const CoverageModel& coverage;
  std::span<const Sequence> sequences;
  const BudgetCurves& curves;
  const Batches& batches;
  const Orders& orders;
  const ScheduleSet& schedules;
  std::span<const int32_t> base;  // base_budgets()
  ThreadPool* pool = nullptr;     // optional
};

struct TuningResult {
  Budgets budgets;
  // optimal only.
  double deadline = 0;       // microseconds, what the budgets were filled to
  double fastest = 0;        // makespan with every budget at its floor
  double mean_coverage = 0;  // at the deadline
  // No budgets, not even continuous ones, have a higher mean coverage at this deadline; 0 where prices were used.
  double relaxed_bound = 0;
  bool unsolved = false;  // the programmes took too many pivots, and prices were used in their place
};

TuningResult tune_anchor(const TuningInput& input, const TuningOptions& options);
TuningResult tune_optimal(const TuningInput& input, const TuningOptions& options);
// One or the other; off: base budgets.
TuningResult tune(const TuningInput& input, const TuningOptions& options);

}  // namespace sb
