#pragma once

#include "attention/cpu/sparse_attention.h"
#include "comm/communicator.h"
#include "model/tensor_parallel/tensor_share.h"

namespace sb {

// What sparse attention did on all ranks: the layers' sums everywhere, the sampled curves on rank 0 (in rank order).
// `tp`: so many ranks side by side have different heads of the same sequences, whose curves are averaged. Collective.
AttentionReport sum_over_ranks(Communicator& world, AttentionReport own, int tp = 1);

// What learn() needs of all ranks, the same on all of them: stages have different layers, those that share products
// different heads, the other ranks different tokens. Collective.
SelectionObservations sum_over_ranks(Communicator& world, SelectionObservations own, const TensorShare& share = {});

// What this rank of those that share products selects by: all that was learned of its own heads.
LearnedSelection rank_selection(LearnedSelection learned, const TensorShare& share);

}  // namespace sb
