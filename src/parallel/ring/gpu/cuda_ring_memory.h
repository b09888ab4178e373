#pragma once

// How much memory a ring of GPUs takes, for the memory plan.

#include <algorithm>
#include <cstdint>

#include "attention/gpu/launch/params.h"
#include "parallel/ring/ring_attention.h"

namespace sb {

// Masses of so many (token, key block) are held at a time, two bytes each.
constexpr int64_t kRingBatchMasses = int64_t{1} << 26;

// Patterns whose selections, and so their lists, are made on the device.
bool ring_selects_on_device(const SelectionConfig& selection);

struct CudaRingMemory {
  const RingAttention::Options& options;
  int ranks;
  int multiprocessors;
  const RingTravel& travel;
  const Attention* kernels;  // for lists from the host
  bool on_device;

  int64_t scratch_bytes(const AttentionShape& shape, int64_t max_tokens, int threads) const;
  int64_t state_bytes(const AttentionShape& shape, int64_t max_tokens) const;
  // Of pieces, whose lists come from the host; max_tokens of them are a rank's.
  PieceBytes piece_bytes(const AttentionShape& shape, const Attention::PieceLimits& limits) const;

 private:
  // Of the sparse, or of the dense sequences: the longest list of a row. No entries: there are no such sequences.
  struct Lists {
    int64_t query_block = 0, entries = 0;
    bool dense = false;
  };
  struct PassBytes {
    int64_t forward = 0, backward = 0;
  };
  int block() const { return std::min(options.selection.block, gpu::kBlock); }  // of the lists
  int64_t copies_limit(int64_t max_tokens) const;
  int64_t sparse_sequences(int64_t max_tokens) const;
  Lists sparse_lists(int64_t max_tokens) const;
  Lists dense_lists(int64_t max_tokens) const;
  PassBytes pass_bytes(const AttentionShape& shape, int64_t keys, int64_t queries, const Lists& lists) const;
  PassBytes most_pass_bytes(const AttentionShape& shape, int64_t keys, int64_t queries, int threads) const;
  int64_t select_bytes(const AttentionShape& shape, int64_t max_tokens) const;
  // A pass of a piece: so many of the keys are gathered first.
  PassBytes piece_pass_bytes(const AttentionShape& shape, int64_t queries, int64_t gathered) const;
};

}  // namespace sb
