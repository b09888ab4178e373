#pragma once

#include <cmath>
#include <string>

#include "report/report.h"
#include "tests/data/temporary_folder.h"

namespace sb {

// A run of `steps` steps on two ranks, as its logs would have it.
inline ReportInput example_run(int64_t steps, int stages) {
  ReportInput input;
  input.name = "example";
  input.run_config = "model:\n  path: somewhere\n";
  for (int64_t step = 1; step <= steps; ++step) {
    const auto at = static_cast<double>(step);
    auto& series = input.metrics.series;
    series["loss"][step] = 2 + 3 / at;
    series["tokens_per_second"][step] = 1000 + 10 * std::sin(at);
    series["step_ms"][step] = 100 + 5 * std::cos(at);
    series["predicted_step_ms"][step] = 101;
    series["coverage"][step] = 0.9 + 0.01 * std::sin(at);
    series["budget"][step] = 1024;
    series["planning_percent"][step] = 0.4;
    LoggedStep logged;
    Plan& plan = logged.plan;
    plan.step = step;
    plan.layers = 4;
    plan.baseline_us = 1000 * (60 + at);
    StepMeasurement measured;
    measured.step = step;
    measured.step_ns = 100'000'000;
    for (int r = 0; r < 2; ++r) {
      PlannedRank& rank = plan.ranks.emplace_back();
      auto& times = measured.ranks.emplace_back();
      for (int i = 0; i < 3; ++i) {
        PlannedMicroBatch& micro_batch = rank.micro_batches.emplace_back();
        micro_batch.sequences = {r * 3 + i};
        micro_batch.tokens = 1000 * (i + 1);
        micro_batch.budgets.assign(4, 1024);
        MicroBatchTimes& own = times.emplace_back();
        for (int s = 0; s < stages; ++s) {
          micro_batch.forward_us.push_back(5000 + 1000 * i);
          micro_batch.backward_us.push_back(9000 + 2000 * i);
          own.forward.push_back(5'100'000 + 1'000'000 * i);
          own.backward.push_back(9'200'000 + 2'000'000 * i);
        }
      }
    }
    plan.makespan_us = 51000;
    logged.in_order = plan;
    logged.in_order.makespan_us = plan.baseline_us;
    logged.measured = measured;
    input.plans.steps[step] = logged;
  }
  return input;
}

// What the report reads from a metrics.jsonl with this content.
inline RunMetrics parsed_metrics(const std::string& text) {
  TemporaryFolder folder;
  write_bytes(folder.path("metrics.jsonl"), text);
  return read_metrics(folder.path("metrics.jsonl"));
}

}  // namespace sb
