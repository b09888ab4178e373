#pragma once

#include "attention/cpu/sparse_attention.h"
#include "comm/communicator.h"

namespace sb {

// What sparse attention did on all ranks: the layers' sums everywhere, the sampled curves on rank 0 (in rank order).
// Collective.
AttentionReport sum_over_ranks(Communicator& world, AttentionReport own);

// What learn() needs of all ranks, the same on all of them: stages have different layers, the other ranks different
// tokens. Collective.
SelectionObservations sum_over_ranks(Communicator& world, SelectionObservations own);

}  // namespace sb
