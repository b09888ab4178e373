#include "parallel/ring/context_batch.h"

#include "core/errors.h"

namespace sb {

ContextLayout batch_layout(ContextPlacement placement, int ranks, int block, const MicroBatch& batch) {
  const int32_t up_to_piece[] = {0, static_cast<int32_t>(batch.piece_begin + batch.size())};
  return {placement, ranks, block, batch.is_piece() ? std::span<const int32_t>(up_to_piece) : batch.cu_seqlens};
}

MicroBatch context_part(const MicroBatch& whole, const ContextLayout& layout, int rank) {
  SB_CHECK(layout.cu_seqlens().size() == whole.cu_seqlens.size() &&
               layout.cu_seqlens().back() == whole.piece_begin + whole.size(),
           "a layout of {} tokens for a micro-batch of {}", layout.cu_seqlens().back(), whole.size());
  MicroBatch part;
  for (const int32_t held : layout.tokens(rank)) {
    if (held < whole.piece_begin) continue;
    const auto token = static_cast<size_t>(held - whole.piece_begin);
    part.tokens.push_back(whole.tokens[token]);
    part.positions.push_back(whole.positions[token]);
    part.labels.push_back(whole.labels[token]);
    part.weights.push_back(whole.weights[token]);
    if (!whole.sources.empty()) part.sources.push_back(whole.sources[token]);
  }
  if (whole.is_piece())
    part.cu_seqlens.push_back(static_cast<int32_t>(part.size()));
  else
    part.cu_seqlens = layout.local_cu_seqlens(rank);
  part.whole_cu_seqlens = whole.cu_seqlens;
  part.sequence_ids = whole.sequence_ids;
  part.dropout_key = whole.dropout_key;
  part.budgets = whole.budgets;
  part.piece_begin = whole.piece_begin;
  part.piece_length = whole.piece_length;
  return part;
}

}  // namespace sb
