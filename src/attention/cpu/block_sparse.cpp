#include "attention/cpu/block_sparse.h"

#include "attention/cpu/walk.h"

namespace sb {
namespace {

std::vector<int32_t> cumulative_lengths(const BlockIndex& index) {
  std::vector<int32_t> cu_seqlens = {0};
  for (const BlockIndex::Sequence& sequence : index.sequences()) {
    cu_seqlens.push_back(cu_seqlens.back() + sequence.length);
  }
  return cu_seqlens;
}

}  // namespace

void block_sparse_forward(const Exec& exec, const AttentionShape& shape, const BlockIndex& index,
                          const AttentionOperands& operands) {
  const std::vector<int32_t> cu_seqlens = cumulative_lengths(index);
  cpu_attention_forward(exec, shape, {cu_seqlens, {}}, operands, &index);
}

void block_sparse_backward(const Exec& exec, const AttentionShape& shape, const BlockIndex& index,
                           const AttentionOperands& operands, const AttentionGradients& gradients) {
  const std::vector<int32_t> cu_seqlens = cumulative_lengths(index);
  cpu_attention_backward(exec, shape, {cu_seqlens, {}}, operands, gradients, &index);
}

void block_sparse_piece_forward(const Exec& exec, const AttentionShape& shape, const BlockIndex& index,
                                const PackedSequences& piece, const AttentionOperands& operands) {
  cpu_attention_forward(exec, shape, piece, operands, &index);
}

void block_sparse_piece_backward(const Exec& exec, const AttentionShape& shape, const BlockIndex& index,
                                 const PackedSequences& piece, const AttentionOperands& operands,
                                 const AttentionGradients& gradients) {
  cpu_attention_backward(exec, shape, piece, operands, gradients, &index);
}

void block_sparse_merge_forward(const Exec& exec, const AttentionShape& shape, const BlockIndex& index,
                                std::span<const SequenceRows> rows, const AttentionOperands& operands) {
  const std::vector<int32_t> cu_seqlens = cumulative_lengths(index);
  cpu_attention_forward(exec, shape, {cu_seqlens, {}}, operands, &index, rows);
}

void block_sparse_add_backward(const Exec& exec, const AttentionShape& shape, const BlockIndex& index,
                               std::span<const SequenceRows> rows, const AttentionOperands& operands,
                               const AttentionGradients& gradients) {
  const std::vector<int32_t> cu_seqlens = cumulative_lengths(index);
  cpu_attention_backward(exec, shape, {cu_seqlens, {}}, operands, gradients, &index, rows);
}

BlockSparseScratch block_sparse_scratch(const AttentionShape& shape, int64_t queries, int64_t keys, int threads) {
  return {cpu_forward_scratch_bytes(shape, keys, threads), cpu_backward_scratch_bytes(shape, queries, keys, threads)};
}

int64_t block_sparse_scratch_bytes(const AttentionShape& shape, int64_t max_tokens, int threads) {
  return cpu_attention_scratch_bytes(shape, max_tokens, threads);
}

}  // namespace sb
