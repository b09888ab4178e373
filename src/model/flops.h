#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "model/lora/lora_config.h"
#include "model/model_config.h"

namespace sb {

// Products of one training step (forward and twice that for backward) on sequences of these lengths with dense causal
// attention, what is recomputed not counted: the numerator of MFU. The embedding look-up is no product. `density`: the
// share of attention's pairs that count; with what sparse attention computed, these are the products that were
// executed. With adapters those of the frozen weights' gradients are not among them, and the adapters' own are.
double training_flops(const ModelConfig& config, std::span<const int64_t> lengths, double density = 1.0,
                      const LoraConfig& lora = {});

// What a GPU of this name does at most in bf16 without sparsity, by its data sheet: the denominator of MFU. 0: not
// known.
double peak_bf16_flops(std::string_view device_name);

}  // namespace sb
