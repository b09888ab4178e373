#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/index/block_index.h"
#include "parallel/ring/context_placement.h"

namespace sb {

// The rank that holds block `block` of a sequence of `blocks` blocks, before the sequence's offset.
int context_owner(ContextPlacement placement, int ranks, int64_t blocks, int64_t block);

// The packed sequences of a micro-batch, spread over the ranks of a context-parallel group by blocks. Lengths are free:
// any sequence may have fewer blocks than there are ranks, and a short last block. A rank holds its blocks in the order
// of the tokens, so that the tokens it holds of one sequence lie together.
//
// Every sequence's ranks are turned by an offset, chosen sequence by sequence such that the squares of the ranks'
// tokens, then of their causal pairs, have the smallest sum: short sequences do not all begin on rank 0, and remainders
// even out.
class ContextLayout {
 public:
  ContextLayout(ContextPlacement placement, int ranks, int block, std::span<const int32_t> cu_seqlens);

  int ranks() const { return ranks_; }
  int block() const { return block_; }
  int sequences() const { return static_cast<int>(cu_seqlens_.size()) - 1; }
  std::span<const int32_t> cu_seqlens() const { return cu_seqlens_; }
  int64_t length(int sequence) const { return cu_seqlens_[sequence + 1] - cu_seqlens_[sequence]; }
  int64_t blocks(int sequence) const { return first_block_[sequence + 1] - first_block_[sequence]; }
  int64_t block_length(int sequence, int64_t b) const {
    return std::min<int64_t>(block_, length(sequence) - b * block_);
  }

  int owner(int sequence, int64_t b) const { return owner_[first_block_[sequence] + b]; }
  // Which of its owner's blocks of this sequence it is.
  int32_t place(int sequence, int64_t b) const { return place_[first_block_[sequence] + b]; }
  // The blocks of a sequence on a rank, ascending; those from token `first`, the beginning of a block, on.
  std::span<const int32_t> held(int rank, int sequence) const;
  std::span<const int32_t> held_from(int rank, int sequence, int64_t first) const;
  // The most tokens any rank gets of micro-batches with at most this many tokens and sequences, for planning memory.
  static int64_t most_tokens(int ranks, int block, int64_t tokens, int64_t sequences);
  // Of one sequence whose every turn gives every rank a block, as all placements but zigzag do.
  static int64_t most_sequence_tokens(int ranks, int block, int64_t tokens);
  // The packed sequences as a rank holds them: its tokens of each, some maybe none.
  std::vector<int32_t> local_cu_seqlens(int rank) const;
  // For every token a rank holds, in its order: which token of the micro-batch it is.
  std::vector<int32_t> tokens(int rank) const;

 private:
  int ranks_, block_;
  std::vector<int32_t> cu_seqlens_;
  std::vector<int64_t> first_block_;  // [sequences + 1]
  std::vector<int32_t> owner_, place_;
  std::vector<int32_t> held_;        // by rank, sequence
  std::vector<int64_t> held_begin_;  // [ranks · sequences + 1]
};

// What ring attention computes where and when, in (query token, key token) pairs over all list heads: at step t of the
// ring, rank w has the keys of rank (w - t) mod ranks.
struct RingWork {
  int ranks = 0;
  std::vector<int64_t> ring;     // [rank · ranks + step]
  std::vector<int64_t> outside;  // [rank]: with keys that every rank has a copy of

  int64_t at(int rank, int step) const { return ring[int64_t{rank} * ranks + step]; }
  int64_t total() const;
  // Most over mean of the ranks' whole work.
  double worker_imbalance() const;
  // Mean over the ranks of (most over mean of the rank's steps).
  double step_imbalance() const;
  // All ranks wait for each other at every step: that time over the one with the same work spread evenly.
  double lock_step_over_ideal() const;
};

// Gathered columns are counted as copied to every rank, and so are the first `replicated_blocks` blocks of the
// sequences that are not dense (the sinks): their owner would have to be visited by everybody. (The ring keeps them
// where copies would take more room than a rank's tokens, see replicated_keys.)
// Only the queries from token `first_query` of every sequence on are counted: those of a piece.
RingWork count_ring_work(const ContextLayout& layout, const BlockIndex& index, int replicated_blocks,
                         int64_t first_query = 0);

}  // namespace sb
