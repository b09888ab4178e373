#include "plan/plan.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "core/errors.h"
#include "plan/batching/parallel_pieces.h"
#include "plan/batching/partition.h"
#include "plan/tuning/piece_tuner.h"

namespace sb {
namespace {

constexpr int64_t kPlainBudget = 1'000'000;
constexpr double kBudgetSmoothing = 0.2;

// The class of a length.
size_t quarter_octave(int64_t tokens) {
  return static_cast<size_t>(std::max(0.0, std::floor(4.0 * std::log2(static_cast<double>(tokens)))));
}

// A candidate on its way to becoming a plan.
struct Candidate {
  Batches batches;
  Orders orders;
  Budgets budgets;
  std::vector<PipelineTimes> times;  // of every rank, at the budgets
  std::vector<double> rank_makespan;
  ScheduleSet schedules{1, 1};
  double makespan = 0;  // of the slowest
  double relaxed_bound = 0;
  bool unsolved = false;
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
        small_(sequences.size() <= kSmallStep),
        base_(base_budgets(cost.spec(), sequences, cost.layers())) {
    for (const Sequence& sequence : sequences) sequence_base_.push_back(cost.spec().base_budget(sequence.tokens));
  }

  // Pieces of a size that is given are what memory is planned for. Otherwise whole sequences may be faster.
  bool always_cut() const { return options_.chunk.on() && !options_.chunk.automatic(); }

  // As the sequences come, at base budgets.
  Candidate in_order() {
    Candidate candidate = batch(BatchingPolicy::in_order, sequence_base_);
    predict(candidate);
    return candidate;
  }

  // Sequences cut and packed, where that is asked for or may be faster.
  std::optional<Candidate> pieces() {
    if (!always_cut() && !(options_.chunk.automatic() && cost_.stages() > 1)) return std::nullopt;
    SB_USER_CHECK(options_.tuning.policy != TuningPolicy::anchor,
                  "tuning anchor evens out micro-batches, but pieces of sequences are even already: use tuning optimal "
                  "or none, or keep sequences whole");
    std::optional<Candidate> candidate = cut();
    SB_USER_CHECK(candidate || !always_cut(),
                  "pieces of {} tokens do not fit in the memory planned for them; make them smaller",
                  options_.chunk.tokens);
    return candidate;
  }

  // Adds whole sequences in the arrangements worth comparing, until it is clear that pieces, the candidate there may
  // be already, are faster.
  void add_whole(const Candidate& baseline, const ExpectedBudgets& expected, std::vector<Candidate>& candidates) {
    if (!candidates.empty() && candidates[0].makespan <= whole_bound()) return;
    const bool pieces_lead = !candidates.empty() && candidates[0].makespan <= baseline.makespan;
    const bool sab = options_.batching.policy == BatchingPolicy::sab;
    const bool optimal = options_.tuning.policy == TuningPolicy::optimal;
    if (!candidates.empty() || (sab && optimal)) {
      // Where the longest sequences decide, they will run at their floor: weights and first order of that case.
      const std::vector<int64_t> floors = optimal ? mean_floors() : sequence_base_;
      Candidate whole = batch(options_.batching.policy, floors);
      if (pieces_lead && hopeless(whole, floors, candidates[0].makespan)) return;
      if (sab && optimal) {
        finish(whole, floors);
        candidates.push_back(std::move(whole));
        // Other weights give much the same.
        constexpr double kBehind = 1.02;
        if (pieces_lead && candidates[1].makespan > kBehind * candidates[0].makespan) return;
      }
    }
    if (!(sab && optimal) || small_) candidates.push_back(at_expected_budgets(baseline, expected));
    // Not beside `anchor`, which may ask for a longer step.
    if (sab && options_.tuning.policy != TuningPolicy::anchor) candidates.push_back(baseline);
  }

  Plan write(int64_t step, const Candidate& candidate, double baseline) const;

