#pragma once

#include <cstdint>
#include <vector>

namespace sb {

// Sequences packed back to back, or one piece of a sequence, run through a stage at once; no padding.
struct MicroBatch {
  std::vector<int32_t> tokens;
  std::vector<int32_t> positions;  // of every token in its own sequence
  std::vector<int32_t> labels;     // next token, or kIgnoredLabel
  // Weight of every token's loss in the step's loss: 1 / (valid targets of the global batch) for token_mean,
  // 1 / (sequences · valid targets of the sequence) for sequence_mean, 0 where the label does not count. The step's
  // loss is the plain sum over all micro-batches, whatever the packing.
  std::vector<float> weights;
  std::vector<int32_t> cu_seqlens{0};
  // Where several ranks share the sequences: cu_seqlens of the whole ones; empty otherwise.
  std::vector<int32_t> whole_cu_seqlens;
  std::vector<int64_t> sequence_ids;
  // Of every token, which of several sources it is from, where losses are wanted by source; empty: they are not.
  std::vector<int32_t> sources;
  uint64_t dropout_key = 0;  // of the step (dropout_key of ops/dropout.h), where adapters drop elements
  // Attention budgets [layer · sequences + sequence] in keys per query; empty: the configured one everywhere.
  std::vector<int32_t> budgets;
  // A piece: its first token in its sequence, and the length of that; 0: whole sequences.
  int64_t piece_begin = 0, piece_length = 0;

  bool is_piece() const { return piece_length > 0; }
  int64_t size() const { return static_cast<int64_t>(tokens.size()); }
  // With the tokens of other ranks that share the sequences.
  int64_t whole_size() const { return whole_cu_seqlens.empty() ? size() : whole_cu_seqlens.back(); }
  int sequences() const { return static_cast<int>(cu_seqlens.size()) - 1; }
};

// Tokens [begin, end) of a micro-batch that holds one sequence. Positions, labels and weights stay those of the whole,
// so that the sum of the pieces' losses is the loss of the whole.
MicroBatch cut_piece(const MicroBatch& sequence, int64_t begin, int64_t end);

}  // namespace sb
