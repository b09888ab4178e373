#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "plan/coverage/coverage_statistics.h"
#include "plan/latency/latency_model.h"
#include "plan/plan.h"

namespace sb {

// What the steps so far have taught the planner. Integers throughout, so that a plan made from it is the same wherever
// it is made again.
struct BalanceState {
  int64_t step = 0;  // the last one that counts in here
  std::array<int64_t, kOperations> corrections_ppm;
  std::vector<int64_t> expected_budgets_ppm;  // of ExpectedBudgets
  CoverageStatistics coverage;
  int64_t overhead_ns = 0;  // of a step beyond its schedule: reading, optimizer, what the reduction does not hide

  BalanceState();
  bool operator==(const BalanceState&) const = default;
};

// Text for a checkpoint, and back; UserError names `where` when it is damaged.
std::string write_balance_states(const std::vector<BalanceState>& states);
std::vector<BalanceState> parse_balance_states(const std::string& text, const std::string& where);

}  // namespace sb
