#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/errors.h"
#include "core/thread_pool.h"
#include "plan/batching/batching.h"
#include "plan/chunking.h"
#include "plan/coverage/coverage.h"
#include "plan/latency/cost_model.h"
#include "plan/schedule/ordering.h"
#include "plan/schedule/schedule.h"
#include "plan/tuning/tuning.h"

namespace sb {

// Whole sequences, or one piece of one sequence.
struct PlannedMicroBatch {
  std::vector<int64_t> sequences;  // ids, ascending place in the global batch
  int64_t tokens = 0;
  // [layer · sequences + sequence], keys per query; a sequence runs dense where it is no longer than its budget. Empty:
  // the configured budget everywhere.
  std::vector<int32_t> budgets;
  std::vector<double> forward_us, backward_us;  // predicted, of every stage
  int64_t begin = 0, end = 0;                   // the piece: these tokens of the only sequence; end 0: whole sequences

  bool is_piece() const { return end > 0; }
};

struct PlannedRank {
  // In the order of their forwards; the pieces of a sequence follow each other. Backwards run in this order too, but
  // for those of a sequence's pieces, which are reversed. All pieces of a sequence have the same budgets.
  std::vector<PlannedMicroBatch> micro_batches;
  double makespan_us = 0;
  int ahead = 1;  // how far forwards run ahead of backwards on the last stage, see Schedule
};

// How many micro-batches each group of a rank has: all pieces of a sequence, or one micro-batch of whole sequences.
std::vector<int> group_sizes(const PlannedRank& rank);
// What the stages of this rank run, in which order.
std::shared_ptr<const Schedule> rank_schedule(const PlannedRank& rank, int stages, int warmup_depth = 1);

// What one optimizer step does, on every data-parallel rank.
struct Plan {
  static constexpr int kVersion = 2;
  int64_t step = 0;
  int layers = 0;
  std::vector<PlannedRank> ranks;
  double makespan_us = 0;
  double lower_bound_us = 0;    // no arrangement at these budgets, of these pieces, is faster
  double baseline_us = 0;       // in order, base budgets
  double imbalance = 1;         // max / mean of micro-batch latency
  double worker_imbalance = 1;  // max / mean of the ranks' busy time
  double bubble_share = 0;
  double mean_coverage = 0, min_coverage = 0, worst_loss = 0;
  // Whether any sequence is: all stages but the first then run backward in two halves.
  bool cut() const;
  double base_coverage = 0;        // mean at the base budgets
  double relaxed_bound = 0;        // tuning `optimal`: mean coverage that continuous budgets would reach in this time
  std::vector<std::string> notes;  // where it is not what was asked for
};

struct PlanOptions {
  BatchingOptions batching;
  bool ordering = true;
  TuningOptions tuning;
  ChunkOptions chunk;
};

// What earlier steps taught: the budgets tuning chose, by length class, relative to the base, in parts per million.
class ExpectedBudgets {
 public:
  // Mean budget that a sequence of this length will probably get.
  int64_t of(const AttentionSpec& spec, int64_t tokens) const;
  void observe(const AttentionSpec& spec, int64_t tokens, double mean_budget);
  // For checkpoints: [class, ppm] pairs.
  const std::vector<int64_t>& ppm() const { return ppm_; }
  void set_ppm(std::vector<int64_t> ppm) { ppm_ = std::move(ppm); }

 private:
  std::vector<int64_t> ppm_;  // by class; 0: nothing seen
};

// Batch → order → fill → order again. A pure function of its arguments: the same on every rank.
Plan plan_step(int64_t step, const CostModel& cost, const CoverageModel& coverage, std::span<const Sequence> sequences,
               const PlanOptions& options, const ExpectedBudgets& expected, ThreadPool* pool = nullptr);
// Feeds what a plan chose back, for the plans after it.
void learn_budgets(const Plan& plan, const AttentionSpec& spec, std::span<const Sequence> sequences,
                   ExpectedBudgets& expected);

// A plan that another release wrote: nothing is wrong with it, but it cannot be read.
class OtherPlanVersion : public UserError {
 public:
  using UserError::UserError;
};

// One line of plan.jsonl, without the newline.
std::string write_plan(const Plan& plan);
Plan parse_plan(const std::string& json, const std::string& where);

}  // namespace sb
