#include "plan/batching/pack_in_order.h"

#include "core/errors.h"

namespace sb {

std::vector<std::vector<int>> pack_in_order(std::span<const int64_t> lengths, std::span<const int64_t> ids,
                                            const PackingLimits& limits) {
  SB_CHECK(lengths.size() == ids.size(), "{} lengths, {} ids", lengths.size(), ids.size());
  SB_CHECK(limits.max_sequences > 0 && limits.max_tokens > 0, "limits {} sequences, {} tokens", limits.max_sequences,
           limits.max_tokens);
  std::vector<std::vector<int>> batches;
  int64_t tokens = 0;
  for (int i = 0; i < static_cast<int>(lengths.size()); ++i) {
    SB_USER_CHECK(lengths[i] <= limits.max_tokens,
                  "sequence {} has {} tokens but batch.micro_batch_tokens is {}: raise it, or lower "
                  "data.max_sequence_length",
                  ids[i], lengths[i], limits.max_tokens);
    const bool fits = !batches.empty() && tokens + lengths[i] <= limits.max_tokens &&
                      static_cast<int64_t>(batches.back().size()) < limits.max_sequences;
    if (!fits) {
      batches.emplace_back();
      tokens = 0;
    }
    batches.back().push_back(i);
    tokens += lengths[i];
  }
  return batches;
}

}  // namespace sb
