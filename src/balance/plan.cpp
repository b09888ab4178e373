#include "balance/plan.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/errors.h"

namespace sb {
namespace {

constexpr int64_t kOne = 1'000'000;
constexpr double kSmoothing = 0.2;

// Quarter octaves.
size_t length_class(int64_t tokens) {
  return static_cast<size_t>(std::max(0.0, std::floor(4.0 * std::log2(static_cast<double>(tokens)))));
}

// A candidate on its way to becoming a plan.
struct Draft {
  Batches batches;
  Orders orders;
  Budgets budgets;
  double makespan = 0;
  double relaxed_bound = 0;
};

class Planner {
 public:
  Planner(const CostModel& cost, const CoverageModel& coverage, std::span<const Sequence> sequences,
          const PlanOptions& options, ThreadPool* pool)
      : cost_(cost),
        coverage_(coverage),
        sequences_(sequences),
        options_(options),
        pool_(pool),
        schedules_(cost.stages(), cost.layout().warmup_depth),
        base_(base_budgets(cost.spec(), sequences, cost.layers())) {}

  const ScheduleSet& schedules() const { return schedules_; }
  const Budgets& base() const { return base_; }

  Draft batch(BatchingPolicy policy, std::span<const int64_t> budgets) {
    BatchingOptions batching = options_.batching;
    batching.policy = policy;
    batching.reorder = options_.ordering;
    Draft draft;
    draft.batches = make_batches(cost_, sequences_, budgets, batching);
    draft.orders = given_orders(draft.batches);
    draft.budgets = base_;
    schedules_.prepare(draft.batches);
    return draft;
  }

  void predict(Draft& draft) const {
    draft.makespan = step_makespan(cost_, schedules_, sequences_, draft.batches, draft.orders, draft.budgets);
  }

  const BudgetCurves& curves() {
    if (!curves_) curves_ = std::make_unique<BudgetCurves>(cost_, coverage_, sequences_, options_.tuning.p);
    return *curves_;
  }

  // The lowest budgets that p allows, [sequence · layers + layer].
  Budgets floors() {
    const auto layers = static_cast<size_t>(cost_.layers());
    Budgets budgets(base_.size());
    for (size_t i = 0; i < budgets.size(); ++i)
      budgets[i] = curves().vertices(static_cast<int>(i / layers), static_cast<int>(i % layers))[0].budget;
    return budgets;
  }

  // Order, fill, order again.
  void finish(Draft& draft) {
    const bool ordered = options_.ordering && cost_.stages() > 1;
    if (ordered) order(draft);
    if (options_.tuning.policy == TuningPolicy::off) {
      if (!ordered) predict(draft);
      return;
    }
    tune(draft);
    if (!ordered) return;
    // With the budgets of this order another one may be faster; then what it frees is shared out again.
    Draft again = draft;
    if (!order(again)) return;
    // In a large step the shorter order is taken as it is: the coverage is there already.
    if (sequences_.size() <= kSmallStep) tune(again);
    if (again.makespan < draft.makespan) draft = std::move(again);
  }

  // Improves every rank's order at the draft's budgets; true if the step became shorter.
  bool order(Draft& draft) {
    const int ranks = draft.batches.ranks();
    std::vector<double> makespan(static_cast<size_t>(ranks));
    OrderingLimits limits = options_.order_limits;
    // The whole step's trials, shared: many ranks get fewer each.
    const int64_t most = sequences_.size() <= kSmallStep ? 600'000 : 40'000;
    int64_t operations = 0;
    for (int r = 0; r < ranks; ++r) operations += 2 * cost_.stages() * draft.batches.micro_batches(r);
    limits.trials = std::min(limits.trials, std::max<int64_t>(4, most / operations));
    const auto one = [&](int r) {
      const PipelineTimes times = stage_times(cost_, sequences_, draft.batches, r, draft.budgets);
      std::vector<int64_t> tokens;
      for (int i = 0; i < draft.batches.micro_batches(r); ++i) {
        tokens.push_back(0);
        for (int member : draft.batches.members(draft.batches.first(r) + i))
          tokens.back() += sequences_[static_cast<size_t>(member)].tokens;
      }
      makespan[static_cast<size_t>(r)] = improve_order(schedules_.of(draft.batches.micro_batches(r)), times, tokens,
                                                       limits, draft.orders[static_cast<size_t>(r)]);
    };
    if (pool_ != nullptr && ranks >= 8)
      pool_->parallel_for(ranks, std::max(1, ranks / 16), [&](int64_t begin, int64_t end, int) {
        for (int64_t r = begin; r < end; ++r) one(static_cast<int>(r));
      });
    else
      for (int r = 0; r < ranks; ++r) one(r);
    const double slowest = *std::max_element(makespan.begin(), makespan.end());
    const bool better = slowest < draft.makespan * (1 - 1e-9);
    draft.makespan = slowest;
    return better;
  }

