#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>

#include "balance/rank_tuner.h"
#include "balance/tuning.h"
#include "core/errors.h"

namespace sb {
namespace {

constexpr double kExactlyReached = 1e-9;

}  // namespace

TuningResult tune_optimal(const TuningInput& input, const TuningOptions& options) {
  const int ranks = input.batches.ranks();
  int64_t variables = 0;
  for (int r = 0; r < ranks; ++r) variables += input.batches.micro_batches(r) * input.cost.stages();
  const RankTunerLimits limits = rank_tuner_limits(variables);

  std::vector<std::unique_ptr<RankTuner>> tuners(static_cast<size_t>(ranks));
  const auto each_rank = [&](const auto& body) {
    if (input.pool != nullptr && ranks >= 8) {
      input.pool->parallel_for(ranks, std::max(1, ranks / 16), [&](int64_t begin, int64_t end, int) {
        for (int64_t r = begin; r < end; ++r) body(static_cast<size_t>(r));
      });
    } else {
      for (size_t r = 0; r < tuners.size(); ++r) body(r);
    }
  };
  each_rank([&](size_t r) { tuners[r] = std::make_unique<RankTuner>(input, static_cast<int>(r), limits); });

  TuningResult result;
  double base_makespan = 0;
  for (const auto& tuner : tuners) {
    result.fastest = std::max(result.fastest, tuner->fastest());
    base_makespan = std::max(base_makespan, tuner->base_makespan());
  }
  // Relaxed optimum of all ranks at a deadline: total gain and what more time is worth.
  const auto relaxed = [&](double deadline) {
    each_rank([&](size_t r) { tuners[r]->relax(deadline); });
    std::pair<double, double> sum{0, 0};
    for (const auto& tuner : tuners) {
      sum.first += tuner->relaxed_gain();
      sum.second += tuner->price();
    }
    return sum;
  };
  const auto rounded = [&](double deadline) {
    each_rank([&](size_t r) { tuners[r]->round(deadline); });
    double gain = 0;
    for (const auto& tuner : tuners) gain += tuner->gain();
    return gain;
  };

  double deadline = result.fastest;
  double bound = 0, gain = 0;
  if (options.target != kEqualCoverage) {
    deadline += options.target * std::max(0.0, base_makespan - deadline);
    bound = relaxed(deadline).first;
    gain = rounded(deadline);
  } else {
    // The smallest deadline whose gain reaches the base. The relaxed gain is concave in the deadline, so Newton steps
    // from the left never pass it; what rounding loses is then added to the aim.
    const double base = input.curves.base_total();
    double aim = base;
    for (int attempt = 0; attempt < limits.attempts; ++attempt) {
      for (int step = 0; step < limits.newton_steps; ++step) {
        const auto [value, price] = relaxed(deadline);
        bound = value;
        if (value >= aim * (1 - kExactlyReached) || price <= 0 || deadline >= base_makespan) break;
        deadline = std::min(base_makespan, deadline + std::max((aim - value) / price, deadline * 1e-6));
      }
      gain = rounded(deadline);
      if (gain >= base || deadline >= base_makespan) break;
      aim += 1.2 * (base - gain) + base * 1e-7;
    }
  }
  result.budgets = base_budgets(input.cost.spec(), input.sequences, input.cost.layers());
  // Base budgets where rounding could not reach them within the base makespan: the plan they belong to is as good.
  if (options.target != kEqualCoverage || gain >= input.curves.base_total() * (1 - 1e-12))
    for (const auto& tuner : tuners) tuner->write(result.budgets);
  else
    deadline = base_makespan;
  double tokens = 0;
  for (const Sequence& sequence : input.sequences) tokens += static_cast<double>(sequence.tokens);
  const double whole = tokens * input.cost.layers();
  result.deadline = deadline;
  result.mean_coverage = gain / whole;
  result.relaxed_bound = bound / whole;
  return result;
}

}  // namespace sb
