#pragma once

#include <span>
#include <vector>

#include "plan/batching/batching.h"

namespace sb {

// Improves an assignment of sequences to slots (rank · per_rank + micro-batch) for a pipeline, where the sum of a rank
// does not tell its time: moves and swaps sequences of the slowest rank against the schedule simulator, a bounded
// number of trials. Caps hold, no micro-batch becomes empty, and the slowest rank never becomes slower.
void improve_pipeline(const CostModel& cost, std::span<const Sequence> sequences, std::span<const SequenceCost> costs,
                      int per_rank, const BatchingOptions& options, std::vector<int>& slot);

}  // namespace sb
