#pragma once

#include <string>
#include <vector>

#include "plan/latency/cost_model.h"
#include "plan/plan.h"
#include "plan/schedule/schedule.h"

namespace sb {

// The operations of one data-parallel rank of a plan, with start, end and slack.
ScheduleResult schedule_of(const Plan& plan, const CostModel& cost, int rank);

// Chrome trace (chrome://tracing, Perfetto): one process a data-parallel rank, one track a stage.
std::string schedule_trace(const Plan& plan, const CostModel& cost);

// The schedules as a picture, one panel a plan, on one time axis. At most `max_ranks` ranks each, the slowest first.
struct SchedulePanel {
  std::string title;
  const Plan* plan;
};
std::string schedule_svg(const std::vector<SchedulePanel>& panels, const CostModel& cost, int max_ranks = 4);

}  // namespace sb