 private:
  Candidate batch(BatchingPolicy policy, std::span<const int64_t> budgets) {
    BatchingOptions batching = options_.batching;
    batching.policy = policy;
    batching.reorder = options_.ordering;
    // Those that will be cut need not fit a micro-batch.
    if (always_cut() && batching.micro_batch_tokens > 0)
      for (const Sequence& sequence : sequences_)
        batching.micro_batch_tokens = std::max(batching.micro_batch_tokens, sequence.tokens);
    return candidate_of(make_batches(cost_, sequences_, budgets, batching));
  }

  // Nothing where memory has no room for it.
  std::optional<Candidate> cut() {
    BatchingOptions batching = options_.batching;
    batching.reorder = options_.ordering;
    auto batches = make_chunks(cost_, sequences_, ranks_of_sequences(), base_, batching, options_.chunk, pool_);
    if (!batches) return std::nullopt;
    Candidate candidate = candidate_of(std::move(*batches));
    predict(candidate);
    if (options_.tuning.policy == TuningPolicy::optimal && small_) tune(candidate);
    return candidate;
  }

  Candidate candidate_of(Batches batches) const {
    Candidate candidate;
    candidate.batches = std::move(batches);
    candidate.schedules = ScheduleSet(cost_.stages(), cost_.layout().warmup_depth);
    candidate.orders = given_orders(candidate.batches);
    candidate.budgets = base_;
    candidate.times.resize(static_cast<size_t>(candidate.batches.ranks()));
    candidate.rank_makespan.resize(candidate.times.size());
    candidate.schedules.prepare(candidate.batches);
    return candidate;
  }

  void predict(Candidate& candidate) const {
    each_rank(candidate, [&](int r) {
      PipelineTimes& times = candidate.times[static_cast<size_t>(r)];
      times = stage_times(cost_, sequences_, candidate.batches, r, candidate.budgets);
      return candidate.schedules.of(r).makespan(times, candidate.orders[static_cast<size_t>(r)]);
    });
  }

  const BudgetCurves& curves() {
    if (!curves_) curves_ = std::make_unique<BudgetCurves>(cost_, coverage_, sequences_, options_.tuning.p, pool_);
    return *curves_;
  }

  // The lowest budgets that p allows, on average over the layers that have a choice.
  std::vector<int64_t> mean_floors() {
    const BudgetCurves& all = curves();
    std::vector<int> open;
    for (int l = 0; l < (all.uniform() ? 1 : all.layers()); ++l)
      if (!cost_.spec().dense_layer(l)) open.push_back(l);
    std::vector<int64_t> floors(sequences_.size(), 0);
    for (size_t i = 0; i < floors.size(); ++i) {
      for (const int l : open) floors[i] += all.floor(static_cast<int>(i), l);
      floors[i] = open.empty() ? sequences_[i].tokens : floors[i] / std::ssize(open);
    }
    return floors;
  }

  // No plan of whole sequences is faster, whatever tuning does: the longest one goes through all stages.
  double whole_bound() {
    Budgets cheapest = base_;
    const AttentionSpec& spec = cost_.spec();
    const auto layers = static_cast<size_t>(cost_.layers());
    if (options_.tuning.policy == TuningPolicy::optimal)
      for (size_t i = 0; i < sequences_.size(); ++i) {
        const int64_t tokens = sequences_[i].tokens;
        if (spec.always_dense(tokens)) continue;
        const auto time = [&](int64_t budget) {
          const StageTime attention = cost_.attention(work_of(spec, tokens, budget));
          return attention.forward + attention.backward;
        };
        int64_t floor = std::min(tokens, spec.least_budget());
        // The curves know better; in a large step they are not made for this alone.
        if (small_) {
          floor = tokens;
          for (int l = 0; l < cost_.layers(); ++l)
            floor = std::min<int64_t>(floor, curves().floor(static_cast<int>(i), l));
        }
        // A dense sequence needs no selection.
        const int64_t budget = time(floor) <= time(tokens) ? floor : tokens;
        for (size_t l = 0; l < layers; ++l)
          if (!spec.dense_layer(static_cast<int>(l))) cheapest[i * layers + l] = static_cast<int32_t>(budget);
      }
    const std::vector<double> no_load(static_cast<size_t>(cost_.stages()), 0.0);
    return step_lower_bound(cost_, sequences_, layers, cheapest, no_load, pool_);
  }

