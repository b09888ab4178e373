#pragma once

#include <cstdint>
#include <span>

namespace sb {

struct SamplingOptions {
  double temperature = 0;  // 0: greedy
  double top_p = 1;        // smallest set of tokens that holds this probability
  uint64_t seed = 1;
};

// The next token. A pure function of the logits and (seed, stream, position): the same prompt gives the same text
// whatever else is in the batch. Greedy ties go to the lower id.
int32_t sample_token(std::span<const float> logits, const SamplingOptions& options, uint64_t stream, uint64_t position);

}  // namespace sb
