#include <algorithm>
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
  if (parts_.sparse) parts_.sparse->take_report();
  time_left_.validation(std::chrono::steady_clock::now() - begin);
  if (log_) log_->validation(report);
  return report;
}

namespace {

// The indices of short sequences packed in order; then every longer one alone, which comes in pieces.
std::vector<std::vector<int>> pack_to_cut(std::span<const int64_t> lengths, const PackingLimits& limits) {
  std::vector<int64_t> fitting, places;
  std::vector<std::vector<int>> cut;
  for (int i = 0; i < static_cast<int>(lengths.size()); ++i) {
    if (lengths[static_cast<size_t>(i)] > limits.max_tokens) {
      cut.push_back({i});
      continue;
    }
    fitting.push_back(lengths[static_cast<size_t>(i)]);
    places.push_back(i);
  }
  std::vector<std::vector<int>> packed = pack_in_order(fitting, places, limits);
  for (std::vector<int>& batch : packed)
    for (int& member : batch) member = static_cast<int>(places[static_cast<size_t>(member)]);
  packed.insert(packed.end(), cut.begin(), cut.end());
  return packed;
}

}  // namespace

LossSums Trainer::evaluate_whole(MicroBatch batch) {
  if (batch.size() <= limits_.max_tokens) return model_->evaluate(exec_, own_part(std::move(batch)));
  LossSums sums;
  int slot = 0;
  for (int64_t begin = 0; begin < batch.size(); begin += config_.balance.chunk)
    sums += model_->evaluate(
        exec_, own_part(cut_piece(batch, begin, std::min(begin + config_.balance.chunk, batch.size()))), slot++);
  return sums;
}

std::optional<LossSums> Trainer::evaluate(bool later_chunk_tokens_only) {
  const ValidationSet& set = parts_.validation;
  Look look{*set.source, {}, {}, {}};
  for (int64_t i = 0; i < set.sequences; ++i) {
    look.positions.push_back(i);
    look.lengths.push_back(set.source->length(static_cast<uint64_t>(i)));
  }
  look.dense = config_.train.validation_attention == TrainOptions::ValidationAttention::dense;
  if (later_chunk_tokens_only)
    look.prepare = [&](TokenSequence& sequence) {
      const auto length = static_cast<int64_t>(sequence.labels.size());
      for (int64_t i = 0; i < length; ++i)
        if (chunk_recall_token(i, length, set.recall_chunk) < 3)
          sequence.labels[static_cast<size_t>(i)] = kIgnoredLabel;
    };
  return forward(look);
}

// Planes are selected by earlier steps, and the first one has none: a dense forward over the starts of some sequences
// gives them. They are those after the first batch, so that no token of that batch has a say in what others see.
void Trainer::first_look() {
  constexpr int64_t kTokens = 8 * kFirstLookTokens;
  Look look{parts_.source, {}, {}, {}};
  const auto first = static_cast<int64_t>(state_.position) + config_.batch.global_batch_size;
  for (int64_t position = first, tokens = 0; tokens < kTokens && position < first + kTokens; ++position) {
    look.positions.push_back(position);
    look.lengths.push_back(std::min(parts_.source.length(static_cast<uint64_t>(position)), kFirstLookTokens));
    tokens += look.lengths.back();
  }
  look.prepare = [](TokenSequence& sequence) {
    const auto kept = std::min<size_t>(sequence.tokens.size(), kFirstLookTokens);
    sequence.tokens.resize(kept);
    sequence.labels.resize(kept);
    if (kept > 0) sequence.labels.back() = kIgnoredLabel;
  };
  look.dense = true;
  look.interruptible = false;
  forward(look);
  parts_.sparse->take_report();
  learn_selection(parts_.sparse->take_observations());
  if (leads())
    parts_.console.text(fmt::format(
        "attention.score planes: chosen in a dense forward over {} sequences after the first batch, {} tokens",
        look.positions.size(), std::accumulate(look.lengths.begin(), look.lengths.end(), int64_t{0})));
}

// Nothing when asked to stop on the way. The data-parallel ranks take micro-batches in turn; the last round may leave
// some without one.
std::optional<LossSums> Trainer::forward(const Look& look) {
  LossSums sums;
  const std::vector<std::vector<int>> packed = pack_to_cut(look.lengths, limits_);
  const auto ranks = static_cast<size_t>(config_.parallel.dp);
  for (size_t round = 0; round < packed.size(); round += ranks) {
    if (look.interruptible && stop_agreed()) return std::nullopt;
    const size_t own = round + static_cast<size_t>(model_->grid().dp_rank());
    if (own >= packed.size()) continue;
    std::vector<TokenSequence> sequences;
    for (const int i : packed[own]) {
      sequences.push_back(look.source.read(static_cast<uint64_t>(look.positions[static_cast<size_t>(i)])));
      if (look.prepare) look.prepare(sequences.back());
    }
    std::vector<int> all(sequences.size());
    std::iota(all.begin(), all.end(), 0);
    const std::vector<float> weights(sequences.size(), 1.0f);
    MicroBatch batch = make_micro_batch(sequences, all, weights, parts_.model.vocab_size);
    if (look.dense && parts_.sparse) {
      // A budget of all its tokens makes a sequence dense.
      for (int layer = 0; layer < parts_.model.layers; ++layer)
        for (const TokenSequence& sequence : sequences)
          batch.budgets.push_back(static_cast<int32_t>(sequence.tokens.size()));
    }
    sums += evaluate_whole(std::move(batch));
  }
  return sum_over_ranks(*world_, sums);
}

}  // namespace sb
