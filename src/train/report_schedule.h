#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "train/plan_log.h"

namespace sb {

// How much shorter the step became, by prediction: in order with base budgets ÷ balanced. Nothing where that is not
// known.
std::optional<double> planned_speedup(const LoggedStep& step);

// The schedule of one step: in order, balanced, and balanced as measured. Empty when the log does not say enough or is
// inconsistent.
std::string schedule_figure(const LoggedStep& step);

}  // namespace sb
