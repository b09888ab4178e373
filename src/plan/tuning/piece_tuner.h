#pragma once

#include "plan/tuning/tuning.h"

namespace sb {

// `optimal` tuning where sequences are cut: all pieces of one have the same budgets. A pipeline of pieces is busy
// nearly all the time, so that a rank's time follows its work: every rank has one price of attention (coverage gained
// per pair), and every (sequence, layer) takes the budget that is worth it. The levels are few; a rank takes the
// highest that meets the deadline.
TuningResult tune_pieces(const TuningInput& input, const TuningOptions& options);

}  // namespace sb
