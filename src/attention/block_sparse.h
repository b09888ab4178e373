#pragma once

#include "attention/attention.h"
#include "attention/block_index.h"

namespace sb {

// Attention over the pairs of an index, on the CPU: exactly softmax attention with everything else masked. Sequences
// that the index calls dense are computed whole in the same call. A row without keys gives zeros and a log-sum-exp of
// -inf; keys that nobody chose get zero gradients. Both give the same bits for every number of threads.
void block_sparse_forward(const Exec& exec, const AttentionShape& shape, const BlockIndex& index,
                          const AttentionOperands& operands);
void block_sparse_backward(const Exec& exec, const AttentionShape& shape, const BlockIndex& index,
                           const AttentionOperands& operands, const AttentionGradients& gradients);

// Bytes of exec.scratch that either needs for micro-batches of at most this many tokens.
int64_t block_sparse_scratch_bytes(const AttentionShape& shape, int64_t max_tokens, int threads);

}  // namespace sb
