#pragma once

#include <memory>
#include <string>
#include <vector>

#include "plan/latency/cost_model.h"
#include "plan/latency/latency_model.h"
#include "plan/plan.h"
#include "plan/schedule/schedule.h"

namespace sb::python {

// The latencies behind a plan. Never moved: `cost` refers to `latency`.
struct Costs {
  LatencyModel latency;
  CostModel cost;

  Costs(const LatencyModel& model, const AttentionSpec& spec, const Layout& layout)
      : latency(model), cost(latency, spec, layout) {}
  Costs(const LatencyModel& model, const AttentionSpec& spec, const Layout& layout, std::vector<int> first_layer)
      : latency(model), cost(latency, spec, layout, std::move(first_layer)) {}
  Costs(const Costs&) = delete;
  Costs& operator=(const Costs&) = delete;
};

// A plan as Python has it. Schedules need the costs, which a plan that was read from text does not have.
struct PlanObject {
  std::shared_ptr<const Plan> plan;
  std::shared_ptr<const Costs> costs;

  // UserError when there are none.
  const CostModel& cost() const;
};

// Parts of a plan keep the whole of it.
struct RankObject {
  std::shared_ptr<const Plan> plan;
  size_t rank = 0;
  const PlannedRank& get() const { return plan->ranks[rank]; }
};
struct MicroBatchObject {
  RankObject rank;
  size_t position = 0;
  const PlannedMicroBatch& get() const { return rank.get().micro_batches[position]; }
};

// One operation of a plan's schedule, with the data-parallel rank it belongs to.
struct RankOperation {
  int rank = 0;
  ScheduledOperation operation;
};
std::vector<RankOperation> operations_of(const PlanObject& plan);

}  // namespace sb::python
