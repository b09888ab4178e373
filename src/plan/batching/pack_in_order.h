#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace sb {

struct PackingLimits {
  int64_t max_sequences = 1;  // per micro-batch
  int64_t max_tokens = 1;     // per micro-batch, never exceeded
};

// Indices into `lengths`, in order: a micro-batch is closed when the next sequence would break a limit. A sequence
// longer than max_tokens is a UserError (`ids` names it).
std::vector<std::vector<int>> pack_in_order(std::span<const int64_t> lengths, std::span<const int64_t> ids,
                                            const PackingLimits& limits);

}  // namespace sb
