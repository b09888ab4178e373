#pragma once

#include "core/config/config.h"
#include "run/config/run_config.h"

namespace sb {

// train.precision and what belongs to it.
void add_precision_options(OptionTable& table, TrainOptions& train);
void check_precision(const RunConfig& config, const OptionTable& table);

// What only the model itself can tell: UserError where its sizes or layers are not for it.
void check_precision_fits(const RunConfig& config, const ModelConfig& model);

}  // namespace sb
