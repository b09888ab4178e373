#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "eval/cached_attention.h"
#include "eval/sampling.h"
#include "model/stage/stage.h"

namespace sb {

struct GenerationOptions {
  SamplingOptions sampling;
  int64_t max_new_tokens = 64;
  std::vector<int32_t> stop_tokens;  // generation of a sequence ends after one of these (it is not returned)
  // Asked after every token of a prompt that would go on; false ends it there. Empty: it goes on.
  std::function<bool(size_t prompt, int32_t token)> goes_on;
};

// Continues prompts with a model held by one stage that was built on `attention`. Up to attention's number of sequences
// run together; a result does not depend on what it shares a batch with.
class Generator {
 public:
  Generator(Stage& stage, CachedAttention& attention, int batch, int64_t capacity);

  // progress(prompts finished, prompts) is called as they finish; may be empty. UserError for an empty prompt, for one
  // that leaves no room, or for a token outside the vocabulary.
  std::vector<std::vector<int32_t>> generate(const Exec& exec, const std::vector<std::vector<int32_t>>& prompts,
                                             const GenerationOptions& options,
                                             const std::function<void(size_t, size_t)>& progress = {});

 private:
  struct Sequence {
    size_t prompt;
    int cache;
    int32_t next;
    int64_t position;
  };
  MicroBatch batch_of(const std::vector<int32_t>& tokens, int64_t first_position) const;
  int32_t choose(const Exec& exec, int64_t row, const GenerationOptions& options, size_t prompt, int64_t position);

  Stage& stage_;
  CachedAttention& attention_;
  int batch_;
  int64_t capacity_;
  Arena logits_memory_;
  TensorView logits_;  // of one row
};

}  // namespace sb
