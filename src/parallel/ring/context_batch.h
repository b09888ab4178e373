#pragma once

#include "model/micro_batch.h"
#include "parallel/ring/context_layout.h"

namespace sb {

// How the ranks of a context-parallel group share a micro-batch; of a piece: how they share its sequence up to the
// piece's end. (Placements but zigzag put a block where it lies in the whole sequence, too.)
ContextLayout batch_layout(ContextPlacement placement, int ranks, int block, const MicroBatch& batch);

// The part of a micro-batch that a rank holds. Positions, labels and weights stay those of the whole sequences, so that
// the sum of the ranks' losses is the loss of the whole.
MicroBatch context_part(const MicroBatch& whole, const ContextLayout& layout, int rank);

}  // namespace sb
