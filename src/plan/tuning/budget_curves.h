#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/thread_pool.h"
#include "plan/batching/batching.h"
#include "plan/coverage/coverage.h"
#include "plan/latency/cost_model.h"

namespace sb {

// For every (sequence, layer) the budgets worth choosing: the upper concave envelope of coverage over selected pairs,
// from the lowest budget that p allows up to dense (or what memory was planned for).
class BudgetCurves {
 public:
  struct Vertex {
    int32_t budget;
    double coverage;
  };

  BudgetCurves(const CostModel& cost, const CoverageModel& coverage, std::span<const Sequence> sequences, double p,
               ThreadPool* pool = nullptr);

  // All layers share one curve.
  bool uniform() const { return uniform_; }
  int layers() const { return layers_; }
  std::span<const Vertex> vertices(int sequence, int layer) const {
    const Chunk& chunk = chunks_[static_cast<size_t>(sequence / kChunk)];
    const size_t i = index(sequence % kChunk, layer);
    return {chunk.vertices.data() + chunk.begin[i], chunk.begin[i + 1] - chunk.begin[i]};
  }
  int32_t floor(int sequence, int layer) const { return vertices(sequence, layer)[0].budget; }
  // At the base budget.
  double base_coverage(int sequence, int layer) const {
    return chunks_[static_cast<size_t>(sequence / kChunk)].base[index(sequence % kChunk, layer)];
  }
  // Σ tokens · Σ layers · coverage at the base budget.
  double base_total() const { return base_total_; }

 private:
  // Sequences are worked on by several threads, a chunk at a time.
  static constexpr int kChunk = 16;
  struct Chunk {
    std::vector<Vertex> vertices;
    std::vector<uint32_t> begin{0};
    std::vector<double> base;
    double base_total = 0;
  };
  class Builder;

  size_t index(int sequence, int layer) const {
    return uniform_ ? static_cast<size_t>(sequence)
                    : static_cast<size_t>(sequence) * static_cast<size_t>(layers_) + static_cast<size_t>(layer);
  }
  bool uniform_;
  int layers_;
  std::vector<Chunk> chunks_;
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
// then built for one layer and multiplied.
StageCurve stage_curve(const CostModel& cost, const BudgetCurves& curves, std::span<const Sequence> sequences,
                       std::span<const int> members, int first_layer, int layers, int max_corners);

}  // namespace sb
