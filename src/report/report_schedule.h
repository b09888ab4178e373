#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "plan/planner/plan_log.h"

namespace sb {

// How much shorter the step became, by prediction: in order with base budgets ÷ balanced. Nothing where that is not
// known.
std::optional<double> planned_speedup(const LoggedStep& step);

// The steps worth a look: `step` where there is a plan of it, a typical one, the ones that gained most and least.
std::vector<int64_t> shown_steps(const PlanRecord& plans, int64_t step);
// Of a long run: the last ones.
constexpr int64_t kMostMicroBatchesShown = 4000;

// The schedule of one step: in order, balanced, and balanced as measured. Empty when the log does not say enough or is
// inconsistent.
std::string schedule_figure(const LoggedStep& step);

}  // namespace sb
