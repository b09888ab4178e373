#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>

#include "balance/rank_tuner.h"
#include "balance/tuning.h"
#include "core/errors.h"

namespace sb {
namespace {

// All ranks of a step under one deadline.
class StepTuner {
 public:
  StepTuner(const TuningInput& input, const RankTunerLimits& limits)
      : input_(input), limits_(limits), tuners_(static_cast<size_t>(input.batches.ranks())) {
    each_rank([&](size_t r) { tuners_[r] = std::make_unique<RankTuner>(input, static_cast<int>(r), limits); });
    for (const auto& tuner : tuners_) {
      fastest_ = std::max(fastest_, tuner->fastest());
      base_makespan_ = std::max(base_makespan_, tuner->base_makespan());
    }
  }

  double fastest() const { return fastest_; }
  double base_makespan() const { return base_makespan_; }

  // Relaxed optimum at a deadline; price() is then what more time is worth.
  double relax(double deadline, bool roughly = false) {
    each_rank([&](size_t r) { tuners_[r]->relax(deadline, roughly); });
    return sum([](const RankTuner& tuner) { return tuner.relaxed_gain(); });
  }
  double price() const {
    return sum([](const RankTuner& tuner) { return tuner.price(); });
  }
  double round(double deadline, bool nearest) {
    each_rank([&](size_t r) { tuners_[r]->round(deadline, nearest); });
    return sum([](const RankTuner& tuner) { return tuner.gain(); });
  }
  void write(Budgets& budgets) const {
    for (const auto& tuner : tuners_) tuner->write(budgets);
  }

  // The smallest deadline whose gain reaches `base`; leaves its budgets rounded and returns it. Negative: none found.
  double reach(double base, double& bound, double& gain) {
    double deadline = fastest_, aim = base * (limits_.exact ? 1.0 : 1.0 + 2e-5);
    for (int attempt = 0; attempt < limits_.attempts; ++attempt) {
      deadline = limits_.exact ? reach_relaxed(deadline, aim, bound) : reach_priced(deadline, aim);
      gain = round(deadline, !limits_.exact);
      if (gain >= base) return deadline;
      if (deadline >= base_makespan_) break;
      // What rounding loses is added to the aim.
      aim += 1.2 * (base - gain) + base * (limits_.exact ? 1e-7 : 1e-4);
    }
    return -1;
  }

 private:
  // The relaxed gain is concave in the deadline, so Newton steps from the left never pass it.
  double reach_relaxed(double deadline, double aim, double& bound) {
    for (int step = 0; step < limits_.deadlines; ++step) {
      bound = relax(deadline);
      const double slope = price();
      if (bound >= aim * (1 - 1e-9) || slope <= 0 || deadline >= base_makespan_) break;
      deadline = std::min(base_makespan_, deadline + std::max((aim - bound) / slope, deadline * 1e-6));
    }
    return deadline;
  }

  // Prices only estimate the slope: steps that pass the aim are followed by ones between.
  double reach_priced(double start, double aim) {
    double low = start, low_gain = relax(start, true);
    double high = low_gain >= aim ? start : -1, high_gain = low_gain;
    double slope = price();
    for (int step = 1; step < limits_.deadlines && high != start; ++step) {
      const double wanted = high < 0
                                ? low + (slope > 0 ? 1.1 * (aim - low_gain) / slope : base_makespan_ - low)
                                : low + (high - low) * std::min(0.95, 1.05 * (aim - low_gain) / (high_gain - low_gain));
      const double next = std::clamp(wanted, low, base_makespan_);
      const double reached = relax(next, true);
      if (reached >= aim) {
        high = next;
        high_gain = reached;
        if (reached <= aim * (1 + 5e-4)) break;
      } else {
        if (next > low) slope = (reached - low_gain) / (next - low);
        low = next;
        low_gain = reached;
        if (low >= base_makespan_) break;
      }
    }
    // Beyond the last one that fell short, by as much as its slope says and half of that again.
    if (high < 0) high = std::min(base_makespan_, low + (slope > 0 ? 1.5 * (aim - low_gain) / slope : base_makespan_));
    relax(high);
    return high;
  }

  template <typename Body>
  void each_rank(const Body& body) {
    const auto ranks = static_cast<int64_t>(tuners_.size());
    if (input_.pool != nullptr && ranks >= 4) {
      input_.pool->parallel_for(ranks, std::max<int64_t>(1, ranks / 16), [&](int64_t begin, int64_t end, int) {
        for (int64_t r = begin; r < end; ++r) body(static_cast<size_t>(r));
      });
    } else {
      for (size_t r = 0; r < tuners_.size(); ++r) body(r);
    }
  }
  template <typename Value>
  double sum(const Value& value) const {
    double total = 0;
    for (const auto& tuner : tuners_) total += value(*tuner);
    return total;
  }

  const TuningInput& input_;
  RankTunerLimits limits_;
  std::vector<std::unique_ptr<RankTuner>> tuners_;
  double fastest_ = 0, base_makespan_ = 0;
};

}  // namespace

TuningResult tune_optimal(const TuningInput& input, const TuningOptions& options) {
  int64_t variables = 0;
  for (int r = 0; r < input.batches.ranks(); ++r) variables += input.batches.micro_batches(r) * input.cost.stages();
  const RankTunerLimits limits = rank_tuner_limits(variables);
  StepTuner step(input, limits);

  TuningResult result;
  result.fastest = step.fastest();
  double bound = 0, gain = 0;
  if (options.target == kEqualCoverage) {
    result.deadline = step.reach(input.curves.base_total(), bound, gain);
  } else {
    result.deadline = step.fastest() + options.target * std::max(0.0, step.base_makespan() - step.fastest());
    bound = step.relax(result.deadline);
    gain = step.round(result.deadline, false);
  }
  result.budgets.assign(input.base.begin(), input.base.end());
  if (result.deadline >= 0) {
    step.write(result.budgets);
  } else {
    // Rounding could not reach the base within the base makespan; the base budgets themselves do.
    result.deadline = step.base_makespan();
    gain = input.curves.base_total();
  }
  double tokens = 0;
  for (const Sequence& sequence : input.sequences) tokens += static_cast<double>(sequence.tokens);
  const double whole = tokens * input.cost.layers();
  result.mean_coverage = gain / whole;
  result.relaxed_bound = limits.exact ? bound / whole : 0.0;
  return result;
}

}  // namespace sb
