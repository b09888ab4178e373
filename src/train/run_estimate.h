#pragma once

#include <string>

#include "device/exec.h"
#include "model/model_config.h"
#include "run/config/run_config.h"
#include "train/trainer.h"

namespace sb {

// Floating-point operations per second of a matrix product in the model's own shapes on this device: a twentieth of a
// second or so. Ranks that share cores should measure at the same time, as they will compute.
double measure_products(const Exec& exec, const ModelConfig& model, DType dtype, int64_t tokens);

// What a run will probably take, from the products that its first steps need and the measured rate of this rank. A
// guess within a factor of two, for deciding whether to wait: attention, norms and the optimizer are not measured.
struct RunEstimate {
  double step_seconds = 0;
  int64_t steps = 0;  // that are left
  double rate = 0;    // of all ranks
  double run_seconds() const { return step_seconds * static_cast<double>(steps); }
};
RunEstimate estimate_run(const RunConfig& config, const ModelConfig& model, const SequenceSource& source,
                         const TrainState& state, double rank_rate);

// The line for people; warns of runs that would take days.
std::string describe(const RunEstimate& estimate);
void warn_of_long_run(const RunEstimate& estimate, const RunConfig& config);

}  // namespace sb
