#pragma once

#include <cstdint>
#include <vector>

namespace sb {

// Sequences packed back to back, run through a stage at once; no padding.
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
  // Attention budgets [layer · sequences + sequence] in keys per query; empty: the configured one everywhere.
  std::vector<int32_t> budgets;

  int64_t size() const { return static_cast<int64_t>(tokens.size()); }
  int sequences() const { return static_cast<int>(cu_seqlens.size()) - 1; }
};

}  // namespace sb