  // Order, fill, order again. The first order is made for the budgets `first`, one per sequence.
  void finish(Candidate& candidate, std::span<const int64_t> first) {
    const bool ordered = options_.ordering && cost_.stages() > 1, tuned = options_.tuning.policy != TuningPolicy::none;
    if (ordered || !tuned) {
      if (tuned) set_budgets(candidate, first);
      predict(candidate);
    }
    if (ordered) order(candidate);
    if (!tuned) return;
    tune(candidate);
    if (!ordered) return;
    // With the budgets of this order another one may be faster. In a large step it is taken as it is: the coverage is
    // there already. In a small one what it frees is shared out again.
    if (!small_) {
      order_slowest(candidate);
      return;
    }
    Candidate again = candidate;
    if (!order(again)) return;
    tune(again);
    if (again.makespan < candidate.makespan) candidate = std::move(again);
  }

  // Whether these whole sequences, in an order that few trials found, are so far behind pieces that a longer search
  // does not catch up: at the lowest budgets that tuning may give (`floors`, one per sequence), or once they are tuned.
  bool hopeless(Candidate candidate, std::span<const int64_t> floors, double pieces) {
    constexpr double kBehind = 1.03;
    constexpr int64_t kFew = 8;
    set_budgets(candidate, floors);
    predict(candidate);
    if (options_.ordering) each_rank(candidate, [&](int r) { return order_rank(candidate, r, kFew); });
    if (candidate.makespan > kBehind * pieces) return true;
    if (options_.tuning.policy == TuningPolicy::none) return false;
    tune(candidate);
    return candidate.makespan > kBehind * pieces;
  }

  // Whole sequences, weighed at the budgets that tuning will probably choose.
  Candidate at_expected_budgets(const Candidate& baseline, const ExpectedBudgets& expected) {
    std::vector<int64_t> budgets = sequence_base_;
    if (options_.tuning.policy != TuningPolicy::none)
      for (size_t i = 0; i < budgets.size(); ++i) budgets[i] = expected.of(cost_.spec(), sequences_[i].tokens);
    const BatchingPolicy policy = options_.batching.policy;
    Candidate candidate = policy == BatchingPolicy::in_order ? baseline : batch(policy, budgets);
    finish(candidate, sequence_base_);
    return candidate;
  }

  void set_budgets(Candidate& candidate, std::span<const int64_t> budgets) const {
    const auto layers = static_cast<size_t>(cost_.layers());
    for (size_t i = 0; i < candidate.budgets.size(); ++i)
      if (!cost_.spec().dense_layer(static_cast<int>(i % layers)))
        candidate.budgets[i] = static_cast<int32_t>(budgets[i / layers]);
  }

  // body(rank) gives a rank's makespan.
  template <typename Body>
  void each_rank(Candidate& candidate, const Body& body) const {
    parallel_pieces(pool_, std::ssize(candidate.rank_makespan), [&](int64_t r, int) {
      candidate.rank_makespan[static_cast<size_t>(r)] = body(static_cast<int>(r));
    });
    candidate.makespan = *std::max_element(candidate.rank_makespan.begin(), candidate.rank_makespan.end());
  }

  // Improves the order of one rank at the candidate's times, by one of so many parts of the trials; its makespan then.
  double order_rank(Candidate& candidate, int r, int64_t part = 1) const {
    // The whole step's trials, shared: many ranks get fewer each.
    const int64_t most = small_ ? 200'000 : 40'000;
    const int64_t operations = 2 * cost_.stages() * candidate.batches.micro_batches();
    const int64_t trials = std::clamp<int64_t>(most / operations / part, 4, 400 / part);
    const PipelineTimes& times = candidate.times[static_cast<size_t>(r)];
    return improve_order(candidate.schedules.of(r), times, trials, candidate.orders[static_cast<size_t>(r)]);
  }

  // All ranks; true if the step became shorter.
  bool order(Candidate& candidate) const {
    const double before = candidate.makespan;
    each_rank(candidate, [&](int r) { return order_rank(candidate, r); });
    return candidate.makespan < before * (1 - 1e-9);
  }

