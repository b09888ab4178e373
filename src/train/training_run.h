#pragma once

#include <cstdio>
#include <functional>

#include "train/run_config.h"
#include "train/trainer.h"

namespace sb {

// Everything `sparsebalance train` does with a configuration: builds what it names, prints the header with the memory
// plan, trains and says what came out. `stop_requested` is asked between micro-batches.
TrainSummary run_training(const RunConfig& config, std::FILE* out, bool terminal,
                          const std::function<bool()>& stop_requested);

// The model the run trains: config.json of model.path, or model.init, with model.rope put over it.
ModelConfig run_model_config(const RunConfig& config);

}  // namespace sb
