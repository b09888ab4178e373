#pragma once

#include "model/micro_batch.h"
#include "parallel/ring/context_layout.h"

namespace sb {

// The part of a micro-batch that a rank of a context-parallel group holds. Positions, labels and weights stay those of
// the whole sequences, so that the sum of the ranks' losses is the loss of the whole.
MicroBatch context_part(const MicroBatch& whole, const ContextLayout& layout, int rank);

}  // namespace sb
