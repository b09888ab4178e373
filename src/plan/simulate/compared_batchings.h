#pragma once

#include <span>

#include "plan/batching/batching.h"

namespace sb {

// Batchings of other projects, to compare `sab` with. length: tokens, longest first into the least loaded. quadratic:
// squared lengths, Karmarkar-Karp. wlb: dense latency, as WLB-LLM does it.
std::span<const ComparedBatching> compared_batchings();

}  // namespace sb
