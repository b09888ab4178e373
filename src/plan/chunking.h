#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/thread_pool.h"
#include "plan/batching/batching.h"
#include "plan/latency/cost_model.h"
#include "plan/schedule/schedule.h"

namespace sb {

// Long sequences are cut into pieces that go through the pipeline one after the other, short ones are packed.
struct ChunkOptions {
  static constexpr int64_t kAutomatic = -1;
  int64_t tokens = 0;  // most of a piece or pack; 0: sequences stay whole; kAutomatic: what is fastest
  // Of every stage: most tokens that it may hold for backward, every micro-batch counted as large as the step's
  // largest; empty: any.
  std::vector<int64_t> kept_tokens;
  bool on() const { return tokens != 0; }
  bool automatic() const { return tokens == kAutomatic; }
};

// Sizes that may be tried, multiples of the edge.
std::vector<int64_t> chunk_sizes(const ChunkOptions& options, int64_t edge);

// The fewest pieces of at most `chunk` tokens, as equal as the edges allow; a sequence that fits is one piece. `chunk`
// is a multiple of `edge`.
std::vector<Piece> cut_sequence(int64_t length, int64_t chunk, int64_t edge);

// What a sequence adds to every layer of its rank when it is cut to at most `chunk` tokens, microseconds.
double cut_cost(const CostModel& cost, const Sequence& sequence, int64_t budget, int64_t chunk);

// Sequences that are on data-parallel ranks already, `rank` of each, cut and packed; every rank by the size that is
// fastest of those allowed, in the order that is, with forwards running ahead as far as the longest sequence needs and
// kept_tokens allow. `budgets`: [sequence · layers + layer]. Nothing where kept_tokens leave no room.
std::optional<Batches> make_chunks(const CostModel& cost, std::span<const Sequence> sequences,
                                   std::span<const int> rank, std::span<const int32_t> budgets,
                                   const BatchingOptions& batching, const ChunkOptions& options,
                                   ThreadPool* pool = nullptr);

// No arrangement of these micro-batches and pieces is faster: the mean load of the busiest stage with the least
// possible fill and drain, or the longest group, whose pieces one stage after the other runs. `times`: of every rank,
// in the order of its micro-batches.
double pieces_lower_bound(const CostModel& cost, const Batches& batches, std::span<const PipelineTimes> times);

}  // namespace sb
