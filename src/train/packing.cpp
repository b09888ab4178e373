#include "train/packing.h"

#include <algorithm>
#include <numeric>

#include "attention/most_sequences.h"
#include "core/errors.h"
#include "parallel/pipeline.h"
#include "parallel/ring/context_layout.h"
#include "plan/chunking.h"
#include "train/make_planner.h"

namespace sb {

PackingLimits packing_limits(const BatchOptions& options, int64_t longest, int cp) {
  PackingLimits limits;
  limits.max_tokens = options.micro_batch_tokens > 0 ? options.micro_batch_tokens
                                                     : longest * std::max<int64_t>(1, options.micro_batch_sequences);
  SB_USER_CHECK(limits.max_tokens >= longest,
                "batch.micro_batch_tokens is {} but sequences may have {} tokens: raise it, or lower "
                "data.max_sequence_length",
                limits.max_tokens, longest);
  const int64_t wanted =
      std::min(options.micro_batch_sequences > 0 ? options.micro_batch_sequences : options.global_batch_size,
               options.global_batch_size);
  // No micro-batch is larger than this, so memory need not be planned for more.
  limits.max_tokens = std::min(limits.max_tokens, longest * wanted);
  limits.max_sequences = std::min(wanted, most_packed_sequences(limits.max_tokens / cp));
  return limits;
}

PackingLimits run_packing(const RunConfig& config, int64_t longest) {
  const int64_t chunk = config.balance.chunk;
  if (chunk <= 0) return packing_limits(config.batch, longest, config.parallel.cp);
  PackingLimits limits = packing_limits(config.batch, std::min(longest, chunk), config.parallel.cp);
  limits.max_tokens = std::min(limits.max_tokens, chunk);
  return limits;
}

int64_t most_sequences(const RunConfig& config, const PackingLimits& limits) {
  if (!wants_balancing(config.balance)) return limits.max_sequences;
  constexpr int64_t kGathered = 4;
  const int64_t most = config.parallel.cp == 1 ? config.batch.global_batch_size : kGathered * limits.max_sequences;
  return std::min(
      {most, config.batch.global_batch_size, most_packed_sequences(limits.max_tokens / config.parallel.cp)});
}

int64_t most_rank_tokens(const RunConfig& config, const PackingLimits& limits) {
  return ContextLayout::most_tokens(config.parallel.cp, config.attention.selection.block, limits.max_tokens,
                                    most_sequences(config, limits));
}

int64_t smallest_piece(const RunConfig& config) {
  const int64_t chunk = config.balance.chunk;
  if (chunk >= 0) return chunk;
  if (config.parallel.pp == 1) return 0;
  return std::ranges::min(chunk_sizes({ChunkOptions::kAutomatic, {}}, piece_edge(attention_spec(config))));
}

std::vector<int64_t> kept_tokens(const RunConfig& config, const PackingLimits& limits) {
  std::vector<int64_t> kept;
  if (config.balance.chunk != BalanceOptions::kAutomaticChunk) return kept;
  const int stages = static_cast<int>(config.parallel.pp);
  for (int stage = 0; stage < stages; ++stage) kept.push_back(Pipeline::slots(stage, stages) * limits.max_tokens);
  return kept;
}

int64_t split_backward_tokens(const RunConfig& config, int64_t hidden_size, int64_t most_rank_tokens) {
  const ParallelOptions& parallel = config.parallel;
  if (config.balance.chunk == 0 || !splits_backward(static_cast<int>(parallel.pp), static_cast<int>(parallel.tp),
                                                    config.lora_config().enabled(), hidden_size))
    return 0;
  if (config.balance.chunk > 0) return most_rank_tokens;
  return std::min(most_rank_tokens,
                  std::ranges::max(chunk_sizes({ChunkOptions::kAutomatic, {}}, piece_edge(attention_spec(config)))));
}

std::vector<float> target_weights(BatchOptions::Loss loss, std::span<const int64_t> valid_targets) {
  const int64_t targets = std::accumulate(valid_targets.begin(), valid_targets.end(), int64_t{0});
  const auto sequences = std::count_if(valid_targets.begin(), valid_targets.end(), [](int64_t n) { return n > 0; });
  std::vector<float> weights;
  for (const int64_t own : valid_targets) {
    const double share = loss == BatchOptions::Loss::token_mean
                             ? static_cast<double>(targets)
                             : static_cast<double>(sequences) * static_cast<double>(own);
    weights.push_back(own > 0 ? static_cast<float>(1.0 / share) : 0.0f);
  }
  return weights;
}

MicroBatch make_micro_batch(std::span<const TokenSequence> sequences, std::span<const int> chosen,
                            std::span<const float> weights, int64_t vocab_size) {
  MicroBatch batch;
  for (const int index : chosen) {
    const TokenSequence& sequence = sequences[static_cast<size_t>(index)];
    SB_CHECK(sequence.labels.size() == sequence.tokens.size(), "sequence {}: {} tokens, {} labels", sequence.id,
             sequence.tokens.size(), sequence.labels.size());
    for (size_t i = 0; i < sequence.tokens.size(); ++i) {
      const int32_t token = sequence.tokens[i], label = sequence.labels[i];
      const bool counts = label != kIgnoredLabel;
      SB_USER_CHECK(token >= 0 && token < vocab_size && (!counts || (label >= 0 && label < vocab_size)),
                    "sequence {}: token {} at position {} is outside the model's vocabulary of {}; was the data made "
                    "with another tokenizer? `sparsebalance data check` finds all such tokens",
                    sequence.id, token >= 0 && token < vocab_size ? label : token, i, vocab_size);
      batch.positions.push_back(static_cast<int32_t>(i));
      batch.weights.push_back(counts ? weights[static_cast<size_t>(index)] : 0.0f);
    }
    batch.tokens.insert(batch.tokens.end(), sequence.tokens.begin(), sequence.tokens.end());
    batch.labels.insert(batch.labels.end(), sequence.labels.begin(), sequence.labels.end());
    batch.cu_seqlens.push_back(static_cast<int32_t>(batch.tokens.size()));
    batch.sequence_ids.push_back(sequence.id);
  }
  return batch;
}

}  // namespace sb
