#pragma once

#include <cstdint>

#include "run/config/run_config.h"

namespace sb {

// Puts train.num_train_epochs and optimizer.warmup_ratio into steps, once it is known how many sequences one pass has.
// A warm-up and a decay that are longer than the run are shortened in proportion, with a warning where `warn` is set.
void settle_steps(RunConfig& config, uint64_t sequences, bool warn = false);

// The learning rate of a step (the first is 1). All schedules start with a linear warm-up that reaches the peak with
// its last step and (unlike one that starts from exactly zero) wastes no step; those that decay would reach the minimum
// at the step after the last. Steps past `max_steps` have the rate that the schedule ends with.
double learning_rate(const OptimizerOptions& options, int64_t max_steps, int64_t step);

}  // namespace sb
