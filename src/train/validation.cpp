#include <chrono>
#include <numeric>

#include "data/synthetic/synthetic.h"
#include "train/sums/step_sums.h"
#include "train/trainer.h"

namespace sb {

bool Trainer::validation_due() const {
  return due_after(state_.step, config_.train.validation_steps, config_.train.max_steps);
}

std::optional<ValidationReport> Trainer::validate() {
  const ValidationSet& set = parts_.validation;
  if (set.source == nullptr || set.sequences == 0) return std::nullopt;
  const auto begin = std::chrono::steady_clock::now();
  const auto span = trace_.span("validation", state_.step);
  // Looking must not change what training does next.
  const Selector::Thresholds kept = parts_.sparse ? parts_.sparse->thresholds() : Selector::Thresholds();
  const std::optional<LossSums> all = evaluate(/*later_chunk_tokens_only=*/false);
  if (!all) return std::nullopt;
  const LossSums& sums = *all;
  ValidationReport report;
  report.step = state_.step;
  report.sequences = set.sequences;
  report.loss = sums.targets > 0 ? sums.nll / static_cast<double>(sums.targets) : 0.0;
  report.accuracy = accuracy(sums);
  if (set.recall_chunk > 0) {
    const std::optional<LossSums> later = evaluate(/*later_chunk_tokens_only=*/true);
    if (!later) return std::nullopt;
    report.recall = accuracy(*later);
  }
  if (parts_.sparse) {
    parts_.sparse->set_thresholds(kept);
    parts_.sparse->take_report();
  }
  time_left_.validation(std::chrono::steady_clock::now() - begin);
  if (log_) log_->validation(report);
  return report;
}

// Nothing when asked to stop on the way. The data-parallel ranks take micro-batches in turn; the last round may leave
// some without one.
std::optional<LossSums> Trainer::evaluate(bool later_chunk_tokens_only) {
  const ValidationSet& set = parts_.validation;
  LossSums sums;
  std::vector<int64_t> lengths, ids;
  for (int64_t i = 0; i < set.sequences; ++i) {
    lengths.push_back(set.source->length(static_cast<uint64_t>(i)));
    ids.push_back(i);
  }
  const std::vector<std::vector<int>> packed = pack_in_order(lengths, ids, limits_);
  const auto ranks = static_cast<size_t>(config_.parallel.dp);
  for (size_t round = 0; round < packed.size(); round += ranks) {
    if (any_rank(parts_.stop_requested())) return std::nullopt;
    const size_t own = round + static_cast<size_t>(model_->grid().dp_rank());
    if (own >= packed.size()) continue;
    std::vector<TokenSequence> sequences;
    for (const int position : packed[own]) {
      sequences.push_back(set.source->read(static_cast<uint64_t>(position)));
      if (!later_chunk_tokens_only) continue;
      std::vector<int32_t>& labels = sequences.back().labels;
      const auto length = static_cast<int64_t>(labels.size());
      for (int64_t i = 0; i < length; ++i)
        if (chunk_recall_token(i, length, set.recall_chunk) < 3) labels[static_cast<size_t>(i)] = kIgnoredLabel;
    }
    std::vector<int> all(sequences.size());
    std::iota(all.begin(), all.end(), 0);
    const std::vector<float> weights(sequences.size(), 1.0f);
    MicroBatch batch = make_micro_batch(sequences, all, weights, parts_.model.vocab_size);
    if (config_.train.validation_attention == TrainOptions::ValidationAttention::dense && parts_.sparse) {
      // A budget of all its tokens makes a sequence dense.
      for (int layer = 0; layer < parts_.model.layers; ++layer)
        for (const TokenSequence& sequence : sequences)
          batch.budgets.push_back(static_cast<int32_t>(sequence.tokens.size()));
    }
    sums += model_->evaluate(exec_, own_part(std::move(batch)));
  }
  return sum_over_ranks(*world_, sums);
}

}  // namespace sb
