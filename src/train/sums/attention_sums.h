#pragma once

#include "attention/cpu/sparse_attention.h"
#include "comm/communicator.h"

namespace sb {

// What sparse attention did on all ranks: the layers' sums everywhere, the sampled curves on rank 0 (in rank order).
// Collective.
AttentionReport sum_over_ranks(Communicator& world, AttentionReport own);

// The thresholds that all ranks go on with: every rank steers its own by its own sequences and layers. Of each the mean
// over the ranks that have moved it, which is the same on all of them; one rank alone keeps its own. `before`: what all
// of them had before the step, and keep where none has moved it. Collective.
Selector::Thresholds mean_over_ranks(Communicator& world, const Selector::Thresholds& own,
                                     const Selector::Thresholds& before);

}  // namespace sb
