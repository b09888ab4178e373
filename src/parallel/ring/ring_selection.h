#pragma once

#include <cstdint>
#include <vector>

#include "attention/select/coverage.h"
#include "attention/select/selector.h"
#include "attention/select/step_selection.h"
#include "comm/communicator.h"
#include "parallel/ring/context_layout.h"

namespace sb {

// Selects pairs where several ranks share the sequences: each rank for the query blocks it holds. What one rank alone
// would look at in the keys of others is exchanged in a small form: the statistics of key blocks (by planes the
// selected channels of keys as bf16), or the masses of columns and diagonals. The selections are those of one rank
// alone up to rounding.
class RingSelection {
 public:
  RingSelection(const SelectionConfig& config, int layers);

  const Selector& selector() const { return selector_; }
  // What it selects by, and what this rank has seen of its query blocks.
  StepSelection& step() { return step_; }

  // Collective. `index` covers the whole sequences; only the rows of query blocks that this rank holds are filled.
  // `budgets`: of every sequence, or empty; q and k are the tokens this rank holds.
  void select(const Exec& exec, Communicator& group, int layer, const AttentionShape& shape,
              const ContextLayout& layout, std::span<const int32_t> budgets, const float* q, const float* k,
              BlockIndex& index);

  // The same of a piece, step by step. `layout`: of its sequence up to the piece's end; q and k are this rank's tokens
  // of the piece. First, collective, statistics of the piece's key blocks come beside those of the pieces before it;
  // then the rows of the piece are selected.
  void append_statistics(const Exec& exec, Communicator& group, int layer, const AttentionShape& shape,
                         const ContextLayout& layout, const SequencePiece& piece, const float* k);
  void select_piece(const Exec& exec, int rank, int layer, const AttentionShape& shape, const ContextLayout& layout,
                    const PackedSequences& piece, const float* q, const float* k, BlockIndex& index);
  // Collective: its share of the sequence's coverage, added to those of the pieces before it, of which it returns the
  // sum. `keys`: all that this rank holds up to the piece's end.
  const CoverageSample& measure_piece(const Exec& exec, Communicator& group, int layer, const AttentionShape& shape,
                                      const ContextLayout& layout, const PackedSequences& piece, const float* q,
                                      const float* keys, const BlockIndex& index, int rows);
  // Bytes of exec.scratch that append_statistics() takes where no rank has more tokens of a piece than this, and what
  // is kept of a sequence of so many tokens in every layer.
  int64_t append_scratch_bytes(const AttentionShape& shape, int64_t max_tokens, int ranks) const;
  int64_t kept_bytes(const AttentionShape& shape, int64_t tokens) const;
  // What is kept of pieces now, all layers together.
  int64_t kept_bytes_used() const;

  // Collective: measure_coverage() of every sequence, on `rows` of its tokens; the same on all ranks. A sequence
  // without tokens has no rows. Takes memory of its own.
  std::vector<CoverageSample> measure(const Exec& exec, Communicator& group, int layer, const AttentionShape& shape,
                                      const ContextLayout& layout, std::span<const int32_t> budgets, const float* q,
                                      const float* k, const BlockIndex& index, int rows);

  // About what it takes when no one of `ranks` ranks has more tokens than this.
  int64_t measure_bytes(const AttentionShape& shape, int64_t max_tokens, int ranks, int rows) const;

  // Memory that it holds now.
  int64_t bytes() const { return builder_.bytes(); }

  // About what select() takes besides exec.scratch, likewise.
  int64_t select_bytes(const AttentionShape& shape, int64_t max_tokens, int ranks) const;
  // Bytes of exec.scratch that select() takes when no one of `ranks` ranks has more tokens than this.
  int64_t scratch_bytes(const AttentionShape& shape, int64_t max_tokens, int ranks) const;

 private:
  // Of whole sequences, in exec.scratch; null for those that are not `wanted`.
  std::vector<const float*> gather_statistics(const Exec& exec, Communicator& group, const AttentionShape& shape,
                                              const ContextLayout& layout, std::span<const uint8_t> wanted,
                                              const float* k, const LayerPlanes* planes);
  CoverageSample measure_sequence(const Exec& exec, Communicator& group, const SelectionRequest& request,
                                  const ContextLayout& layout, int sequence, const BlockIndex& index, int rows);
  void select_vertical_slash_rows(const Exec& exec, Communicator& group, const SelectionRequest& request,
                                  const ContextLayout& layout, int sequence);
  void select_window_rows(const SelectionRequest& request);
  void select_most_mass_rows(const Exec& exec, Communicator& group, const SelectionRequest& request);

  // What has to outlast a piece's forward: one sequence at a time goes through a layer.
  struct CutSequence {
    std::vector<float> statistics;  // [kv_heads, blocks of the whole sequence, block_floats]
    CoverageSample coverage;        // of the pieces so far
  };

  Selector selector_;
  StepSelection step_;
  BlockIndexBuilder builder_;
  std::vector<CutSequence> cut_;  // by layer
};

}  // namespace sb
