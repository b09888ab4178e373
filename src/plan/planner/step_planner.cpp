#include "plan/planner/step_planner.h"

#include <cmath>
#include <utility>

#include "core/errors.h"
#include "plan/planner/balance_state.h"

namespace sb {

void InOrderPlanner::announce(int64_t step, std::vector<Sequence> sequences) {
  const auto count = static_cast<int64_t>(sequences.size());
  SB_USER_CHECK(count >= dp_, "batch.global_batch_size {} is below parallel.dp {}: a rank would have nothing to do",
                count, dp_);
  plan_ = {};
  plan_.step = step;
  plan_.layers = layers_;
  for (int64_t rank = 0; rank < dp_; ++rank) {
    PlannedRank& planned = plan_.ranks.emplace_back();
    const int64_t begin = count * rank / dp_, end = count * (rank + 1) / dp_;
    std::vector<int64_t> lengths, ids;
    for (int64_t i = begin; i < end; ++i) {
      lengths.push_back(sequences[static_cast<size_t>(i)].tokens);
      ids.push_back(sequences[static_cast<size_t>(i)].id);
    }
    for (const std::vector<int>& chosen : pack_in_order(lengths, ids, limits_)) {
      PlannedMicroBatch& micro_batch = planned.micro_batches.emplace_back();
      for (const int i : chosen) {
        micro_batch.sequences.push_back(ids[static_cast<size_t>(i)]);
        micro_batch.tokens += lengths[static_cast<size_t>(i)];
      }
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
