#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/measured_coverage.h"
#include "core/metric.h"
#include "plan/batching/pack_in_order.h"
#include "plan/coverage/coverage_statistics.h"
#include "plan/latency/workload.h"
#include "plan/plan.h"

namespace sb {

// How long one micro-batch took on the stages it went through, nanoseconds.
struct MicroBatchTimes {
  std::vector<int64_t> forward, backward;  // of every stage
};

// What a step showed, gathered from all ranks.
struct StepMeasurement {
  int64_t step = 0;
  int64_t step_ns = 0;                              // from the plan to the end of the update
  std::vector<std::vector<MicroBatchTimes>> ranks;  // [data-parallel rank][micro-batch, in the plan's order]
  std::vector<MeasuredCoverage> coverage;           // sampled curves; empty with dense attention
};

// Decides what every step does. Lives on rank 0; the trainer sends its plans to the others. It is told of a step's
// global batch ahead() steps early, so that a plan may be made while earlier steps run:
//
//   announce(1) … announce(1 + ahead), then for every step s: next() → s, [the step runs], learn(s), announce(s + 1 +
//   ahead)
//
// A sequence's id is its position in the source: unique in a global batch, whatever the source repeats.
class StepPlanner {
 public:
  virtual ~StepPlanner() = default;

  virtual int ahead() const { return 0; }
  virtual void announce(int64_t step, std::vector<Sequence> sequences) = 0;
  // The plan of the step announced first and not yet taken. Every data-parallel rank has at least one micro-batch. A
  // micro-batch without budgets runs at the configured one.
  virtual Plan next() = 0;
  virtual void learn(const StepMeasurement& measurement) {}
  // Of the coverage that was measured; nothing where none is kept.
  virtual const CoverageStatistics* coverage() const { return nullptr; }
  // What plan and measurement of the step learned last show, for metrics.jsonl.
  virtual std::vector<Metric> metrics() const { return {}; }

  // What later plans depend on besides what will be announced, as printable text for the checkpoint: taken between
  // learn() and announce(). After restore_state() the steps that follow are announced as at the start.
  virtual std::string state() const { return {}; }
  virtual void restore_state(const std::string& state) {}
};

// Sequences above `tokens` are cut at multiples of `edge`, shorter ones packed up to it; 0: all stay whole. `ahead`:
// forwards run ahead by the pieces of the longest one, which only a pipeline gains from.
struct InOrderCut {
  int64_t tokens = 0, edge = 1;
  bool ahead = false;
};

// The sequences in the order they come, in equal numbers on all ranks, at the configured budgets.
class InOrderPlanner final : public StepPlanner {
 public:
  // `block`: of attention; `budget`: what its lists hold, 0 where they follow no budget.
  InOrderPlanner(int dp, int layers, PackingLimits limits, int64_t block = 128, int64_t budget = 0, InOrderCut cut = {})
      : dp_(dp), layers_(layers), limits_(limits), block_(block), budget_(budget), cut_(cut) {}
  void announce(int64_t step, std::vector<Sequence> sequences) override;
  Plan next() override;
  void learn(const StepMeasurement& measurement) override;
  const CoverageStatistics* coverage() const override { return &coverage_; }
  // The coverage so far, as a balanced planner's state: either planner goes on from what the other has measured.
  std::string state() const override;
  void restore_state(const std::string& state) override;

 private:
  void plan_rank(std::span<const Sequence> sequences, PlannedRank& rank) const;
  void add_whole(std::span<const Sequence> sequences, PlannedRank& rank) const;

  int dp_, layers_;
  PackingLimits limits_;
  int64_t block_, budget_;
  InOrderCut cut_;
  CoverageStatistics coverage_;  // no plan depends on it
  Plan plan_;
};

// Takes measured coverage into the statistics; used_budget(tokens, layer) is what the lists of such a sequence had, 0
// where that is not known.
void observe_coverage(const std::vector<MeasuredCoverage>& samples, int64_t block,
                      const std::function<int64_t(int64_t tokens, int layer)>& used_budget,
                      CoverageStatistics& statistics);

}  // namespace sb
