#include "plan/planner/step_planner.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/errors.h"
#include "plan/planner/balance_state.h"

namespace sb {

void InOrderPlanner::announce(int64_t step, std::vector<Sequence> sequences) {
  const auto count = static_cast<int64_t>(sequences.size());
  SB_USER_CHECK(count >= dp_,
                "batch.global_batch_size {} is below parallel.dp {}: some ranks would have nothing to do; raise it, or "
                "lower parallel.dp",
                count, dp_);
  plan_ = {};
  plan_.step = step;
  plan_.layers = layers_;
  for (int64_t rank = 0; rank < dp_; ++rank) {
    const int64_t begin = count * rank / dp_, end = count * (rank + 1) / dp_;
    plan_rank(std::span(sequences).subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin)),
              plan_.ranks.emplace_back());
  }
}

void InOrderPlanner::plan_rank(std::span<const Sequence> sequences, PlannedRank& rank) const {
  if (cut_.tokens == 0) {
    add_whole(sequences, rank);
    return;
  }
  size_t waiting = 0, longest = 1;  // short ones since the last that was cut
  for (size_t i = 0; i < sequences.size(); ++i) {
    const Sequence& sequence = sequences[i];
    if (sequence.tokens <= cut_.tokens) continue;
    add_whole(sequences.subspan(waiting, i - waiting), rank);
    waiting = i + 1;
    const std::vector<Piece> pieces = cut_sequence(sequence.tokens, cut_.tokens, cut_.edge);
    longest = std::max(longest, pieces.size());
    for (const Piece& piece : pieces) {
      PlannedMicroBatch& micro_batch = rank.micro_batches.emplace_back();
      micro_batch.sequences = {sequence.id};
      micro_batch.tokens = piece.end - piece.begin;
      micro_batch.begin = piece.begin;
      micro_batch.end = piece.end;
    }
  }
  add_whole(sequences.subspan(waiting), rank);
  if (cut_.ahead) rank.ahead = static_cast<int>(longest);
}

void InOrderPlanner::add_whole(std::span<const Sequence> sequences, PlannedRank& rank) const {
  std::vector<int64_t> lengths, ids;
  for (const Sequence& sequence : sequences) {
    lengths.push_back(sequence.tokens);
    ids.push_back(sequence.id);
  }
  PackingLimits limits = limits_;
  if (cut_.tokens > 0) limits.max_tokens = std::min(limits.max_tokens, cut_.tokens);
  for (const std::vector<int>& chosen : pack_in_order(lengths, ids, limits)) {
    PlannedMicroBatch& micro_batch = rank.micro_batches.emplace_back();
    for (const int i : chosen) {
      micro_batch.sequences.push_back(ids[static_cast<size_t>(i)]);
      micro_batch.tokens += lengths[static_cast<size_t>(i)];
    }
  }
}

Plan InOrderPlanner::next() {
  SB_CHECK(!plan_.ranks.empty(), "no step is announced");
  return std::exchange(plan_, {});
}

void InOrderPlanner::learn(const StepMeasurement& measurement) {
  observe_coverage(
      measurement.coverage, block_, [&](int64_t, int) { return budget_; }, coverage_);
}

std::string InOrderPlanner::state() const {
  if (coverage_.curves().empty()) return {};
  BalanceState state;  // of step 0: nothing else was learned
  state.coverage = coverage_;
  return write_balance_states({state});
}

void InOrderPlanner::restore_state(const std::string& state) {
  if (!state.empty()) coverage_ = parse_balance_states(state, "checkpoint").back().coverage;
}

void observe_coverage(const std::vector<MeasuredCoverage>& samples, int64_t block,
                      const std::function<int64_t(int64_t tokens, int layer)>& used_budget,
                      CoverageStatistics& statistics) {
  constexpr double kOne = 1e6;
  for (const MeasuredCoverage& measured : samples) {
    const std::vector<int64_t> budgets = coverage_grid(measured.tokens, static_cast<int>(block));
    std::vector<int64_t> ppm;
    for (const double share : measured.sample.curve) ppm.push_back(std::llround(share * kOne));
    statistics.observe(measured.layer, measured.tokens, budgets, ppm, used_budget(measured.tokens, measured.layer),
                       std::llround(measured.sample.held * kOne));
  }
}

}  // namespace sb
