#pragma once

#include "core/words.h"
#include "model/stage/stage.h"

namespace sb {

inline constexpr Word<Recompute> kRecomputeWords[] = {{"none", Recompute::none},
                                                      {"attention", Recompute::attention},
                                                      {"layer", Recompute::layer},
                                                      {"chunk", Recompute::chunk}};

}  // namespace sb
