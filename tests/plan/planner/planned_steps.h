#pragma once

// A small run's batches, planned by a BalancedPlanner and measured on a machine that is made up.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "plan/planner/balanced_planner.h"

namespace sb::test {

constexpr int kLayers = 4;

ModelShape shape();
BalancedPlannerOptions options(int dp = 2, int pp = 1);
std::vector<Sequence> batch_of(int64_t step);
std::unique_ptr<BalancedPlanner> planner(const BalancedPlannerOptions& options, const ReplayedSteps& steps = {});

// A machine that takes `slowness` times what the profile says, and has (k/n)^gamma coverage.
StepMeasurement measure(const Plan& plan, const BalancedPlannerOptions& options, double slowness, double gamma = 0.4);

// Runs steps first … last as the trainer does and returns what was planned. `slowness` is asked for every step.
std::vector<std::string> run(BalancedPlanner& planner, const BalancedPlannerOptions& options, int64_t first,
                             int64_t last, const std::function<double(int64_t)>& slowness);
double steady(int64_t step);

// What a UserError says; empty without one.
std::string error_of(const std::function<void()>& body);

}  // namespace sb::test
