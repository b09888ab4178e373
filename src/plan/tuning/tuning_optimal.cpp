#include <algorithm>
#include <memory>

#include "plan/batching/parallel_pieces.h"
#include "plan/tuning/price_tuner.h"
#include "plan/tuning/rank_tuner.h"
#include "plan/tuning/tuning.h"

namespace sb {
namespace {

// All ranks of a small step under one deadline, each solved exactly.
class StepTuner {
 public:
  StepTuner(const TuningInput& input, int64_t pivots)
      : input_(input), tuners_(static_cast<size_t>(input.batches.ranks())), failed_(tuners_.size(), 0) {
    each_rank([&](size_t r) { tuners_[r] = std::make_unique<RankTuner>(input, static_cast<int>(r), pivots); });
    for (const auto& tuner : tuners_) {
      fastest_ = std::max(fastest_, tuner->fastest());
      base_makespan_ = std::max(base_makespan_, tuner->base_makespan());
    }
  }

  double fastest() const { return fastest_; }
  double base_makespan() const { return base_makespan_; }

  // Every relaxed optimum so far was found; otherwise nothing else here has a meaning.
  bool solved() const { return std::ranges::find(failed_, 1) == failed_.end(); }
  // Relaxed optimum at a deadline; price() is then what more time is worth.
  double relax(double deadline) {
    each_rank([&](size_t r) { failed_[r] = static_cast<char>(!tuners_[r]->relax(deadline)); });
    return sum([](const RankTuner& tuner) { return tuner.relaxed_gain(); });
  }
  double price() const {
    return sum([](const RankTuner& tuner) { return tuner.price(); });
  }
  double round(double deadline) {
    each_rank([&](size_t r) { tuners_[r]->round(deadline); });
    return sum([](const RankTuner& tuner) { return tuner.gain(); });
  }
  void write(Budgets& budgets) const {
    for (const auto& tuner : tuners_) tuner->write(budgets);
  }

  // The smallest deadline whose gain reaches `base`; leaves its budgets rounded and returns it. Negative: none found.
  double reach(double base, double& bound, double& gain) {
    constexpr int kAttempts = 4;
    double deadline = fastest_, aim = base;
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
      deadline = reach_relaxed(deadline, aim, bound);
      if (!solved()) break;
      gain = round(deadline);
      if (gain >= base) return deadline;
      if (deadline >= base_makespan_) break;
      // What rounding loses is added to the aim.
      aim += 1.2 * (base - gain) + base * 1e-7;
    }
    return -1;
  }

 private:
  // The relaxed gain is concave in the deadline, so Newton steps from the left never pass it.
  double reach_relaxed(double deadline, double aim, double& bound) {
    constexpr int kDeadlines = 12;
    for (int step = 0; step < kDeadlines; ++step) {
      bound = relax(deadline);
      if (!solved()) break;
      const double slope = price();
      if (bound >= aim * (1 - 1e-9) || slope <= 0 || deadline >= base_makespan_) break;
      deadline = std::min(base_makespan_, deadline + std::max((aim - bound) / slope, deadline * 1e-6));
    }
    return deadline;
  }

  template <typename Body>
  void each_rank(const Body& body) {
    parallel_pieces(input_.pool, std::ssize(tuners_), [&](int64_t r, int) { body(static_cast<size_t>(r)); });
  }
  template <typename Value>
  double sum(const Value& value) const {
    double total = 0;
    for (const auto& tuner : tuners_) total += value(*tuner);
    return total;
  }

  const TuningInput& input_;
  std::vector<std::unique_ptr<RankTuner>> tuners_;
  std::vector<char> failed_;
  double fastest_ = 0, base_makespan_ = 0;
};

// False: not solved, nothing is written.
bool tune_exactly(const TuningInput& input, const TuningOptions& options, TuningResult& result, double& gain,
                  double& bound) {
  StepTuner step(input, options.pivots);
  result.fastest = step.fastest();
  if (options.target == kEqualCoverage) {
    result.deadline = step.reach(input.curves.base_total(), bound, gain);
  } else {
    result.deadline = step.fastest() + options.target * std::max(0.0, step.base_makespan() - step.fastest());
    bound = step.relax(result.deadline);
    if (step.solved()) gain = step.round(result.deadline);
  }
  if (!step.solved()) return false;
  if (result.deadline >= 0) {
    step.write(result.budgets);
  } else {
    // Rounding could not reach the base within the base makespan; the base budgets themselves do.
    result.deadline = step.base_makespan();
    gain = input.curves.base_total();
  }
  return true;
}

void tune_by_prices(const TuningInput& input, const TuningOptions& options, TuningResult& result, double& gain) {
  PriceTuner tuner(input);
  result.fastest = tuner.fastest();
  if (options.target != kEqualCoverage) {
    result.deadline = tuner.fastest() + options.target * std::max(0.0, tuner.base_makespan() - tuner.fastest());
    tuner.relax(result.deadline);
    gain = tuner.write(result.budgets, false);
    return;
  }
  const double base = input.curves.base_total();
  double aim = base * (1 + 1e-4);  // rounding loses a little
  result.deadline = tuner.fastest();
  constexpr int kAttempts = 3;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    result.deadline = tuner.reach(aim, result.deadline);
    // Rounded down where there is coverage to spare: then no rank passes the deadline.
    const bool spare = result.deadline == tuner.fastest();
    gain = tuner.write(result.budgets, !spare);
    if (spare && gain < base) gain = tuner.write(result.budgets, true);
    if (gain >= base) return;
    aim += 1.2 * (base - gain) + base * 1e-4;
  }
  result.budgets.assign(input.base.begin(), input.base.end());
  result.deadline = tuner.base_makespan();
  gain = base;
}

}  // namespace

TuningResult tune_optimal(const TuningInput& input, const TuningOptions& options) {
  // A linear programme a rank up to so many (micro-batch, stage) variables.
  constexpr int64_t kExactVariables = 96;
  int64_t variables = 0;
  for (int r = 0; r < input.batches.ranks(); ++r) variables += input.batches.micro_batches(r) * input.cost.stages();
  TuningResult result;
  result.budgets.assign(input.base.begin(), input.base.end());
  double bound = 0, gain = 0;
  const bool exact = variables <= kExactVariables && tune_exactly(input, options, result, gain, bound);
  if (!exact) {
    result.unsolved = variables <= kExactVariables;
    bound = 0;
    tune_by_prices(input, options, result, gain);
  }
  double tokens = 0;
  for (const Sequence& sequence : input.sequences) tokens += static_cast<double>(sequence.tokens);
  const double whole = tokens * input.cost.layers();
  result.mean_coverage = gain / whole;
  result.relaxed_bound = bound / whole;
  return result;
}

}  // namespace sb
