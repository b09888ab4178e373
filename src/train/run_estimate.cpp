#include "train/run_estimate.h"

#include <algorithm>
#include <chrono>

#include "core/log.h"
#include "device/cuda.h"
#include "device/memory.h"
#include "model/flops.h"
#include "ops/linear.h"
#include "plan/latency/workload.h"

namespace sb {
namespace {

constexpr double kDay = 86400;
// Steps whose lengths are looked at: sequences differ, and the source knows its lengths without reading them.
constexpr int64_t kLookedAt = 8;
// Time of a step over that of its matrix products alone; 1.3 to 1.9 in the runs that were compared.
constexpr double kBesidesProducts = 1.6;

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Share of the causal pairs that sparse attention computes at its budget.
double density_of(const SelectionConfig& selection, const std::vector<int64_t>& lengths) {
  if (selection.pattern == SelectionPattern::dense || selection.budget <= 0) return 1.0;
  double computed = 0, all = 0;
  for (const int64_t length : lengths) {
    const bool dense = length <= selection.dense_limit();
    computed += selected_pairs(length, dense ? length : std::min<int64_t>(length, selection.budget));
    all += selected_pairs(length, length);
  }
  return all > 0 ? computed / all : 1.0;
}

}  // namespace

double measure_products(const Exec& exec, const ModelConfig& model, DType dtype, int64_t tokens) {
  constexpr double kTime = 0.05;
  // No wider than shows the device's speed: this memory is in no plan.
  constexpr int64_t kWidest = 4096;
  const int64_t rows = std::clamp<int64_t>(tokens, 1, 1024), in = std::min(model.hidden_size, kWidest),
                out = std::min(model.intermediate_size, kWidest);
  Arena arena = make_arena(
      "timed product", (rows * in + out * in + rows * out) * dtype_bytes(dtype) + 4 * Arena::kAlignment, exec.device);
  const TensorView x = arena.allocate(dtype, {rows, in}), weight = arena.allocate(dtype, {out, in}),
                   y = arena.allocate(dtype, {rows, out});
  zero_now(x);
  zero_now(weight);
  const auto run = [&] {
    linear_forward(exec, x, weight, {}, y);
    if (exec.device == DeviceKind::cuda) cuda::synchronize(exec.stream);
  };
  run();  // the first call sets things up
  double best = 0;
  const auto begin = std::chrono::steady_clock::now();
  do {
    const auto one = std::chrono::steady_clock::now();
    run();
    const double flops = 2.0 * static_cast<double>(rows) * static_cast<double>(in) * static_cast<double>(out);
    best = std::max(best, flops / std::max(seconds_since(one), 1e-9));
  } while (seconds_since(begin) < kTime);
  return best;
}

RunEstimate estimate_run(const RunConfig& config, const ModelConfig& model, const SequenceSource& source,
                         const TrainState& state, double rank_rate) {
  RunEstimate estimate;
  estimate.steps = config.train.max_steps - state.step;
  estimate.rate = rank_rate * static_cast<double>(config.parallel.grid().ranks());
  if (estimate.steps <= 0) return estimate;
  const int64_t looked_at = std::min(estimate.steps, kLookedAt);
  double flops = 0;
  for (int64_t step = state.step + 1; step <= state.step + looked_at; ++step) {
    std::vector<int64_t> lengths;
    for (const Sequence& sequence : step_batch(config, source, state, step)) lengths.push_back(sequence.tokens);
    flops += training_flops(model, lengths, density_of(config.attention.selection, lengths), config.lora_config());
  }
  estimate.step_seconds = kBesidesProducts * flops / static_cast<double>(looked_at) / estimate.rate;
  return estimate;
}

std::string describe(const RunEstimate& estimate) {
  return fmt::format(
      "estimate    about {} per step, {} for {} steps (from one timed matmul at {:.0f} GFLOP/s; measured times "
      "follow)\n",
      estimate.step_seconds < 10 ? fmt::format("{:.2g} s", estimate.step_seconds)
                                 : format_duration(estimate.step_seconds),
      format_duration(estimate.run_seconds()), estimate.steps, estimate.rate / 1e9);
}

void warn_of_long_run(const RunEstimate& estimate, const RunConfig& config) {
  if (estimate.run_seconds() < kDay) return;
  log::warning(
      "this run would take about {:.1f} days on this machine; {}lower train.max_steps, "
      "data.max_sequence_length or batch.global_batch_size, or choose a smaller model",
      estimate.run_seconds() / kDay, config.device == DeviceKind::cpu ? "use a GPU (device: cuda), " : "");
}

}  // namespace sb
