#include "eval/generation.h"

#include <algorithm>
#include <numeric>

#include "core/errors.h"
#include "device/host_floats.h"

namespace sb {

Generator::Generator(Stage& stage, CachedAttention& attention, int batch, int64_t capacity)
    : stage_(stage),
      attention_(attention),
      batch_(batch),
      capacity_(capacity),
      logits_memory_(
          make_arena("logits", stage.config().vocab_size * dtype_bytes(stage.options().dtype), stage.options().device)),
      logits_(logits_memory_.allocate(stage.options().dtype, {1, stage.config().vocab_size})) {
  SB_CHECK(stage.first() && stage.last(), "generation needs the whole model on one stage");
}

// Nothing is predicted against a label: every label is ignored.
MicroBatch Generator::batch_of(const std::vector<int32_t>& tokens, int64_t first_position) const {
  MicroBatch batch;
  batch.tokens = tokens;
  batch.positions.resize(tokens.size());
  std::iota(batch.positions.begin(), batch.positions.end(), static_cast<int32_t>(first_position));
  batch.labels.assign(tokens.size(), kIgnoredLabel);
  batch.weights.assign(tokens.size(), 0.0f);
  batch.cu_seqlens = {0, static_cast<int32_t>(tokens.size())};
  batch.sequence_ids = {0};
  return batch;
}

int32_t Generator::choose(const Exec& exec, int64_t row, const GenerationOptions& options, size_t prompt,
                          int64_t position) {
  stage_.logits(exec, 0, row, row + 1, logits_);
  return sample_token(HostFloats(logits_).values(), options.sampling, prompt, static_cast<uint64_t>(position));
}

std::vector<std::vector<int32_t>> Generator::generate(const Exec& exec,
                                                      const std::vector<std::vector<int32_t>>& prompts,
                                                      const GenerationOptions& options,
                                                      const std::function<void(size_t, size_t)>& progress) {
  for (size_t i = 0; i < prompts.size(); ++i) {
    SB_USER_CHECK(!prompts[i].empty(), "prompt {} is empty; generation needs at least one token to start from", i);
    SB_USER_CHECK(options.max_new_tokens <= capacity_ - std::ssize(prompts[i]),
                  "prompt {} has {} tokens; with {} new ones it exceeds the limit of {} tokens; raise --max-tokens", i,
                  prompts[i].size(), options.max_new_tokens, capacity_);
    for (const int32_t token : prompts[i]) {
      SB_USER_CHECK(0 <= token && token < stage_.config().vocab_size,
                    "prompt {}: token {} is outside the vocabulary of {}", i, token, stage_.config().vocab_size);
    }
  }
  std::vector<std::vector<int32_t>> results(prompts.size());
  size_t finished = 0;
  // Whether the sequence goes on after its newest token.
  const auto accept = [&](const Sequence& sequence) {
    const bool stop =
        std::find(options.stop_tokens.begin(), options.stop_tokens.end(), sequence.next) != options.stop_tokens.end();
    if (!stop && options.max_new_tokens > 0) results[sequence.prompt].push_back(sequence.next);
    const bool more = !stop && std::ssize(results[sequence.prompt]) < options.max_new_tokens &&
                      (!options.goes_on || options.goes_on(sequence.prompt, sequence.next));
    if (!more && progress) progress(++finished, prompts.size());
    return more;
  };

  for (size_t first = 0; first < prompts.size(); first += static_cast<size_t>(batch_)) {
    attention_.clear();
    std::vector<Sequence> running;
    const size_t last = std::min(prompts.size(), first + static_cast<size_t>(batch_));
    for (size_t i = first; i < last; ++i) {
      const int cache = static_cast<int>(i - first);
      attention_.use({cache});
      const MicroBatch batch = batch_of(prompts[i], 0);
      stage_.forward(exec, batch, 0, {});
      Sequence sequence{i, cache, 0, std::ssize(prompts[i])};
      sequence.next = choose(exec, batch.size() - 1, options, i, sequence.position);
      if (accept(sequence)) running.push_back(sequence);
    }
    while (!running.empty()) {
      std::vector<int> caches;
      MicroBatch batch = batch_of({}, 0);
      batch.cu_seqlens = {0};
      batch.sequence_ids.clear();
      for (const Sequence& sequence : running) {
        caches.push_back(sequence.cache);
        batch.tokens.push_back(sequence.next);
        batch.positions.push_back(static_cast<int32_t>(sequence.position));
        batch.labels.push_back(kIgnoredLabel);
        batch.weights.push_back(0.0f);
        batch.cu_seqlens.push_back(static_cast<int32_t>(batch.tokens.size()));
        batch.sequence_ids.push_back(static_cast<int64_t>(sequence.prompt));
      }
      attention_.use(std::move(caches));
      stage_.forward(exec, batch, 0, {});
      std::vector<Sequence> still_running;
      for (size_t row = 0; row < running.size(); ++row) {
        Sequence sequence = running[row];
        ++sequence.position;
        sequence.next = choose(exec, static_cast<int64_t>(row), options, sequence.prompt, sequence.position);
        if (accept(sequence)) still_running.push_back(sequence);
      }
      running = std::move(still_running);
    }
  }
  return results;
}

}  // namespace sb
