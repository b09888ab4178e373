#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "balance/batching.h"
#include "balance/cost_model.h"
#include "balance/coverage.h"

namespace sb {

// For every (sequence, layer) the budgets worth choosing: the upper concave envelope of coverage over selected pairs,
// from the lowest budget that p allows up to dense (or what memory was planned for).
class BudgetCurves {
 public:
  struct Vertex {
    int32_t budget;
    double pairs, scores;
    double coverage;
  };

  BudgetCurves(const CostModel& cost, const CoverageModel& coverage, std::span<const Sequence> sequences, double p);

  // All layers share one curve.
  bool uniform() const { return uniform_; }
  int layers() const { return layers_; }
  std::span<const Vertex> vertices(int sequence, int layer) const {
    const size_t i = index(sequence, layer);
    return {vertices_.data() + begin_[i], begin_[i + 1] - begin_[i]};
  }
  // At the base budget.
  double base_coverage(int sequence, int layer) const { return base_[index(sequence, layer)]; }
  // Σ tokens · Σ layers · coverage at the base budget.
  double base_total() const { return base_total_; }

 private:
  size_t index(int sequence, int layer) const {
    return uniform_ ? static_cast<size_t>(sequence)
                    : static_cast<size_t>(sequence) * static_cast<size_t>(layers_) + static_cast<size_t>(layer);
  }
  bool uniform_;
  int layers_;
  std::vector<Vertex> vertices_;
  std::vector<size_t> begin_{0};
  std::vector<double> base_;
  double base_total_ = 0;
};

// What the attention of one micro-batch may cost on one stage: raising steps of its sequences (and layers) in the order
// of gain per pair, with time and gain after each. Position i means the first i steps are taken; between i and i+1 a
// part of the stage's layers takes the step (uniform curves only).
struct StageCurve {
  struct Step {
    int32_t sequence;  // place in the global batch
    int32_t layer;     // -1: every layer of the stage
    int32_t vertex;    // of its curve, that the step leads to
  };
  std::vector<Step> steps;
  std::vector<double> forward, backward;  // attention and selection after i steps, all layers of the stage
  std::vector<double> gain;               // Σ tokens · coverage after i steps, all layers of the stage
  // Positions on the concave envelope of (time, gain), for the solvers; the first is the fastest.
  std::vector<int> corners;
};

// The curve of one micro-batch on one stage. With uniform curves all stages share it up to the number of layers: it is
// then built for one layer and `scale_curve` fits it to a stage.
StageCurve stage_curve(const CostModel& cost, const BudgetCurves& curves, std::span<const Sequence> sequences,
                       std::span<const int> members, int first_layer, int layers, int max_corners);

}  // namespace sb
