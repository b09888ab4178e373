#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plan/coverage/coverage.h"
#include "plan/planner/balance_state.h"
#include "plan/planner/step_planner.h"
#include "python/bindings/forked_pool.h"
#include "python/bindings/plan_object.h"

namespace sb::python {

struct PlannerOptions {
  std::string model, profile;
  std::string coverage;  // "": what was observed, as in training; otherwise as find_coverage() takes it
  AttentionSpec spec;
  Layout layout;
  PlanOptions plan;
  int threads = 1;
};

// Forward and backward of a micro-batch on every stage, milliseconds.
using MeasuredTimes = std::vector<std::pair<double, double>>;

// Lengths in, a plan out: a pure function of step, lengths and state(), the same on every rank. Only observe() and
// restore() change the state; a plan that is being made elsewhere keeps the one it began with.
class Planner {
 public:
  explicit Planner(PlannerOptions options);

  PlanObject plan(int64_t step, const std::vector<int64_t>& lengths);
  // `times`: [rank][micro-batch], in the plan's order.
  void observe(const PlanObject& plan, const std::vector<int64_t>& lengths,
               const std::vector<std::vector<MeasuredTimes>>& times);
  std::string state() const { return write_balance_states({learned_->state}); }
  void restore(const std::string& text);

  int layers() const { return static_cast<int>(profile_.shape.layers); }
  const std::vector<int>& first_layer() const { return first_layer_; }

 private:
  struct Learned {
    BalanceState state;
    std::shared_ptr<const Costs> costs;  // as the state corrects them
  };
  void learn(BalanceState state);
  StepMeasurement measurement_of(const Plan& plan, const std::vector<std::vector<MeasuredTimes>>& times) const;

  PlannerOptions options_;
  Profile profile_;
  std::unique_ptr<CoverageModel> coverage_;  // null: what was observed
  std::vector<int> first_layer_;             // fixed, whatever the latencies turn out to be
  std::shared_ptr<const Learned> learned_;
  ForkedPool pool_;
};

}  // namespace sb::python
