#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "data/sequence_source.h"
#include "model/micro_batch.h"
#include "plan/batching/pack_in_order.h"
#include "run/config/run_config.h"

namespace sb {

// How the sequences of a global batch become micro-batches and what each token's loss counts. Pure functions of plain
// data: the result of a step does not depend on the packing, only on the global batch.

// The limits that the configuration means, its zeros filled in; `longest` is the longest sequence there can be. A cap
// below it is a UserError, before the first step instead of in the middle of a run. `cp`: ranks that share a sequence.
PackingLimits packing_limits(const BatchOptions& options, int64_t longest, int cp = 1);
// The same as balance.chunk has it: longer sequences are cut, so that no micro-batch need be larger than a piece.
PackingLimits run_packing(const RunConfig& config, int64_t longest);
// The most sequences that any plan of the run has in a micro-batch. Balancing gathers short ones; where ranks share
// sequences each may add to what a rank has above its share, and their number is limited.
int64_t most_sequences(const RunConfig& config, const PackingLimits& limits);
// The most tokens of a micro-batch that one of the ranks which share it has.
int64_t most_rank_tokens(const RunConfig& config, const PackingLimits& limits);

// The smallest pieces that a plan of the run may cut sequences into; 0: they stay whole.
int64_t smallest_piece(const RunConfig& config);
// balance.chunk: auto. Of every stage: tokens of all micro-batches in flight, each counted as large as the largest of
// its step. The memory is that of whole sequences. Empty otherwise.
std::vector<int64_t> kept_tokens(const RunConfig& config, const PackingLimits& limits);

// Micro-batches of how many of a rank's tokens run backward in two halves: where sequences come in pieces, all that a
// step with pieces has.
int64_t split_backward_tokens(const RunConfig& config, int64_t hidden_size, int64_t most_rank_tokens);

// Weight of every counted target of each sequence in the step's loss, from the number of counted targets of all
// sequences of the global batch. Sequences without targets do not count; all zeros when no sequence has any.
std::vector<float> target_weights(BatchOptions::Loss loss, std::span<const int64_t> valid_targets);

// The chosen sequences back to back. `weights` has one entry a sequence of the global batch, as `chosen` counts them. A
// token or label outside the vocabulary is a UserError that names the sequence.
MicroBatch make_micro_batch(std::span<const TokenSequence> sequences, std::span<const int> chosen,
                            std::span<const float> weights, int64_t vocab_size);

}  // namespace sb
