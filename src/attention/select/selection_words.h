#pragma once

#include "attention/select/selection_config.h"
#include "core/words.h"

namespace sb {

inline constexpr Word<SelectionPattern> kPatternWords[] = {{"dense", SelectionPattern::dense},
                                                           {"topk", SelectionPattern::topk},
                                                           {"mass", SelectionPattern::mass},
                                                           {"topp", SelectionPattern::topp},
                                                           {"vertical_slash", SelectionPattern::vertical_slash},
                                                           {"window", SelectionPattern::window}};
inline constexpr Word<SelectionOrder> kOrderWords[] = {{"causal", SelectionOrder::causal},
                                                       {"lookahead", SelectionOrder::lookahead}};
inline constexpr Word<BlockScore> kScoreWords[] = {
    {"planes", BlockScore::planes}, {"moments", BlockScore::moments}, {"mean", BlockScore::mean}};

}  // namespace sb
