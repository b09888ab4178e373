#include "report/report_schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "report/schedule_picture.h"

namespace sb {
namespace {

constexpr size_t kMostRanks = 4096, kMostMicroBatches = 4096;
constexpr double kLongestUs = 1e13;

bool sane(double us) {
  return std::isfinite(us) && us >= 0 && us <= kLongestUs;
}

// Pipeline stages of a plan that can be drawn; 0: it cannot.
size_t drawable_stages(const Plan& plan) {
  if (plan.ranks.empty() || plan.ranks.size() > kMostRanks || !sane(plan.makespan_us) || plan.makespan_us <= 0)
    return 0;
  if (plan.ranks[0].micro_batches.empty()) return 0;
  const size_t stages = plan.ranks[0].micro_batches[0].forward_us.size();
  if (stages == 0 || static_cast<int64_t>(stages) > plan.layers) return 0;
  for (const PlannedRank& rank : plan.ranks) {
    if (rank.micro_batches.empty() || rank.micro_batches.size() > kMostMicroBatches) return 0;
    for (const PlannedMicroBatch& micro_batch : rank.micro_batches) {
      if (micro_batch.forward_us.size() != stages || micro_batch.backward_us.size() != stages) return 0;
      for (size_t s = 0; s < stages; ++s)
        if (!sane(micro_batch.forward_us[s]) || !sane(micro_batch.backward_us[s])) return 0;
    }
  }
  return stages;
}

// The plan with the times that were measured; nothing when they are of another shape.
std::optional<Plan> as_measured(const LoggedStep& step, size_t stages) {
  if (!step.measured || step.measured->ranks.size() != step.plan.ranks.size()) return std::nullopt;
  Plan plan = step.plan;
  for (size_t r = 0; r < plan.ranks.size(); ++r) {
    auto& micro_batches = plan.ranks[r].micro_batches;
    const auto& measured = step.measured->ranks[r];
    if (measured.size() != micro_batches.size()) return std::nullopt;
    for (size_t i = 0; i < measured.size(); ++i) {
      if (measured[i].forward.size() != stages || measured[i].backward.size() != stages) return std::nullopt;
      for (size_t s = 0; s < stages; ++s) {
        micro_batches[i].forward_us[s] = static_cast<double>(measured[i].forward[s]) / 1e3;
        micro_batches[i].backward_us[s] = static_cast<double>(measured[i].backward[s]) / 1e3;
        if (!sane(micro_batches[i].forward_us[s]) || !sane(micro_batches[i].backward_us[s])) return std::nullopt;
      }
    }
  }
  return plan;
}

// Makespan and bubbles of what is drawn: operations alone, without transfers and reductions.
void summarize(Plan& plan, const CostModel& cost) {
  double busy = 0, longest = 0;
  for (size_t r = 0; r < plan.ranks.size(); ++r) {
    plan.ranks[r].makespan_us = schedule_of(plan, cost, static_cast<int>(r)).makespan;
    longest = std::max(longest, plan.ranks[r].makespan_us);
    for (const PlannedMicroBatch& micro_batch : plan.ranks[r].micro_batches)
      for (size_t s = 0; s < micro_batch.forward_us.size(); ++s)
        busy += micro_batch.forward_us[s] + micro_batch.backward_us[s];
  }
  plan.makespan_us = std::max(longest, 1e-3);
  plan.bubble_share = 1 - busy / (plan.makespan_us * static_cast<double>(plan.ranks.size()) * cost.stages());
}

}  // namespace

std::optional<double> planned_speedup(const LoggedStep& step) {
  const double before = step.plan.baseline_us, after = step.plan.makespan_us;
  if (!sane(before) || !sane(after) || before <= 0 || after <= 0) return std::nullopt;
  return before / after;
}

std::vector<int64_t> shown_steps(const PlanRecord& plans, int64_t step) {
  std::vector<std::pair<double, int64_t>> gains;
  for (const auto& [number, logged] : plans.steps)
    if (const auto gain = planned_speedup(logged)) gains.emplace_back(*gain, number);
  std::sort(gains.begin(), gains.end());
  std::vector<int64_t> steps;
  const auto add = [&](int64_t number) {
    if (std::find(steps.begin(), steps.end(), number) == steps.end()) steps.push_back(number);
  };
  if (step > 0 && plans.steps.contains(step)) add(step);
  if (!gains.empty()) {
    add(gains[gains.size() / 2].second);
    add(gains.back().second);
    add(gains.front().second);
  }
  return steps;
}

std::string schedule_figure(const LoggedStep& step) {
  const size_t stages = drawable_stages(step.plan);
  if (stages == 0) return {};
  // Only the layout matters here: what is drawn has its times.
  ModelShape shape;
  shape.layers = step.plan.layers;
  shape.hidden = shape.head_dim = shape.intermediate = 64;
  shape.heads = shape.kv_heads = 1;
  shape.vocabulary = 2;
  const LatencyModel latency(analytic_profile("h200-analytic", shape));
  Layout layout;
  layout.dp = static_cast<int>(step.plan.ranks.size());
  layout.pp = static_cast<int>(stages);
  layout.comm = false;
  const CostModel cost(latency, AttentionSpec{}, layout);

  Plan before = step.in_order, after = step.plan;
  std::optional<Plan> measured = as_measured(step, stages);
  std::vector<SchedulePanel> panels;
  if (drawable_stages(before) == stages) {
    summarize(before, cost);
    panels.push_back({"in order, predicted", &before});
  }
  summarize(after, cost);
  panels.push_back({"balanced, predicted", &after});
  if (measured) {
    summarize(*measured, cost);
    panels.push_back({"balanced, measured", &*measured});
  }
  return fmt::format("<figure class=\"schedule\" data-step=\"{0}\"><figcaption>step {0}</figcaption>\n{1}</figure>\n",
                     step.plan.step, schedule_svg(panels, cost));
}

}  // namespace sb
