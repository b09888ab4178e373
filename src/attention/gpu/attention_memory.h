#pragma once

#include <cstdint>

#include "attention/cpu/sparse_attention.h"

namespace sb::gpu {

// What attention on CUDA may need, for the memory plan.
struct AttentionMemory {
  const SparseAttention::Options& options;
  int multiprocessors;
  int64_t batch_masses;

  int64_t scratch_bytes(const AttentionShape& shape, int64_t max_tokens) const;
  int64_t state_bytes(const AttentionShape& shape, int64_t max_tokens) const;
  // Of scratch, what is kept of key blocks to judge them by, under one list head.
  int64_t statistics_bytes(const AttentionShape& shape, int64_t max_tokens) const;
  // Of scratch, what coverage is measured in.
  int64_t coverage_bytes(const AttentionShape& shape, int64_t max_tokens) const;

 private:
  bool selects_most_mass() const;
  int list_query_block() const;
  int64_t most_caps() const;
  int64_t sparse_sequences(int64_t max_tokens) const;  // at most
  int64_t gathered_columns(int64_t max_tokens) const;
};

}  // namespace sb::gpu
