#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "plan/latency/cost_model.h"
#include "plan/plan.h"
#include "plan/simulate/simulate.h"

namespace sb {

// Memory of the fullest worker as `train` plans it, without what is small: weights, gradients, sharded optimizer,
// activations of the micro-batches in flight (train.recompute: attention keeps a layer's input, attention's output and
// log-sum-exp), and the temporaries of one layer with those of attention (with layout.cp: of a ring) or of the loss and
// messages between stages.
struct MemoryEstimate {
  int64_t weights = 0, gradients = 0, optimizer = 0, activations = 0, workspace = 0;
  int64_t total() const { return weights + gradients + optimizer + activations + workspace; }
};
// `micro_batch_tokens`: tokens of the largest micro-batch. `longest_cut`: of the longest sequence that is cut into
// pieces of so many tokens; its keys, values and the fp32 sums of their gradients are kept too. 0: all are whole.
MemoryEstimate estimate_memory(const CostModel& cost, int64_t micro_batch_tokens, int64_t longest_cut = 0);

struct SweepLimits {
  int tp = 8, cp = 8;  // largest to try
};
// All dp × pp × tp × cp of this many workers that the model and the batch allow, with sparse attention.
std::vector<Layout> possible_layouts(const Layout& like, int workers, const ModelShape& shape, int64_t global_batch,
                                     const SweepLimits& most);

// One policy on one layout.
struct SweepRow {
  Layout layout;
  SimulatedRow simulated;
  double tokens_per_second = 0;
  int64_t memory_bytes = 0;  // of the fullest worker
  std::optional<bool> fits;  // nothing where the profile does not say how much memory there is
};
// The case of `like` on another layout.
SweepRow simulate_layout(const LatencyModel& latency, const SimulateInput& like, const SimulatedPolicy& policy,
                         const Layout& layout);

}  // namespace sb
