#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "attention/attention.h"
#include "attention/index/block_index.h"
#include "attention/select/coverage.h"
#include "attention/select/selector.h"
#include "attention/select/step_selection.h"

namespace sb {

// What attention did in one layer since the last report.
struct LayerAttention {
  int64_t pairs = 0;         // (query token, key token) pairs computed, over list heads
  int64_t causal_pairs = 0;  // of a dense run
  double coverage = 0;       // Σ over sampled (sequence, layer) of coverage · tokens
  int64_t covered_tokens = 0;
  double mean_coverage() const { return covered_tokens == 0 ? 1.0 : coverage / static_cast<double>(covered_tokens); }
  double density() const {
    return causal_pairs == 0 ? 1.0 : static_cast<double>(pairs) / static_cast<double>(causal_pairs);
  }
};

struct AttentionReport {
  std::vector<LayerAttention> layers;
  std::vector<MeasuredCoverage> samples;
  LayerAttention total() const;
};

// Attention that selects what it computes: it reports what it did and may learn from step to step.
class SelectingAttention : public Attention {
 public:
  // What happened since the last call; starts anew.
  virtual AttentionReport take_report() = 0;
  // What it selects by until the next call: within a step nothing changes.
  virtual void use(const LearnedSelection& learned) = 0;
  // What learn() needs, of the forwards since the last call (not of replays) and of this rank's part of them; starts
  // anew.
  virtual SelectionObservations take_observations() = 0;
};

// Dynamic block-sparse attention: selects pairs by the configured pattern under each sequence's budget, computes these,
// and keeps the index for backward and recompute. Sequences within `dense_below` or their budget, and layers in
// `dense_layers`, run dense in the same call.
class SparseAttention final : public SelectingAttention {
 public:
  struct Options {
    SelectionConfig selection;
    int layers = 0;
    // Rows of every sequence on which the true coverage is measured each forward; 0: none.
    int coverage_rows = 0;
    // Largest budget that a micro-batch may bring, for the memory plan; 0: the configured one.
    int64_t largest_budget = 0;
  };
  explicit SparseAttention(const Options& options);
  ~SparseAttention() override;

  std::unique_ptr<AttentionState> make_state() const override;
  void forward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
               const AttentionOperands& operands, AttentionState& state, bool replay) override;
  void backward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
                const AttentionOperands& operands, const AttentionGradients& gradients, AttentionState& state) override;
  int64_t scratch_bytes(const AttentionShape& shape, int64_t max_tokens, int threads) const override;
  int64_t state_bytes(const AttentionShape& shape, int64_t max_tokens) const override;
  int64_t call_bytes(const AttentionShape& shape, int64_t max_tokens, int threads) const override;
  std::string refuses_pieces() const override;
  PieceBytes piece_bytes(const AttentionShape& shape, const PieceLimits& limits, int threads) const override;
  // What the calls so far took of it.
  int64_t call_bytes_used() const {
    return static_cast<int64_t>(statistics_.capacity() * sizeof(float)) + builder_.bytes();
  }
  // What the pieces so far took in every layer, all layers together.
  int64_t layer_bytes_used() const;

  // The index a state holds: to dump it, to compare it, or to put one in before a forward with `replay`.
  static BlockIndex& index(AttentionState& state);
  AttentionReport take_report() override;
  void use(const LearnedSelection& learned) override { step_.use(learned); }
  SelectionObservations take_observations() override { return step_.take_observations(); }

 private:
  // What has to outlast a piece's forward: one sequence at a time goes through a layer.
  struct CutSequence {
    std::vector<float> statistics;  // [kv_heads, blocks of the whole sequence, block_floats]
    CoverageSample coverage;        // of the pieces so far
  };

  void select(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
              const AttentionOperands& operands, BlockIndex& index);
  // For what planes are selected by in later steps.
  void measure_energies(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
                        const AttentionOperands& operands);
  bool needs_statistics() const { return options_.selection.scores_blocks() || options_.coverage_rows > 0; }
  // Statistics of the piece's blocks, beside those of the pieces before it.
  void append_statistics(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& piece,
                         const AttentionOperands& operands);
  void count_pairs(int layer, const PackedSequences& sequences, const BlockIndex& index);
  void measure(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
               const AttentionOperands& operands, const BlockIndex& index);
  void measure_piece(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& piece,
                     const AttentionOperands& operands, const BlockIndex& index);
  void report(int layer, int64_t tokens, CoverageSample sample);
  SequenceTiles tiles_of(const PackedSequences& sequences, int sequence) const;
  // The most that the lists of a micro-batch hold, of queries that see at most so many keys.
  struct Lists {
    int64_t rows = 0, entries = 0, columns = 0;  // of a row
  };
  Lists lists(const AttentionShape& shape, int64_t max_tokens, int64_t keys) const;
  int64_t statistics_bytes(const AttentionShape& shape, int64_t tokens) const;
  // Of one sequence's keys; valid until the next call.
  const float* statistics(const Exec& exec, const AttentionShape& shape, const float* k, const SequenceTiles& tiles,
                          const LayerPlanes* planes);

  Options options_;
  Selector selector_;
  StepSelection step_;
  BlockIndexBuilder builder_;
  std::vector<float> statistics_;  // of the sequence or piece at hand
  std::vector<CutSequence> cut_;   // by layer
  AttentionReport report_;
};

}  // namespace sb