  // Only the ranks that decide, until one of them stays the slowest.
  void order_slowest(Candidate& candidate) const {
    std::vector<char> done(candidate.rank_makespan.size(), 0);
    for (;;) {
      const auto slowest = std::max_element(candidate.rank_makespan.begin(), candidate.rank_makespan.end());
      const auto r = static_cast<size_t>(slowest - candidate.rank_makespan.begin());
      candidate.makespan = *slowest;
      if (done[r] != 0) return;
      done[r] = 1;
      *slowest = order_rank(candidate, static_cast<int>(r));
    }
  }

  // The data-parallel rank of every sequence where sequences are cut: pieces fill a pipeline whatever the longest one
  // is, so that only the ranks' work counts.
  std::vector<int> ranks_of_sequences() {
    const int dp = cost_.layout().dp;
    if (dp == 1) return std::vector<int>(sequences_.size(), 0);
    if (options_.batching.policy == BatchingPolicy::sab) {
      constexpr int64_t kTypical = 4096;
      const int64_t edge = piece_edge(cost_.spec());
      const int64_t chunk = options_.chunk.automatic() ? (kTypical + edge - 1) / edge * edge : options_.chunk.tokens;
      check_sequences(sequences_, dp, 0);
      PartitionProblem problem;
      problem.bins = dp;
      for (size_t i = 0; i < sequences_.size(); ++i) {
        problem.weight.push_back(cut_cost(cost_, sequences_[i], sequence_base_[i], chunk));
        problem.tokens.push_back(sequences_[i].tokens);
      }
      return balanced_partition(problem, options_.batching.trials);
    }
    const Batches whole = batch(options_.batching.policy, sequence_base_).batches;
    std::vector<int> rank(sequences_.size());
    for (int r = 0; r < dp; ++r)
      for (int i = whole.first(r); i < whole.first(r) + whole.micro_batches(r); ++i)
        for (const int member : whole.members(i)) rank[static_cast<size_t>(member)] = r;
    return rank;
  }

  void tune(Candidate& candidate) {
    const TuningInput input{
        cost_, coverage_, sequences_, curves(), candidate.batches, candidate.orders, candidate.schedules, base_, pool_};
    TuningResult result =
        candidate.batches.pieces.empty() ? sb::tune(input, options_.tuning) : tune_pieces(input, options_.tuning);
    candidate.budgets = std::move(result.budgets);
    candidate.relaxed_bound = result.relaxed_bound;
    candidate.unsolved = result.unsolved;
    predict(candidate);
    // Rounding in a large step may pass the deadline by a fraction of a step: never beyond what the base budgets take.
    if (options_.tuning.policy != TuningPolicy::optimal || candidate.makespan <= result.deadline * (1 + 1e-9)) return;
    const double base =
        step_makespan(cost_, candidate.schedules, sequences_, candidate.batches, candidate.orders, base_);
    if (base >= candidate.makespan) return;
    candidate.budgets = base_;
    candidate.relaxed_bound = 0;
    predict(candidate);
  }

  void write_rank(const Candidate& candidate, int r, PlannedRank& rank) const;
  void write_content(const Candidate& candidate, int index, PlannedMicroBatch& micro_batch) const;
  void write_balance(const Candidate& candidate, Plan& plan) const;

