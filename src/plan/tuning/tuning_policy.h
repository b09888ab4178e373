#pragma once

#include "core/words.h"

namespace sb {

// How budgets are tuned, and for `anchor`, towards which of the micro-batches' latencies.
enum class TuningPolicy { none, anchor, optimal };
enum class AnchorKind { mean, min, max };
inline constexpr Word<TuningPolicy> kTuningWords[] = {
    {"none", TuningPolicy::none}, {"anchor", TuningPolicy::anchor}, {"optimal", TuningPolicy::optimal}};
inline constexpr Word<AnchorKind> kAnchorWords[] = {
    {"mean", AnchorKind::mean}, {"min", AnchorKind::min}, {"max", AnchorKind::max}};

}  // namespace sb
