#pragma once

#include <cstdint>
#include <span>

#include "attention/attention.h"
#include "attention/select/selector.h"

namespace sb::python {

// One attention over packed sequences in memory that the caller owns: all of its arguments. Operands, lists and what is
// seen lie on the device that computes, the rest in host memory.
struct PackedCall {
  int layer = 0;
  AttentionShape shape{};
  std::span<const int32_t> cu_seqlens, budgets;  // budgets: one per sequence, or none
  std::span<uint8_t> lists;                      // what backward needs besides output and log-sum-exp
  AttentionOperands operands;
  // What selection goes by beyond the sequences at hand. `planes` where blocks are judged by planes: plane_words().
  // `thresholds` where they are learned: one per sequence, or none: 0 each.
  std::span<const uint32_t> planes;
  std::span<const float> thresholds;
};

// What a forward saw, for those who learn from it: where thresholds are learned, blocks selected and wanted of every
// sequence, [sequences, 2]; where blocks are judged by planes, the sums that planes are selected by: tokens, then
// squares of queries, sums and squares of keys, [kv_heads, head_dim] each.
struct PackedSeen {
  std::span<int64_t> counts;
  std::span<double> sums;
};

// UserError for arguments that do not go together.
void check_call(const SelectionConfig& config, const PackedCall& call);
SequenceTiles tiles_of(const SelectionConfig& config, const PackedCall& call, int sequence);
float threshold_of(const PackedCall& call, int sequence);

}  // namespace sb::python
