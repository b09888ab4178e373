#pragma once

#include "attention/attention.h"
#include "attention/index/block_index.h"

namespace sb {

// Attention on the CPU, fp32, as walks over tiles. With an index, sequences that it does not call dense compute the
// index's pairs only; without one, everything. Results do not depend on the number of threads. With `rows`, one a
// sequence, queries and keys lie apart, and results are merged into out and lse or added to the gradients. Of a piece,
// the index has the tokens up to its end, and lists for its own query blocks.
void cpu_attention_forward(const Exec& exec, const AttentionShape& shape, const PackedSequences& sequences,
                           const AttentionOperands& operands, const BlockIndex* index,
                           std::span<const SequenceRows> rows = {});
void cpu_attention_backward(const Exec& exec, const AttentionShape& shape, const PackedSequences& sequences,
                            const AttentionOperands& operands, const AttentionGradients& gradients,
                            const BlockIndex* index, std::span<const SequenceRows> rows = {});

// Scratch that either of them needs at most for micro-batches of `max_tokens` tokens, or for a piece that sees so many
// keys; and each for operands of that many rows.
int64_t cpu_attention_scratch_bytes(const AttentionShape& shape, int64_t max_tokens, int threads);
int64_t cpu_piece_scratch_bytes(const AttentionShape& shape, int64_t queries, int64_t keys, int threads);
// Of AttentionOperands::packed, for every token in flight.
int64_t cpu_page_bytes(const AttentionShape& shape);
int64_t cpu_forward_scratch_bytes(const AttentionShape& shape, int64_t keys, int threads);
int64_t cpu_backward_scratch_bytes(const AttentionShape& shape, int64_t queries, int64_t keys, int threads);

}  // namespace sb
