#pragma once

#include <cstdio>
#include <functional>

#include "run/config/run_config.h"
#include "train/trainer.h"

namespace sb {

// The ranks that train together, as one of them sees them.
struct RunRanks {
  Communicator* world = nullptr;  // nullptr: this process alone
  int local_ranks = 1;            // on this machine, this one included
  int local_rank = 0;             // which of them this one is
  int cores = available_cores();  // this one's share
};

// Everything `sparsebalance train` does with a configuration: builds what it names, prints the header with the memory
// plan, trains and says what came out. Every rank calls it; rank 0 writes to `out`. `stop_requested`: see TrainerParts.
TrainSummary run_training(const RunConfig& config, std::FILE* out, bool terminal,
                          const std::function<bool()>& stop_requested, const RunRanks& ranks = {});

// The model the run trains: config.json of model.path, or model.init, with model.rope put over it. UserError when the
// run's device has no attention for its heads.
ModelConfig run_model_config(const RunConfig& config);

}  // namespace sb
