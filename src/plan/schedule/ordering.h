#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/schedule/schedule.h"

namespace sb {

// Micro-batch order of one pipeline. It changes nothing in the result of the step, only its time: memory is planned for
// the largest micro-batch in every slot.

// Largest in the middle, small at both ends: the smallest first, or last.
std::vector<int> small_at_both_ends(std::span<const double> load, bool smallest_first);

// Improves `order` and returns its makespan: all orders when they are few, otherwise both of the above and pair swaps.
// Simulates about `trials` schedules at most. Never worse than the order given.
double improve_order(const Schedule& schedule, const PipelineTimes& times, int64_t trials, std::vector<int>& order);

}  // namespace sb
