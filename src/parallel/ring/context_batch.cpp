#include "parallel/ring/context_batch.h"

#include "core/errors.h"

namespace sb {

MicroBatch context_part(const MicroBatch& whole, const ContextLayout& layout, int rank) {
  SB_CHECK(layout.cu_seqlens().size() == whole.cu_seqlens.size() && layout.cu_seqlens().back() == whole.size(),
           "a layout of {} tokens for a micro-batch of {}", layout.cu_seqlens().back(), whole.size());
  MicroBatch part;
  for (const int32_t token : layout.tokens(rank)) {
    part.tokens.push_back(whole.tokens[token]);
    part.positions.push_back(whole.positions[token]);
    part.labels.push_back(whole.labels[token]);
    part.weights.push_back(whole.weights[token]);
  }
  part.cu_seqlens = layout.local_cu_seqlens(rank);
  part.whole_cu_seqlens = whole.cu_seqlens;
  part.sequence_ids = whole.sequence_ids;
  part.dropout_key = whole.dropout_key;
  part.budgets = whole.budgets;
  return part;
}

}  // namespace sb
