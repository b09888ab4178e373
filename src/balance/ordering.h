#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "balance/schedule.h"

namespace sb {

// Micro-batch order of one pipeline. It changes nothing in the result of the step, only its time.
struct OrderingLimits {
  int64_t trials = 400;  // schedules that may be simulated
  // Most tokens of micro-batches in flight on the first stage; 0: no limit. An order that holds more is not taken.
  int64_t tokens_in_flight = 0;
};

// Largest in the middle, small at both ends: the smallest first, or last.
std::vector<int> small_at_both_ends(std::span<const double> load, bool smallest_first);
// Most tokens that are in flight at once on the first stage.
int64_t tokens_in_flight(const Schedule& schedule, std::span<const int64_t> tokens, std::span<const int> order);

// Improves `order` (which must respect the limit itself) and returns its makespan: all orders when they are few,
// otherwise both of the above and pair swaps. Never worse than the order given.
double improve_order(const Schedule& schedule, const PipelineTimes& times, std::span<const int64_t> tokens,
                     const OrderingLimits& limits, std::vector<int>& order);

}  // namespace sb
