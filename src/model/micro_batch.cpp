#include "model/micro_batch.h"

#include "core/errors.h"

namespace sb {

MicroBatch cut_piece(const MicroBatch& sequence, int64_t begin, int64_t end) {
  SB_CHECK(sequence.sequences() == 1 && !sequence.is_piece() && 0 <= begin && begin < end && end <= sequence.size(),
           "tokens {} to {} of {} in {} sequences", begin, end, sequence.size(), sequence.sequences());
  const auto part = [&](const auto& values) {
    // Stages in the middle of a pipeline may do without some.
    return values.empty() ? values : std::decay_t<decltype(values)>(values.begin() + begin, values.begin() + end);
  };
  MicroBatch piece;
  piece.tokens = part(sequence.tokens);
  piece.positions = part(sequence.positions);
  piece.labels = part(sequence.labels);
  piece.weights = part(sequence.weights);
  piece.sources = part(sequence.sources);
  piece.cu_seqlens.push_back(static_cast<int32_t>(end - begin));
  piece.sequence_ids = sequence.sequence_ids;
  piece.dropout_key = sequence.dropout_key;
  piece.budgets = sequence.budgets;
  piece.piece_begin = begin;
  piece.piece_length = sequence.size();
  return piece;
}

}  // namespace sb