  const CostModel& cost_;
  const CoverageModel& coverage_;
  std::span<const Sequence> sequences_;
  const PlanOptions& options_;
  ThreadPool* pool_;
  bool small_;
  Budgets base_;                        // of every sequence and layer
  std::vector<int64_t> sequence_base_;  // of every sequence, in layers that have a choice
  std::unique_ptr<BudgetCurves> curves_;
};

Plan Planner::write(int64_t step, const Candidate& candidate, double baseline) const {
  Plan plan;
  plan.step = step;
  plan.layers = cost_.layers();
  plan.makespan_us = candidate.makespan;
  plan.baseline_us = baseline;
  plan.relaxed_bound = candidate.relaxed_bound;
  if (candidate.batches.no_room)
    plan.notes.push_back(
        fmt::format("batching {} found no arrangement within the limits of a micro-batch, so the sequences run in "
                    "order: raise the token limit, or make the global batch a multiple of dp",
                    options_.batching.name()));
  if (candidate.unsolved)
    plan.notes.emplace_back("tuning optimal reached its limit of simplex pivots and used prices instead");
  const CoverageSummary summary =
      summarize_coverage(coverage_, cost_.spec(), sequences_, cost_.layers(), candidate.budgets, pool_);
  plan.mean_coverage = summary.mean;
  plan.min_coverage = summary.min;
  plan.worst_loss = summary.worst_loss;
  plan.base_coverage = summary.base_mean;
  plan.ranks.resize(static_cast<size_t>(candidate.batches.ranks()));
  parallel_pieces(pool_, std::ssize(plan.ranks), [&](int64_t r, int) {
    write_rank(candidate, static_cast<int>(r), plan.ranks[static_cast<size_t>(r)]);
  });
  write_balance(candidate, plan);
  return plan;
}

void Planner::write_rank(const Candidate& candidate, int r, PlannedRank& rank) const {
  const PipelineTimes& times = candidate.times[static_cast<size_t>(r)];
  const std::vector<int>& order = candidate.orders[static_cast<size_t>(r)];
  rank.makespan_us = candidate.rank_makespan[static_cast<size_t>(r)];
  rank.micro_batches.resize(order.size());
  if (!candidate.batches.ahead.empty()) rank.ahead = candidate.batches.ahead[static_cast<size_t>(r)];
  for (size_t position = 0; position < order.size(); ++position) {
    PlannedMicroBatch& micro_batch = rank.micro_batches[position];
    write_content(candidate, candidate.batches.first(r) + order[position], micro_batch);
    const auto first = static_cast<ptrdiff_t>(times.at(order[position], 0)), last = first + cost_.stages();
    micro_batch.forward_us.assign(times.forward.begin() + first, times.forward.begin() + last);
    micro_batch.backward_us.assign(times.backward.begin() + first, times.backward.begin() + last);
  }
}

// Everything but its times; `index`: among those of all ranks.
void Planner::write_content(const Candidate& candidate, int index, PlannedMicroBatch& micro_batch) const {
  const auto layers = static_cast<size_t>(cost_.layers());
  const auto members = candidate.batches.members(index);
  const Piece piece = candidate.batches.piece(index);
  micro_batch.begin = piece.begin;
  micro_batch.end = piece.end;
  micro_batch.tokens = candidate.batches.tokens(sequences_, index);
  micro_batch.sequences.reserve(members.size());
  micro_batch.budgets.resize(members.size() * layers);
  for (size_t k = 0; k < members.size(); ++k) {
    const auto member = static_cast<size_t>(members[k]);
    micro_batch.sequences.push_back(sequences_[member].id);
    for (size_t l = 0; l < layers; ++l)
      micro_batch.budgets[l * members.size() + k] = candidate.budgets[member * layers + l];
  }
}

// What follows from the times of the plan's micro-batches: how even they are, and how much faster they could run.
void Planner::write_balance(const Candidate& candidate, Plan& plan) const {
  const auto stages = static_cast<size_t>(cost_.stages());
  const auto ranks = static_cast<int>(plan.ranks.size());
  double most = 0, total = 0, most_rank = 0;
  std::vector<double> stage_busy(stages, 0.0);
  for (const PlannedRank& rank : plan.ranks) {
    double rank_busy = 0;
    for (const PlannedMicroBatch& micro_batch : rank.micro_batches) {
      double latency = 0;
      for (size_t s = 0; s < stages; ++s) {
        const double busy = micro_batch.forward_us[s] + micro_batch.backward_us[s];
        latency += busy;
        stage_busy[s] += busy;
      }
      most = std::max(most, latency);
      rank_busy += latency;
    }
    total += rank_busy;
    most_rank = std::max(most_rank, rank_busy);
  }
  plan.imbalance = most / (total / candidate.batches.micro_batches());
  plan.worker_imbalance = most_rank / (total / ranks);
  plan.bubble_share = std::max(0.0, 1.0 - total / (cost_.stages() * ranks * plan.makespan_us));  // above rounding
  plan.lower_bound_us = candidate.batches.pieces.empty()
                            ? step_lower_bound(cost_, sequences_, static_cast<size_t>(cost_.layers()),
                                               candidate.budgets, stage_busy, pool_)
                            : pieces_lower_bound(cost_, candidate.batches, candidate.times);
}

}  // namespace

bool Plan::cut() const {
  return std::ranges::any_of(ranks, [](const PlannedRank& rank) {
    return std::ranges::any_of(rank.micro_batches, &PlannedMicroBatch::is_piece);
  });
}

std::vector<int> group_sizes(const PlannedRank& rank) {
  std::vector<int> sizes;
  for (const PlannedMicroBatch& micro_batch : rank.micro_batches) {
    if (micro_batch.begin > 0 && !sizes.empty())
      ++sizes.back();
    else
      sizes.push_back(1);
  }
  return sizes;
}

std::shared_ptr<const Schedule> rank_schedule(const PlannedRank& rank, int stages, int warmup_depth) {
  return shared_schedule(stages, group_sizes(rank), rank.ahead, warmup_depth);
}

int64_t ExpectedBudgets::of(const AttentionSpec& spec, int64_t tokens) const {
  if (spec.always_dense(tokens)) return tokens;
  const size_t at = quarter_octave(tokens);
  const int64_t ppm = at < ppm_.size() && ppm_[at] > 0 ? ppm_[at] : kPlainBudget;
  return std::clamp<int64_t>(
      static_cast<int64_t>(static_cast<double>(spec.budget) * static_cast<double>(ppm) / kPlainBudget), 1, tokens);
}

void ExpectedBudgets::observe(const AttentionSpec& spec, int64_t tokens, double mean_budget) {
  if (spec.always_dense(tokens)) return;
  const size_t at = quarter_octave(tokens);
  if (at >= ppm_.size()) ppm_.resize(at + 1, 0);
  const double ratio = mean_budget / static_cast<double>(spec.budget) * kPlainBudget;
  const double before = ppm_[at] > 0 ? static_cast<double>(ppm_[at]) : static_cast<double>(kPlainBudget);
  ppm_[at] = std::llround((1 - kBudgetSmoothing) * before + kBudgetSmoothing * ratio);
}

Plan plan_step(int64_t step, const CostModel& cost, const CoverageModel& coverage, std::span<const Sequence> sequences,
               const PlanOptions& options, const ExpectedBudgets& expected, ThreadPool* pool) {
  Planner planner(cost, coverage, sequences, options, pool);
  const Candidate baseline = planner.in_order();
  std::vector<Candidate> candidates;
  if (std::optional<Candidate> pieces = planner.pieces()) candidates.push_back(std::move(*pieces));
  if (!planner.always_cut()) planner.add_whole(baseline, expected, candidates);
  const Candidate& fastest =
      *std::min_element(candidates.begin(), candidates.end(),
                        [](const Candidate& a, const Candidate& b) { return a.makespan < b.makespan; });
  return planner.write(step, fastest, baseline.makespan);
}

void learn_budgets(const Plan& plan, const AttentionSpec& spec, std::span<const Sequence> sequences,
                   ExpectedBudgets& expected) {
  std::vector<int> open;  // layers that have a choice
  for (int l = 0; l < plan.layers; ++l)
    if (!spec.dense_layer(l)) open.push_back(l);
  if (open.empty()) return;
  // By id, in the order of the batch, so that the result does not depend on the arrangement.
  std::vector<std::pair<int64_t, double>> mean;
  mean.reserve(sequences.size());
  for (const PlannedRank& rank : plan.ranks)
    for (const PlannedMicroBatch& micro_batch : rank.micro_batches) {
      const size_t n = micro_batch.sequences.size();
      for (size_t k = 0; k < n; ++k) {
        double sum = 0;
        for (const int l : open) sum += micro_batch.budgets[static_cast<size_t>(l) * n + k];
        mean.emplace_back(micro_batch.sequences[k], sum / static_cast<double>(open.size()));
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