  void tune(Draft& draft) {
    if (options_.tuning.policy == TuningPolicy::off) return;
    const TuningInput input{cost_,        coverage_,  sequences_, curves(), draft.batches,
                            draft.orders, schedules_, base_,      pool_};
    TuningResult result = sb::tune(input, options_.tuning);
    draft.budgets = std::move(result.budgets);
    draft.relaxed_bound = result.relaxed_bound;
    predict(draft);
    // Rounding in a large step may pass the deadline by a fraction of a step: never beyond what the base budgets take.
    if (options_.tuning.policy != TuningPolicy::optimal || draft.makespan <= result.deadline * (1 + 1e-9)) return;
    const double base = step_makespan(cost_, schedules_, sequences_, draft.batches, draft.orders, base_);
    if (base >= draft.makespan) return;
    draft.budgets = base_;
    draft.makespan = base;
    draft.relaxed_bound = 0;
  }

 private:
  const CostModel& cost_;
  const CoverageModel& coverage_;
  std::span<const Sequence> sequences_;
  const PlanOptions& options_;
  ThreadPool* pool_;
  ScheduleSet schedules_;
  Budgets base_;
  std::unique_ptr<BudgetCurves> curves_;
};

}  // namespace

int64_t ExpectedBudgets::of(const AttentionSpec& spec, int64_t tokens) const {
  if (spec.always_dense(tokens)) return tokens;
  const size_t at = length_class(tokens);
  const int64_t ppm = at < ppm_.size() && ppm_[at] > 0 ? ppm_[at] : kOne;
  return std::clamp<int64_t>(static_cast<int64_t>(static_cast<double>(spec.budget) * static_cast<double>(ppm) / kOne),
                             1, tokens);
}

void ExpectedBudgets::observe(const AttentionSpec& spec, int64_t tokens, double mean_budget) {
  if (spec.always_dense(tokens)) return;
  const size_t at = length_class(tokens);
  if (at >= ppm_.size()) ppm_.resize(at + 1, 0);
  const double ratio = mean_budget / static_cast<double>(spec.budget) * kOne;
  const double before = ppm_[at] > 0 ? static_cast<double>(ppm_[at]) : static_cast<double>(kOne);
  ppm_[at] = std::llround((1 - kSmoothing) * before + kSmoothing * ratio);
}

Plan plan_step(int64_t step, const CostModel& cost, const CoverageModel& coverage, std::span<const Sequence> sequences,
               const PlanOptions& options, const ExpectedBudgets& expected, ThreadPool* pool) {
  Planner planner(cost, coverage, sequences, options, pool);
  const AttentionSpec& spec = cost.spec();
  std::vector<int64_t> budgets(sequences.size());
  for (size_t i = 0; i < budgets.size(); ++i) budgets[i] = spec.base_budget(sequences[i].tokens);
  Draft baseline = planner.batch(BatchingPolicy::in_order, budgets);
  planner.predict(baseline);
  const bool sab = options.batching.policy == BatchingPolicy::sab;
  const bool optimal = options.tuning.policy == TuningPolicy::optimal;
  std::vector<Draft> drafts;
  if (sab && optimal) {
    // Where the longest sequences decide, they will run at their floor: weights and first order of that case.
    Budgets floors = planner.floors();
    const auto layers = static_cast<ptrdiff_t>(cost.layers());
    for (size_t i = 0; i < budgets.size(); ++i) {
      const auto own = floors.begin() + static_cast<ptrdiff_t>(i) * layers;
      budgets[i] = std::accumulate(own, own + layers, int64_t{0}) / layers;
    }
    drafts.push_back(planner.batch(BatchingPolicy::sab, budgets));
    drafts.back().budgets = std::move(floors);
    planner.finish(drafts.back());
  }
  if (drafts.empty() || sequences.size() <= kSmallStep) {
    if (options.tuning.policy != TuningPolicy::off)
      for (size_t i = 0; i < budgets.size(); ++i) budgets[i] = expected.of(spec, sequences[i].tokens);
    drafts.push_back(options.batching.policy == BatchingPolicy::in_order
                         ? baseline
                         : planner.batch(options.batching.policy, budgets));
    planner.finish(drafts.back());
  }
  if (sab) drafts.push_back(baseline);
  const Draft& draft = *std::min_element(drafts.begin(), drafts.end(),
                                         [](const Draft& a, const Draft& b) { return a.makespan < b.makespan; });

  Plan plan;
  plan.step = step;
  plan.layers = cost.layers();
  plan.makespan_us = draft.makespan;
  plan.baseline_us = baseline.makespan;
  plan.relaxed_bound = draft.relaxed_bound;
  const CoverageSummary summary = summarize_coverage(coverage, spec, sequences, cost.layers(), draft.budgets);
  plan.mean_coverage = summary.mean;
  plan.min_coverage = summary.min;
  plan.worst_loss = summary.worst_loss;
  plan.base_coverage = summarize_coverage(coverage, spec, sequences, cost.layers(), planner.base()).mean;

  double most = 0, total = 0, most_rank = 0;
  int count = 0;
  const auto layers = static_cast<size_t>(cost.layers());
  plan.ranks.resize(static_cast<size_t>(draft.batches.ranks()));
  std::vector<double> stage_busy(static_cast<size_t>(cost.stages()), 0.0);
  for (int r = 0; r < draft.batches.ranks(); ++r) {
    PlannedRank& rank = plan.ranks[static_cast<size_t>(r)];
    const PipelineTimes times = stage_times(cost, sequences, draft.batches, r, draft.budgets);
    const auto& order = draft.orders[static_cast<size_t>(r)];
    rank.makespan_us = planner.schedules().of(times.micro_batches).makespan(times, order);
    rank.micro_batches.resize(order.size());
    double rank_busy = 0;
    for (size_t position = 0; position < order.size(); ++position) {
      PlannedMicroBatch& micro_batch = rank.micro_batches[position];
      const auto members = draft.batches.members(draft.batches.first(r) + order[position]);
      micro_batch.sequences.reserve(members.size());
      micro_batch.budgets.resize(members.size() * layers);
      for (size_t k = 0; k < members.size(); ++k) {
        const auto member = static_cast<size_t>(members[k]);
        micro_batch.sequences.push_back(sequences[member].id);
        micro_batch.tokens += sequences[member].tokens;
        for (size_t l = 0; l < layers; ++l)
          micro_batch.budgets[l * members.size() + k] = draft.budgets[member * layers + l];
      }
      double latency = 0;
      for (int s = 0; s < cost.stages(); ++s) {
        const size_t at = times.at(order[position], s);
        micro_batch.forward_us.push_back(times.forward[at]);
        micro_batch.backward_us.push_back(times.backward[at]);
        latency += times.forward[at] + times.backward[at];
        stage_busy[static_cast<size_t>(s)] += times.forward[at] + times.backward[at];
      }
      most = std::max(most, latency);
      rank_busy += latency;
      ++count;
    }
    total += rank_busy;
    most_rank = std::max(most_rank, rank_busy);
  }
  plan.imbalance = most / (total / count);
  plan.worker_imbalance = most_rank / (total / draft.batches.ranks());
  plan.bubble_share = 1.0 - total / (cost.stages() * draft.batches.ranks() * plan.makespan_us);
  plan.lower_bound_us = step_lower_bound(cost, sequences, layers, draft.budgets, stage_busy);
  return plan;
}

void learn_budgets(const Plan& plan, const AttentionSpec& spec, std::span<const Sequence> sequences,
                   ExpectedBudgets& expected) {
  // By id, in the order of the batch, so that the result does not depend on the arrangement.
  std::vector<std::pair<int64_t, double>> mean;
  mean.reserve(sequences.size());
  for (const PlannedRank& rank : plan.ranks)
    for (const PlannedMicroBatch& micro_batch : rank.micro_batches) {
      const size_t n = micro_batch.sequences.size();
      for (size_t k = 0; k < n; ++k) {
        double sum = 0;
        for (int l = 0; l < plan.layers; ++l) sum += micro_batch.budgets[static_cast<size_t>(l) * n + k];
        mean.emplace_back(micro_batch.sequences[k], sum / plan.layers);
      }
    }
  std::sort(mean.begin(), mean.end());
  for (const Sequence& sequence : sequences) {
    const auto found = std::lower_bound(mean.begin(), mean.end(), std::pair<int64_t, double>{sequence.id, -1.0});
    SB_CHECK(found != mean.end() && found->first == sequence.id, "sequence {} is not in the plan", sequence.id);
    expected.observe(spec, sequence.tokens, found->second);
  }
}

}  // namespace sb
