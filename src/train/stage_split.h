#pragma once

#include <vector>

#include "model/model_config.h"
#include "run/config/run_config.h"

namespace sb {

// First layer of every pipeline stage and, last, the number of layers: by predicted time with a profile, by their
// number without. The same on all ranks. UserError when there are more stages than layers.
std::vector<int> split_layers(const RunConfig& config, const ModelConfig& model);

}  // namespace sb
