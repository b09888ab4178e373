#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/thread_pool.h"
#include "plan/batching/batching_policy.h"
#include "plan/latency/cost_model.h"
#include "plan/latency/workload.h"
#include "plan/schedule/schedule.h"

namespace sb {

struct PartitionProblem;

// Another way to fill micro-batches, to compare `sab` with (plan/simulate/compared_batchings.h).
struct ComparedBatching {
  const char* name;
  std::vector<double> (*weights)(const CostModel& cost, std::span<const Sequence> sequences);
  std::vector<int> (*fill)(const PartitionProblem& problem);  // the bin of every sequence; empty: no room
};

struct BatchingOptions {
  BatchingPolicy policy = BatchingPolicy::sab;
  const ComparedBatching* compared = nullptr;  // where the policy says so
  int64_t micro_batch_sequences = 0;  // fixes the number of micro-batches: global batch ÷ dp ÷ this; 0: the cap does
  int64_t micro_batch_tokens = 0;     // hard cap; 0: none
  int64_t max_sequences = 0;          // hard cap, not below micro_batch_sequences; 0: none
  bool reorder = true;                // the order of micro-batches will be improved afterwards
  int64_t trials = 4000;              // of local search

  std::string name() const;
};

// Sequences (by their place in the global batch) in micro-batches, micro-batches on data-parallel ranks. Flat: rank r
// has the micro-batches rank_begin[r] … rank_begin[r+1]-1, micro-batch i the sequences at micro_batch_begin[i] ….
struct Batches {
  std::vector<int> rank_begin{0};
  std::vector<int> micro_batch_begin{0};
  std::vector<int> sequences;
  bool no_room = false;       // the policy found none under the caps: the sequences are in order
  std::vector<Piece> pieces;  // of every micro-batch; empty: all hold whole sequences
  std::vector<int> ahead;     // of every rank, see Schedule; empty: 1

  int ranks() const { return static_cast<int>(rank_begin.size()) - 1; }
  int micro_batches() const { return static_cast<int>(micro_batch_begin.size()) - 1; }
  int micro_batches(int rank) const { return rank_begin[static_cast<size_t>(rank) + 1] - first(rank); }
  int first(int rank) const { return rank_begin[static_cast<size_t>(rank)]; }
  std::span<const int> members(int micro_batch) const {
    const auto b = static_cast<size_t>(micro_batch_begin[static_cast<size_t>(micro_batch)]);
    const auto e = static_cast<size_t>(micro_batch_begin[static_cast<size_t>(micro_batch) + 1]);
    return {sequences.data() + b, e - b};
  }
  // Whether any sequence is.
  bool cut() const {
    return std::ranges::any_of(pieces, [](const Piece& piece) { return piece.end > 0; });
  }
  Piece piece(int micro_batch) const { return pieces.empty() ? Piece{} : pieces[static_cast<size_t>(micro_batch)]; }
  // How many micro-batches each group of a rank has: the pieces of a sequence, or one micro-batch.
  std::vector<int> groups(int rank) const;
  int64_t tokens(std::span<const Sequence> all, int micro_batch) const;
  bool operator==(const Batches&) const = default;
};

// What a sequence adds to a micro-batch, microseconds: per layer, and once for embedding and loss.
struct SequenceCost {
  StageTime layer, head;
};
// At these budgets (one per sequence, the same in every layer).
std::vector<SequenceCost> sequence_costs(const CostModel& cost, std::span<const Sequence> sequences,
                                         std::span<const int64_t> budgets);

// Micro-batches of each rank: fixed by micro_batch_sequences, otherwise the fewest that hold all tokens under the cap.
// UserError: no sequences, a length below one, a batch smaller than dp, a sequence longer than the cap, no room.
Batches make_batches(const CostModel& cost, std::span<const Sequence> sequences, std::span<const int64_t> budgets,
                     const BatchingOptions& options);
void check_sequences(std::span<const Sequence> sequences, int dp, int64_t cap);

// No arrangement of these sequences at these budgets ([sequence · layers + layer]) is faster: the mean load of the
// busiest stage with the least possible fill and drain, or the longest sequence through all stages. `stage_busy` is the
// total work of every stage over all ranks.
double step_lower_bound(const CostModel& cost, std::span<const Sequence> sequences, size_t layers,
                        std::span<const int32_t> budgets, std::span<const double> stage_busy,
                        ThreadPool* pool = nullptr);

}  // namespace sb
