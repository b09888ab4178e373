#include "plan/planner/balanced_planner.h"

#include <time.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "core/errors.h"
#include "core/log.h"
#include "plan/coverage/cautious_coverage.h"
#include "plan/schedule/schedule.h"

namespace sb {
namespace {

constexpr double kOverheadSmoothing = 0.2;

double clock_seconds(clockid_t clock) {
  timespec now = {};
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

std::map<int64_t, int64_t> lengths_by_id(const std::vector<Sequence>& sequences) {
  std::map<int64_t, int64_t> lengths;
  for (const Sequence& sequence : sequences) lengths[sequence.id] = sequence.tokens;
  return lengths;
}

std::vector<int64_t> lengths_of(const PlannedMicroBatch& micro_batch, const std::map<int64_t, int64_t>& by_id) {
  std::vector<int64_t> lengths;
  for (const int64_t id : micro_batch.sequences) lengths.push_back(by_id.at(id));
  return lengths;
}

double sum(const std::vector<int64_t>& values) {
  return static_cast<double>(std::accumulate(values.begin(), values.end(), int64_t{0}));
}

// Budgets that sequences of each length ran at, of every layer: samples of coverage know their length and layer.
std::map<int64_t, std::vector<int64_t>> budgets_by_length(const Plan& plan, const std::map<int64_t, int64_t>& by_id) {
  std::map<int64_t, std::vector<int64_t>> budgets;
  for (const PlannedRank& rank : plan.ranks)
    for (const PlannedMicroBatch& micro_batch : rank.micro_batches) {
      const std::vector<int64_t> lengths = lengths_of(micro_batch, by_id);
      for (size_t k = 0; k < lengths.size(); ++k) {
        const auto [entry, fresh] = budgets.try_emplace(lengths[k]);
        for (int layer = 0; layer < plan.layers; ++layer) {
          const int32_t budget = micro_batch.budgets[static_cast<size_t>(layer) * lengths.size() + k];
          if (fresh)
            entry->second.push_back(budget);
          else if (entry->second[static_cast<size_t>(layer)] != budget)
            entry->second[static_cast<size_t>(layer)] = 0;  // two of one length at different budgets: not known
        }
      }
    }
  return budgets;
}

// A plan that leaves budgets out means the configured ones.
void complete_budgets(Plan& plan, const AttentionSpec& spec, const std::map<int64_t, int64_t>& by_id) {
  for (PlannedRank& rank : plan.ranks)
    for (PlannedMicroBatch& micro_batch : rank.micro_batches) {
      if (!micro_batch.budgets.empty()) continue;
      const std::vector<int64_t> lengths = lengths_of(micro_batch, by_id);
      for (int layer = 0; layer < plan.layers; ++layer)
        for (const int64_t length : lengths)
          micro_batch.budgets.push_back(static_cast<int32_t>(spec.base_budget(length, layer)));
    }
}

// Mean over tokens and layers of the keys a query may see.
double mean_budget(const Plan& plan, const std::map<int64_t, int64_t>& by_id) {
  double keys = 0, tokens = 0;
  for (const PlannedRank& rank : plan.ranks)
    for (const PlannedMicroBatch& micro_batch : rank.micro_batches) {
      const std::vector<int64_t> lengths = lengths_of(micro_batch, by_id);
      for (size_t i = 0; i < micro_batch.budgets.size(); ++i) {
        const int64_t length = lengths[i % lengths.size()];
        const auto weight = static_cast<double>(micro_batch.is_piece() ? micro_batch.tokens : length);
        keys += weight * static_cast<double>(std::min<int64_t>(length, micro_batch.budgets[i]));
        tokens += weight;
      }
    }
  return tokens > 0 ? keys / tokens : 0;
}

}  // namespace

StageTime predict_stage(const CostModel& cost, const PlannedMicroBatch& micro_batch,
                        const std::vector<int64_t>& lengths, int stage) {
  const auto tokens = static_cast<double>(micro_batch.tokens);
  const StageTime linear = cost.linear(tokens);
  StageTime time;
  for (int layer = cost.first_layer(stage); layer < cost.first_layer(stage) + cost.stage_layers(stage); ++layer) {
    Work work;
    for (size_t k = 0; k < lengths.size(); ++k)
      work +=
          work_of(cost.spec(), lengths[k], {micro_batch.begin, micro_batch.end},
                  micro_batch.budgets.empty() ? cost.spec().base_budget(lengths[k], layer)
                                              : micro_batch.budgets[static_cast<size_t>(layer) * lengths.size() + k]);
    const StageTime attention = cost.attention(work);
    time.forward += linear.forward + attention.forward;
    time.backward += linear.backward + attention.backward;
  }
  if (stage + 1 == cost.stages()) {
    const StageTime head = cost.head(tokens);
    time.forward += head.forward;
    time.backward += head.backward;
  }
  return time;
}

// Compares every pass with what the present model says of it (not with the plan, which is a few corrections old).
void learn_times(const CostModel& cost, LatencyModel& latency, const Plan& plan, const std::vector<Sequence>& sequences,
                 const StepMeasurement& measurement) {
  const std::map<int64_t, int64_t> by_id = lengths_by_id(sequences);
  for (size_t r = 0; r < measurement.ranks.size(); ++r)
    for (size_t i = 0; i < measurement.ranks[r].size(); ++i) {
      const PlannedMicroBatch& planned = plan.ranks[r].micro_batches[i];
      const MicroBatchTimes& measured = measurement.ranks[r][i];
      const std::vector<int64_t> lengths = lengths_of(planned, by_id);
      for (size_t s = 0; s < measured.forward.size(); ++s) {
        // Predicted anew each time: the pass before has moved the corrections.
        const StageTime predicted = predict_stage(cost, planned, lengths, static_cast<int>(s));
        if (measured.forward[s] > 0)
          latency.observe_pass(false, predicted.forward, static_cast<double>(measured.forward[s]) / 1e3);
        if (measured.backward[s] > 0)
          latency.observe_pass(true, predicted.backward, static_cast<double>(measured.backward[s]) / 1e3);
      }
    }
}

BalancedPlanner::BalancedPlanner(Profile profile, BalancedPlannerOptions options, const ReplayedSteps& steps)
    : profile_(std::move(profile)), options_(std::move(options)) {
  const LatencyModel latency(profile_);
  const CostModel cost = options_.first_layer.empty()
                             ? CostModel(latency, options_.spec, options_.layout)
                             : CostModel(latency, options_.spec, options_.layout, options_.first_layer);
  // From here on the split is fixed, whatever the latencies turn out to be.
  if (options_.first_layer.empty())
    for (int s = 0; s <= cost.stages(); ++s) options_.first_layer.push_back(cost.first_layer(s));
  states_.push_back(std::make_shared<const BalanceState>());
  if (!options_.replay.empty()) {
    open_replay(steps);
  } else if (!options_.log.empty() && std::filesystem::exists(options_.log)) {
    record_.emplace(options_.log, options_.first_step);
    record_is_own_ = true;
    if (!record_->damage().empty()) log::warning("{}; it and what follows are planned again", record_->damage());
  }
}

BalancedPlanner::~BalancedPlanner() = default;

// Checks the plans as they are read: there may be gigabytes of them, and other ranks wait.
void BalancedPlanner::open_replay(const ReplayedSteps& steps) {
  std::map<int64_t, std::string> misfits;  // of the line that counts, the last one of a step
  record_.emplace(options_.replay, [&](const Plan& plan, const std::string& place) {
    misfits.erase(plan.step);
    if (plan.step > steps.last) return;
    try {
      check_plan(plan, steps.batch(plan.step), steps.lengths_known, place);
    } catch (const UserError& error) {
      misfits[plan.step] = error.what();
    }
  });
  for (int64_t step = 1; step <= steps.last; ++step) record_->require(step);
  if (!misfits.empty()) throw UserError("{}", misfits.begin()->second);
}

// When a step is announced it is known which plans of the log still apply. Steps from there on run again, and are
// measured again.
void BalancedPlanner::open_log(int64_t step) {
  if (log_ || options_.log.empty()) return;
  if (record_is_own_) {
    record_->trim_file(step);
  } else if (std::filesystem::exists(options_.log)) {
    // A replay that goes on: its plans are written again as they are taken.
    RecordedPlans earlier(options_.log, step);
    earlier.forget_from(step);
    earlier.trim_file(step);
  }
  log_ = std::make_unique<PlanLog>(options_.log);
}

void BalancedPlanner::check_layout(const Plan& plan, const std::string& where) const {
  SB_USER_CHECK(static_cast<int>(plan.ranks.size()) == options_.layout.dp, "{} is for {} data-parallel ranks, not {}",
                where, plan.ranks.size(), options_.layout.dp);
  SB_USER_CHECK(plan.layers == static_cast<int>(profile_.shape.layers), "{} is for {} layers, not {}", where,
                plan.layers, profile_.shape.layers);
  const int64_t most = options_.plan.batching.max_sequences;
  for (const PlannedRank& rank : plan.ranks) {
    SB_USER_CHECK(!rank.micro_batches.empty(), "{} leaves a rank without work", where);
    for (const PlannedMicroBatch& micro_batch : rank.micro_batches) {
      SB_USER_CHECK(options_.plan.chunk.on() || !micro_batch.is_piece(),
                    "{} splits sequence {}, but memory is planned for whole ones; set balance.chunk to that of the run "
                    "that planned it",
                    where, micro_batch.sequences[0]);
      SB_USER_CHECK(options_.plan.chunk.tokens <= 0 || micro_batch.tokens <= options_.plan.chunk.tokens,
                    "{} has a micro-batch of {} tokens, more than the balance.chunk {} that memory is planned for",
                    where, micro_batch.tokens, options_.plan.chunk.tokens);
      SB_USER_CHECK(most == 0 || std::ssize(micro_batch.sequences) <= most,
                    "{} has a micro-batch of {} sequences, more than the {} that memory is planned for", where,
                    micro_batch.sequences.size(), most);
      SB_USER_CHECK(static_cast<int>(micro_batch.forward_us.size()) == options_.layout.pp &&
                        static_cast<int>(micro_batch.backward_us.size()) == options_.layout.pp,
                    "{} is for {} pipeline stages, not {}", where, micro_batch.forward_us.size(), options_.layout.pp);
    }
  }
}

void BalancedPlanner::check_sequences(const Plan& plan, const std::vector<Sequence>& sequences, bool lengths_known,
                                      const std::string& where) const {
  const std::map<int64_t, int64_t> by_id = lengths_by_id(sequences);
  std::set<int64_t> seen;
  const int64_t cap = options_.plan.batching.micro_batch_tokens;
  for (const PlannedRank& rank : plan.ranks)
    for (size_t i = 0; i < rank.micro_batches.size(); ++i) {
      const PlannedMicroBatch& micro_batch = rank.micro_batches[i];
      if (micro_batch.is_piece()) {
        check_piece(rank, i, by_id, seen, lengths_known, where);
        continue;
      }
      int64_t tokens = 0;
      for (const int64_t id : micro_batch.sequences) {
        const auto found = by_id.find(id);
        SB_USER_CHECK(
            found != by_id.end() && seen.insert(id).second,
            "{} has sequence {}, which does not occur exactly once in the step's batch: it was made for other data",
            where, id);
        tokens += found->second;
      }
      SB_USER_CHECK(!lengths_known || tokens == micro_batch.tokens,
                    "{} counts {} tokens where the sequences have {}: it was made for other data", where,
                    micro_batch.tokens, tokens);
      SB_USER_CHECK(cap == 0 || micro_batch.tokens <= cap,
                    "{} has a micro-batch of {} tokens, more than the {} of this run", where, micro_batch.tokens, cap);
    }
  SB_USER_CHECK(seen.size() == sequences.size(), "{} has {} sequences, but the step has {}", where, seen.size(),
                sequences.size());
}

// The first piece counts as the sequence, the last must end where it does; parse_plan() has seen to those between.
void BalancedPlanner::check_piece(const PlannedRank& rank, size_t position, const std::map<int64_t, int64_t>& lengths,
                                  std::set<int64_t>& seen, bool lengths_known, const std::string& where) const {
  const PlannedMicroBatch& piece = rank.micro_batches[position];
  const int64_t id = piece.sequences[0], edge = piece_edge(options_.spec);
  const auto found = lengths.find(id);
  SB_USER_CHECK(found != lengths.end() && (piece.begin > 0 || seen.insert(id).second),
                "{} has sequence {}, which does not occur exactly once in the step's batch: it was made for other data",
                where, id);
  SB_USER_CHECK(piece.begin % edge == 0, "{} splits sequence {} at {}, but blocks end at multiples of {}", where, id,
                piece.begin, edge);
  const bool last = position + 1 == rank.micro_batches.size() || rank.micro_batches[position + 1].begin != piece.end;
  SB_USER_CHECK(!lengths_known || (last ? piece.end == found->second : piece.end < found->second),
                "{} ends the last piece of sequence {} at {}, but it has {} tokens: it was made for other data", where,
                id, piece.end, found->second);
}

void BalancedPlanner::check_budgets(const Plan& plan, const std::vector<Sequence>& sequences,
                                    const std::string& where) const {
  // What memory is planned for; 0: up to dense.
  const bool raised = options_.plan.tuning.policy != TuningPolicy::none || !options_.replay.empty();
  const int64_t largest = raised ? options_.spec.max_budget : options_.spec.budget;
  if (largest == 0) return;
  const std::map<int64_t, int64_t> by_id = lengths_by_id(sequences);
  for (const PlannedRank& rank : plan.ranks)
    for (const PlannedMicroBatch& micro_batch : rank.micro_batches)
      for (size_t i = 0; i < micro_batch.budgets.size(); ++i) {
        const int64_t id = micro_batch.sequences[i % micro_batch.sequences.size()], budget = micro_batch.budgets[i];
        SB_USER_CHECK(budget <= largest || budget >= by_id.at(id),
                      "{} gives sequence {} a budget of {}, but memory is planned for {}; raise balance.max_budget",
                      where, id, budget, largest);
      }
}

std::shared_ptr<const BalanceState> BalancedPlanner::state_for(int64_t step) const {
  // The newest that steps up to step-3 have made; at the start of a run there is none but the first.
  for (auto state = states_.rbegin(); state != states_.rend(); ++state)
    if ((*state)->step <= step - 1 - kAhead) return *state;
  return states_.front();
}

// A plan of another batch or layout would train something else.
void BalancedPlanner::check_plan(const Plan& plan, const std::vector<Sequence>& sequences, bool lengths_known,
                                 const std::string& place) const {
  const std::string where = fmt::format("{}: the plan of step {}", place, plan.step);
  try {
    check_layout(plan, where);
    check_sequences(plan, sequences, lengths_known, where);
  } catch (const UserError& error) {
    if (record_is_own_) throw;
    throw UserError(
        "{}. balance.replay needs the log of a run with the same data, batches, layers and ranks: name one, or remove "
        "it",
        error.what());
  }
  if (lengths_known) check_budgets(plan, sequences, where);
}

// The plan of a step that has one on record.
std::optional<LoggedStep> BalancedPlanner::recorded(int64_t step, const std::vector<Sequence>& sequences) {
  if (!record_ || !record_->contains(step)) return std::nullopt;
  try {
    LoggedStep logged = record_->read(step);
    check_plan(logged.plan, sequences, /*lengths_known=*/true, record_->place(step));
    complete_budgets(logged.plan, options_.spec, lengths_by_id(sequences));
    if (record_is_own_) {
      // Not before one has turned out to fit.
      if (!std::exchange(goes_on_, true))
        log::info("steps {} to {} run as planned in {}", step, record_->last(), options_.log.string());
      record_->forget_before(step + 1);
    }
    return logged;
  } catch (const UserError& error) {
    if (!record_is_own_) throw;
    // A run may go on with other ranks; the plans that its log has left do not fit then.
    log::warning("{}; steps are planned again from here on", error.what());
    record_->forget_from(step);
    log_.reset();
    return std::nullopt;
  }
}

void BalancedPlanner::announce(int64_t step, std::vector<Sequence> sequences) {
  // Plans of an earlier process beyond its checkpoint are used again.
  if (record_is_own_) record_->forget_before(step);
  if (!options_.replay.empty()) record_->require(step);
  Pending pending;
  if (std::optional<LoggedStep> logged = recorded(step, sequences)) {
    std::promise<Made> ready;
    ready.set_value({std::move(*logged), 0.0});
    pending.made = ready.get_future();
    pending.replayed = true;
  }
  open_log(step);
  pending.sequences = std::move(sequences);
  if (!pending.replayed)
    pending.made = std::async(std::launch::async, [this, step, batch = pending.sequences, state = state_for(step)] {
      return make(step, batch, *state);
    });
  pending_[step] = std::move(pending);
}

BalancedPlanner::Made BalancedPlanner::make(int64_t step, const std::vector<Sequence>& sequences,
                                            const BalanceState& state) const {
  const double begin = clock_seconds(CLOCK_THREAD_CPUTIME_ID);
  LatencyModel latency(profile_);
  latency.set_corrections_ppm(state.corrections_ppm);
  const CostModel cost(latency, options_.spec, options_.layout, options_.first_layer);
  ExpectedBudgets expected;
  expected.set_ppm(state.expected_budgets_ppm);
  Made made;
  const CautiousCoverage coverage(state.coverage, options_.spec);
  made.step.plan = plan_step(step, cost, coverage, sequences, options_.plan, expected);
  made.step.predicted_step_us = made.step.plan.makespan_us + static_cast<double>(state.overhead_ns) / 1e3;
  made.seconds = clock_seconds(CLOCK_THREAD_CPUTIME_ID) - begin;
  PlanOptions plain = options_.plan;
  plain.batching.policy = BatchingPolicy::in_order;
  plain.ordering = false;
  plain.chunk = {};
  // What it is compared with has whole sequences, however large micro-batches may be.
  for (const Sequence& sequence : sequences)
    if (int64_t& cap = plain.batching.micro_batch_tokens; cap > 0) cap = std::max(cap, sequence.tokens);
  plain.tuning.policy = TuningPolicy::none;
  made.step.in_order = plan_step(step, cost, coverage, sequences, plain, expected);
  return made;
}

Plan BalancedPlanner::next() {
  SB_CHECK(!pending_.empty(), "no step is announced");
  const int64_t step = pending_.begin()->first;
  Pending pending = std::move(pending_.begin()->second);
  pending_.erase(pending_.begin());
  const double begin = clock_seconds(CLOCK_MONOTONIC);
  Made made = pending.made.get();
  Running run;
  run.waited_seconds = clock_seconds(CLOCK_MONOTONIC) - begin;
  run.planning_seconds = made.seconds;
  run.sequences = std::move(pending.sequences);
  run.step = std::move(made.step);
  // What an earlier process of this run has written stands there already.
  if (log_ && !(pending.replayed && record_is_own_)) log_->plan(run.step);
  Plan plan = run.step.plan;
  for (const std::string& note : plan.notes)
    if (noted_.insert(note).second) log::warning("step {}: {}", step, note);
  running_.clear();  // a step that was begun and given up
  metrics_.clear();
  running_[step] = std::move(run);
  return plan;
}

// The schedule with what its operations really took; transfers and reductions as the profile has them.
double BalancedPlanner::measured_makespan(const Plan& plan, const CostModel& cost,
                                          const StepMeasurement& measurement) const {
  double makespan_us = 0;
  for (size_t r = 0; r < measurement.ranks.size(); ++r) {
    PipelineTimes times;
    times.stages = cost.stages();
    times.micro_batches = static_cast<int>(measurement.ranks[r].size());
    for (size_t i = 0; i < measurement.ranks[r].size(); ++i) {
      const MicroBatchTimes& micro_batch = measurement.ranks[r][i];
      for (int s = 0; s < times.stages; ++s) {
        times.forward.push_back(static_cast<double>(micro_batch.forward[static_cast<size_t>(s)]) / 1e3);
        times.backward.push_back(static_cast<double>(micro_batch.backward[static_cast<size_t>(s)]) / 1e3);
        const auto tokens = static_cast<double>(plan.ranks[r].micro_batches[i].tokens);
        times.forward_transfer.push_back(cost.transfer(s, tokens));
        times.backward_transfer.push_back(cost.gradient_transfer(s, tokens, cost.linear(tokens), plan.cut()));
      }
    }
    cost.add_exposed(times);
    const auto schedule = rank_schedule(plan.ranks[r], times.stages, options_.layout.warmup_depth);
    makespan_us = std::max(makespan_us, schedule->makespan(times, {}));
  }
  return makespan_us;
}

// What the step's times say of latencies and of what comes on top of the schedule.
void BalancedPlanner::learn_latencies(const Running& run, const StepMeasurement& measurement, BalanceState& state,
                                      double& makespan_us) const {
  SB_CHECK(measurement.ranks.size() == run.step.plan.ranks.size(), "step {}: {} ranks planned, {} measured",
           measurement.step, run.step.plan.ranks.size(), measurement.ranks.size());
  for (size_t r = 0; r < measurement.ranks.size(); ++r)
    SB_CHECK(measurement.ranks[r].size() == run.step.plan.ranks[r].micro_batches.size(),
             "step {}, rank {}: {} micro-batches planned, {} measured", measurement.step, r,
             run.step.plan.ranks[r].micro_batches.size(), measurement.ranks[r].size());
  LatencyModel latency(profile_);
  latency.set_corrections_ppm(state.corrections_ppm);
  const CostModel cost(latency, options_.spec, options_.layout, options_.first_layer);
  makespan_us = measured_makespan(run.step.plan, cost, measurement);
  if (!options_.adapt) return;
  learn_times(cost, latency, run.step.plan, run.sequences, measurement);
  state.corrections_ppm = latency.corrections_ppm();
  const double overhead = static_cast<double>(measurement.step_ns) - 1e3 * makespan_us;
  state.overhead_ns = states_.back()->step == 0
                          ? std::llround(overhead)
                          : std::llround((1 - kOverheadSmoothing) * static_cast<double>(state.overhead_ns) +
                                         kOverheadSmoothing * overhead);
}

void BalancedPlanner::learn(const StepMeasurement& measurement) {
  const double begin = clock_seconds(CLOCK_THREAD_CPUTIME_ID);
  const auto found = running_.find(measurement.step);
  SB_CHECK(found != running_.end(), "step {} was not planned", measurement.step);
  const Running run = std::move(found->second);
  running_.erase(found);
  if (log_) log_->measured(measurement);

  auto state = std::make_shared<BalanceState>(*states_.back());
  state->step = measurement.step;
  double makespan_us = 0;
  if (!options_.rehearsal) learn_latencies(run, measurement, *state, makespan_us);
  if (options_.adapt) {
    ExpectedBudgets expected;
    expected.set_ppm(state->expected_budgets_ppm);
    learn_budgets(run.step.plan, options_.spec, run.sequences, expected);
    state->expected_budgets_ppm = expected.ppm();
    const auto used = budgets_by_length(run.step.plan, lengths_by_id(run.sequences));
    const auto used_budget = [&](int64_t tokens, int layer) {
      const auto own = used.find(tokens);
      return own == used.end() ? 0 : int64_t{own->second[static_cast<size_t>(layer)]};
    };
    observe_coverage(measurement.coverage, options_.spec.block, used_budget, state->coverage);
    states_.push_back(std::move(state));
    if (states_.size() > kAhead + 1) states_.pop_front();
  }
  const double learning_seconds = clock_seconds(CLOCK_THREAD_CPUTIME_ID) - begin;
  if (options_.rehearsal)
    note_rehearsal(run, 1e3 * (run.planning_seconds + learning_seconds));
  else
    note(run, measurement, makespan_us, learning_seconds);
}

// Predictions alone: what is measured here is of other ranks.
void BalancedPlanner::note_rehearsal(const Running& run, double planning_ms) {
  const Plan& plan = run.step.plan;
  metrics_ = {{"cluster_step_ms", plan.makespan_us / 1e3},
              {"predicted_makespan_ms", plan.makespan_us / 1e3},
              {"predicted_in_order_ms", plan.baseline_us / 1e3},
              {"lower_bound_ms", plan.lower_bound_us / 1e3},
              {"predicted_imbalance", plan.imbalance},
              {"worker_imbalance", plan.worker_imbalance},
              {"predicted_bubble_percent", 100 * plan.bubble_share},
              {"planning_ms", planning_ms},
              {"planning_wait_ms", 1e3 * run.waited_seconds},
              {"budget", mean_budget(plan, lengths_by_id(run.sequences))},
              {"predicted_coverage", plan.mean_coverage},
              {"base_coverage", plan.base_coverage}};
}

void BalancedPlanner::note(const Running& run, const StepMeasurement& measurement, double makespan_us,
                           double learning_seconds) {
  const Plan& plan = run.step.plan;
  double predicted = 0, measured = 0, most = 0, count = 0, busiest_rank = 0;
  std::vector<double> errors;
  for (size_t r = 0; r < measurement.ranks.size(); ++r) {
    double rank_busy = 0;
    for (size_t i = 0; i < measurement.ranks[r].size(); ++i) {
      const PlannedMicroBatch& planned = plan.ranks[r].micro_batches[i];
      const double said = std::accumulate(planned.forward_us.begin(), planned.forward_us.end(), 0.0) +
                          std::accumulate(planned.backward_us.begin(), planned.backward_us.end(), 0.0);
      const double took = (sum(measurement.ranks[r][i].forward) + sum(measurement.ranks[r][i].backward)) / 1e3;
      predicted += said;
      measured += took;
      rank_busy += took;
      most = std::max(most, took);
      count += 1;
      if (took > 0) errors.push_back(std::abs(said / took - 1));
    }
    busiest_rank = std::max(busiest_rank, rank_busy);
  }
  const double step_us = static_cast<double>(measurement.step_ns) / 1e3;
  const double planning_ms = 1e3 * (run.planning_seconds + learning_seconds);
  const int workers = options_.layout.dp * options_.layout.pp;
  const auto error = summarize_errors(errors);
  metrics_ = {{"predicted_step_ms", run.step.predicted_step_us / 1e3},
              {"predicted_makespan_ms", plan.makespan_us / 1e3},
              {"measured_makespan_ms", makespan_us / 1e3},
              {"predicted_in_order_ms", plan.baseline_us / 1e3},
              {"lower_bound_ms", plan.lower_bound_us / 1e3},
              {"predicted_micro_batch_ms", predicted / count / 1e3},
              {"measured_micro_batch_ms", measured / count / 1e3},
              {"prediction_error", error.median},
              {"prediction_error_p95", error.p95},
              {"predicted_imbalance", plan.imbalance},
              {"imbalance", measured > 0 ? most / (measured / count) : 1.0},
              {"worker_imbalance", plan.worker_imbalance},
              {"rank_imbalance", measured > 0 ? busiest_rank * std::ssize(measurement.ranks) / measured : 1.0},
              {"predicted_bubble_percent", 100 * plan.bubble_share},
              // Passes and step are timed apart, so that their sum may be the longer by a little.
              {"bubble_percent", step_us > 0 ? std::max(0.0, 100 * (1 - measured / (workers * step_us))) : 0.0},
              {"planning_ms", planning_ms},
              {"planning_percent", step_us > 0 ? 1e5 * planning_ms / step_us : 0.0},
              {"planning_wait_ms", 1e3 * run.waited_seconds},
              {"budget", mean_budget(plan, lengths_by_id(run.sequences))},
              {"predicted_coverage", plan.mean_coverage},
              {"base_coverage", plan.base_coverage}};
}

std::string BalancedPlanner::state() const {
  if (!options_.adapt) return {};
  std::vector<BalanceState> states;
  for (const auto& state : states_) states.push_back(*state);
  return write_balance_states(states);
}

void BalancedPlanner::restore_state(const std::string& text) {
  SB_CHECK(pending_.empty(), "steps are announced already");
  if (!options_.adapt || text.empty()) return;
  states_.clear();
  for (BalanceState& state : parse_balance_states(text, "checkpoint"))
    states_.push_back(std::make_shared<const BalanceState>(std::move(state)));
}

}  // namespace sb
