#pragma once

#include "attention/attention.h"
#include "attention/index/block_index.h"

namespace sb {

// Attention over the pairs of an index, on the CPU: exactly softmax attention with everything else masked. Sequences
// that the index calls dense are computed whole in the same call. A row without keys gives zeros and a log-sum-exp of
// -inf; keys that nobody selected get zero gradients. Both give the same bits for every number of threads.
void block_sparse_forward(const Exec& exec, const AttentionShape& shape, const BlockIndex& index,
                          const AttentionOperands& operands);
void block_sparse_backward(const Exec& exec, const AttentionShape& shape, const BlockIndex& index,
                           const AttentionOperands& operands, const AttentionGradients& gradients);

// The same of one piece of a sequence: the index has its tokens up to the piece's end, and lists for the piece's own
// query blocks. Gradients of keys and values are added.
void block_sparse_piece_forward(const Exec& exec, const AttentionShape& shape, const BlockIndex& index,
                                const PackedSequences& piece, const AttentionOperands& operands);
void block_sparse_piece_backward(const Exec& exec, const AttentionShape& shape, const BlockIndex& index,
                                 const PackedSequences& piece, const AttentionOperands& operands,
                                 const AttentionGradients& gradients);

// One part of an attention whose keys come part by part (a ring): `rows` says for every sequence of the index where its
// queries and keys lie in the operands, and none is dense. The result of these keys is merged into out and lse by
// log-sum-exp (before the first part: zeros and -inf); gradients, for which out and lse must be those of all parts, are
// added.
void block_sparse_merge_forward(const Exec& exec, const AttentionShape& shape, const BlockIndex& index,
                                std::span<const SequenceRows> rows, const AttentionOperands& operands);
void block_sparse_add_backward(const Exec& exec, const AttentionShape& shape, const BlockIndex& index,
                               std::span<const SequenceRows> rows, const AttentionOperands& operands,
                               const AttentionGradients& gradients);

// Bytes of exec.scratch that either needs for micro-batches of at most this many tokens (of operands with so many rows,
// where queries and keys differ).
int64_t block_sparse_scratch_bytes(const AttentionShape& shape, int64_t max_tokens, int threads);
struct BlockSparseScratch {
  int64_t forward, backward;
};
BlockSparseScratch block_sparse_scratch(const AttentionShape& shape, int64_t queries, int64_t keys, int threads);

}  // namespace sb
