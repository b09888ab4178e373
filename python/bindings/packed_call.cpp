#include "python/bindings/packed_call.h"

#include <algorithm>

#include "core/errors.h"

namespace sb::python {

SequenceTiles tiles_of(const SelectionConfig& config, const PackedCall& call, int sequence) {
  const auto at = static_cast<size_t>(sequence);
  return sequence_tiles(config, call.cu_seqlens[at + 1] - call.cu_seqlens[at],
                        call.budgets.empty() ? config.budget : call.budgets[at]);
}

float threshold_of(const PackedCall& call, int sequence) {
  return call.thresholds.empty() ? 0.0f : call.thresholds[static_cast<size_t>(sequence)];
}

void check_call(const SelectionConfig& config, const PackedCall& call) {
  const size_t sequences = call.cu_seqlens.size() - 1;
  SB_USER_CHECK(call.cu_seqlens.front() == 0 && std::ranges::is_sorted(call.cu_seqlens) &&
                    call.cu_seqlens.back() == call.operands.q.dim(0),
                "cu_seqlens must rise from 0 to the {} tokens of q", call.operands.q.dim(0));
  SB_USER_CHECK(call.budgets.empty() || call.budgets.size() == sequences, "{} budgets for {} sequences",
                call.budgets.size(), sequences);
  for (const int32_t budget : call.budgets)
    SB_USER_CHECK(budget > 0, "a budget of {} keys; at least 1 is needed", budget);
  SB_USER_CHECK(!config.learns_thresholds() || call.thresholds.empty() || call.thresholds.size() == sequences,
                "thresholds: {} for {} sequences; pattern mass takes one each", call.thresholds.size(), sequences);
}

}  // namespace sb::python
