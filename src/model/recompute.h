#pragma once

namespace sb {

// What forward keeps for backward. none: everything. attention: the layer's input, attention's output and log-sum-exp
// (attention's forward never runs twice). layer: the layer's input and the attention state. chunk: of pieces their keys
// and values alone; what `attention` keeps is there of one micro-batch at a time, the one that ran forward last, and of
// others the forward runs again before their backward. For a stage that holds the whole model.
enum class Recompute { none, attention, layer, chunk };
// What a layer keeps then of a micro-batch that is at hand.
constexpr Recompute kept_at_hand(Recompute level) {
  return level == Recompute::chunk ? Recompute::attention : level;
}

}  // namespace sb
