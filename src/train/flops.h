#pragma once

#include <cstdint>
#include <span>

#include "model/model_config.h"

namespace sb {

// Products of one training step (forward and twice that for backward) on sequences of these lengths with dense causal
// attention, what is recomputed not counted: the numerator of MFU. The embedding look-up is no product.
double training_flops(const ModelConfig& config, std::span<const int64_t> lengths);

}  // namespace sb
