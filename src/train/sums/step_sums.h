#pragma once

#include <vector>

#include "comm/communicator.h"
#include "ops/cross_entropy.h"
#include "parallel/grid.h"
#include "parallel/pipeline.h"
#include "plan/planner/step_planner.h"

namespace sb {

// Share of the counted targets that were predicted right.
double accuracy(const LossSums& sums);

// Over all ranks, in rank order. Collective.
LossSums sum_over_ranks(Communicator& world, const LossSums& own);
// Of so many sources. Collective.
std::vector<Pipeline::SourceLoss> sum_over_ranks(Communicator& world, std::vector<Pipeline::SourceLoss> own,
                                                 size_t sources);

// How long the plan's micro-batches took on all ranks, from each rank's own operations. Collective; filled on rank 0.
StepMeasurement gather_times(Grid& grid, const Plan& plan, const std::vector<Pipeline::Operation>& own);

}  // namespace sb
