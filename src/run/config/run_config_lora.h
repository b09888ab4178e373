#pragma once

#include "core/config/config.h"
#include "run/config/run_config.h"

namespace sb {

// The section is optional: `present` becomes true where the file mentions it.
void add_lora_options(OptionTable& table, LoraOptions& lora, bool* present);
void check_lora(const RunConfig& config, const OptionTable& table);

// What only the model itself can tell: UserError where `lora.train` names a part that it does not have.
void check_lora_fits(const RunConfig& config, const ModelConfig& model);

}  // namespace sb
