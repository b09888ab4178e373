#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/thread_pool.h"
#include "plan/coverage/coverage.h"
#include "plan/latency/cost_model.h"
#include "plan/plan.h"

namespace sb {

// One line of the comparison.
struct SimulatedPolicy {
  std::string name;
  PlanOptions options;
};

struct SimulatedRow {
  std::string name;
  PlanOptions options;
  double makespan_ms = 0;  // mean over the steps
  double speedup = 0;      // total time of in_order with base budgets ÷ total time
  double worst_step_speedup = 0;
  double imbalance = 0, worker_imbalance = 0;
  double lower_bound_share = 0;  // Σ lower bound ÷ Σ makespan
  double bubble_share = 0;
  double mean_coverage = 0, min_coverage = 1;
  double worst_loss = 0;             // of base coverage, over all (sequence, layer)
  double worst_mean_difference = 0;  // smallest (mean coverage − the base's) over the steps
  double relaxed_bound = 0;          // tuning `optimal`: mean coverage of continuous budgets in the same time
  double planner_ms = 0;
  double tokens = 0;  // mean of a step
  // Of any step: what bounds the memory.
  int64_t largest_micro_batch = 0;  // tokens, where all sequences of the step are whole
  int64_t largest_piece = 0;        // tokens of a piece or pack, where some are cut
  int64_t longest_cut = 0;          // tokens of the longest sequence that was cut; 0: none
  double cut_share = 0;             // of the steps that cut sequences
};

struct SimulateInput {
  const CostModel& cost;
  const CoverageModel& coverage;
  std::span<const int64_t> pool;
  int64_t global_batch = 16;
  int64_t steps = 200;
  uint64_t seed = 1;
  std::function<double()> seconds;  // a clock, for planner_ms
  ThreadPool* threads = nullptr;
  std::function<void()> step_done = {};  // after every step of every policy; empty: nobody wants to know
};

// The policies that `simulate` compares: each lever alone and together.
std::vector<SimulatedPolicy> standard_policies(const BatchingOptions& batching, double p,
                                               int64_t chunk = ChunkOptions::kAutomatic);
// sab + order + optimal at deadlines from the fastest (0) to the base makespan (1).
std::vector<SimulatedPolicy> frontier_policies(const BatchingOptions& batching, double p);
// sab + order + optimal at equal coverage, for several p.
std::vector<SimulatedPolicy> loss_policies(const BatchingOptions& batching);

SimulatedRow simulate_policy(const SimulateInput& input, const SimulatedPolicy& policy);

}  // namespace sb
