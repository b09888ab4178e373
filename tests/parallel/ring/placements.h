#pragma once

#include "parallel/ring/context_placement.h"

namespace sb {

inline constexpr ContextPlacement kPlacements[] = {ContextPlacement::zigzag, ContextPlacement::striped,
                                                   ContextPlacement::shifted, ContextPlacement::triangular};

}  // namespace sb
