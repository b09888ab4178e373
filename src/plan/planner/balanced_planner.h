#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "plan/latency/cost_model.h"
#include "plan/latency/profile.h"
#include "plan/plan.h"
#include "plan/planner/balance_state.h"
#include "plan/planner/plan_log.h"
#include "plan/planner/step_planner.h"

namespace sb {

struct BalancedPlannerOptions {
  PlanOptions plan;
  AttentionSpec spec;
  Layout layout;
  std::vector<int> first_layer;  // of every stage and one past the last; empty: split by the profile
  bool adapt = true;             // false: nothing is learned, a plan follows from the configuration and the step
  std::filesystem::path log;     // plan.jsonl; empty: none is written or read
  int64_t first_step = 1;        // of the run from here on: no plan before it is read from the log
  std::filesystem::path replay;  // the log of a run whose plans are used again; empty: none
  // The ranks that run are not those of the layout: measurements come without times, and none are learned.
  bool rehearsal = false;
};

// The steps of a run with a replay.
struct ReplayedSteps {
  int64_t last = 0;
  std::function<std::vector<Sequence>(int64_t step)> batch;  // the sequences of a step
  bool lengths_known = true;  // false: they follow from what training will teach, and announce() compares them
};

// Batches, orders and tunes every step, two steps ahead, in threads of its own.
//
// The plan of step s is a pure function of its sequences and of what the steps up to s-3 taught, so it does not matter
// when and where it is made: a run repeats exactly from the measurements, or from the plans in its log.
class BalancedPlanner final : public StepPlanner {
 public:
  static constexpr int kAhead = 2;

  // With options.replay: UserError unless it has a plan of every one of these steps, and all of them fit.
  BalancedPlanner(Profile profile, BalancedPlannerOptions options, const ReplayedSteps& steps = {});
  ~BalancedPlanner() override;

  int ahead() const override { return kAhead; }
  void announce(int64_t step, std::vector<Sequence> sequences) override;
  Plan next() override;
  void learn(const StepMeasurement& measurement) override;
  const CoverageStatistics* coverage() const override { return &learned().coverage; }
  std::vector<Metric> metrics() const override { return metrics_; }
  std::string state() const override;
  void restore_state(const std::string& text) override;

  // Where the stages begin, and one past the last.
  const std::vector<int>& first_layer() const { return options_.first_layer; }
  // What all steps so far have taught.
  const BalanceState& learned() const { return *states_.back(); }

 private:
  // A planned step on its way from announce() to learn().
  struct Made {
    LoggedStep step;
    double seconds = 0;  // processor time of making it
  };
  struct Pending {
    std::vector<Sequence> sequences;
    std::future<Made> made;
    bool replayed = false;
  };
  struct Running {
    std::vector<Sequence> sequences;
    LoggedStep step;
    double planning_seconds = 0, waited_seconds = 0;
  };

  std::optional<LoggedStep> recorded(int64_t step, const std::vector<Sequence>& sequences);
  void open_log(int64_t step);
  void open_replay(const ReplayedSteps& steps);
  void check_plan(const Plan& plan, const std::vector<Sequence>& sequences, bool lengths_known,
                  const std::string& place) const;
  void check_layout(const Plan& plan, const std::string& where) const;
  void check_sequences(const Plan& plan, const std::vector<Sequence>& sequences, bool lengths_known,
                       const std::string& where) const;
  void check_piece(const PlannedRank& rank, size_t position, const std::map<int64_t, int64_t>& lengths,
                   std::set<int64_t>& seen, bool lengths_known, const std::string& where) const;
  void check_budgets(const Plan& plan, const std::vector<Sequence>& sequences, const std::string& where) const;
  std::shared_ptr<const BalanceState> state_for(int64_t step) const;
  Made make(int64_t step, const std::vector<Sequence>& sequences, const BalanceState& state) const;
  double measured_makespan(const Plan& plan, const CostModel& cost, const StepMeasurement& measurement) const;
  void learn_latencies(const Running& run, const StepMeasurement& measurement, BalanceState& state,
                       double& makespan_us) const;
  void note(const Running& run, const StepMeasurement& measurement, double makespan_us, double learning_seconds);
  void note_rehearsal(const Running& run, double planning_ms);

  Profile profile_;
  BalancedPlannerOptions options_;
  // After the last kAhead + 1 steps learned from, oldest first: announce() may ask for any of them.
  std::deque<std::shared_ptr<const BalanceState>> states_;
  std::optional<RecordedPlans> record_;  // of options_.replay, or of an earlier process of this run
  bool record_is_own_ = false;
  bool goes_on_ = false;  // with plans of its own record
  std::unique_ptr<PlanLog> log_;
  std::map<int64_t, Pending> pending_;
  std::map<int64_t, Running> running_;
  std::vector<Metric> metrics_;
  std::set<std::string> noted_;  // of plans, said once
};

// Predicted times of a plan's micro-batch on a stage, microseconds, from the lengths of its sequences.
StageTime predict_stage(const CostModel& cost, const PlannedMicroBatch& micro_batch,
                        const std::vector<int64_t>& lengths, int stage);

// Corrects `latency`, which `cost` is made of, by what every pass of a plan took.
void learn_times(const CostModel& cost, LatencyModel& latency, const Plan& plan, const std::vector<Sequence>& sequences,
                 const StepMeasurement& measurement);

}  // namespace sb
