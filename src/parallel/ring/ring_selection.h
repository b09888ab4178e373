#pragma once

#include <cstdint>
#include <vector>

#include "attention/select/coverage.h"
#include "attention/select/selector.h"
#include "attention/select/step_selection.h"
#include "comm/communicator.h"
#include "parallel/ring/context_layout.h"

namespace sb {

// Chooses pairs where several ranks share the sequences: each rank for the query blocks it holds. What one rank alone
// would look at in the keys of others is exchanged in a small form: the statistics of key blocks (by planes the chosen
// channels of keys as bf16), or the masses of columns and diagonals. The choices are those of one rank alone up to
// rounding.
class RingSelection {
 public:
  RingSelection(const SelectionConfig& config, int layers);

  const Selector& selector() const { return selector_; }
  // What it selects by, and what this rank has seen of its query blocks.
  StepSelection& step() { return step_; }

  // Collective. `index` covers the whole sequences; only the rows of query blocks that this rank holds are filled.
  // `budgets`: of every sequence, or empty; q and k are the tokens this rank holds.
  void choose(const Exec& exec, Communicator& group, int layer, const AttentionShape& shape,
              const ContextLayout& layout, std::span<const int32_t> budgets, const float* q, const float* k,
              BlockIndex& index);

  // Collective: measure_coverage() of every sequence, on `rows` of its tokens; the same on all ranks. A sequence
  // without tokens has no rows. Takes memory of its own.
  std::vector<CoverageSample> measure(const Exec& exec, Communicator& group, int layer, const AttentionShape& shape,
                                      const ContextLayout& layout, std::span<const int32_t> budgets, const float* q,
                                      const float* k, const BlockIndex& index, int rows);

  // About what it takes when no one of `ranks` ranks has more tokens than this.
  int64_t measure_bytes(const AttentionShape& shape, int64_t max_tokens, int ranks, int rows) const;

  // Memory that it holds now.
  int64_t bytes() const { return builder_.bytes(); }

  // About what choose() takes besides exec.scratch, likewise.
  int64_t choice_bytes(const AttentionShape& shape, int64_t max_tokens, int ranks) const;
  // Bytes of exec.scratch that choose() takes when no one of `ranks` ranks has more tokens than this.
  int64_t scratch_bytes(const AttentionShape& shape, int64_t max_tokens, int ranks) const;

 private:
  // Of whole sequences, in exec.scratch; null for those that are not `wanted`.
  std::vector<const float*> gather_statistics(const Exec& exec, Communicator& group, const AttentionShape& shape,
                                              const ContextLayout& layout, std::span<const uint8_t> wanted,
                                              const float* k, const LayerPlanes* planes);
  CoverageSample measure_sequence(const Exec& exec, Communicator& group, const SelectionRequest& request,
                                  const ContextLayout& layout, int sequence, const BlockIndex& index, int rows);
  void choose_vertical_slash_rows(const Exec& exec, Communicator& group, const SelectionRequest& request,
                                  const ContextLayout& layout, int sequence);
  void choose_window_rows(const SelectionRequest& request);
  void choose_most_mass_rows(const Exec& exec, Communicator& group, const SelectionRequest& request);

  Selector selector_;
  StepSelection step_;
  BlockIndexBuilder builder_;
};

}  // namespace sb
