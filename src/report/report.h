#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "plan/planner/plan_log.h"
#include "run/logs/event_log.h"

namespace sb {

// metrics.jsonl as numbers over steps. Whatever the file holds, reading it ends: lines that are no objects with a step
// are counted and left out, values that are no finite numbers are not there.
struct RunMetrics {
  std::map<std::string, std::map<int64_t, double>> series;
  int64_t lines = 0, skipped = 0;
};
RunMetrics read_metrics(const std::filesystem::path& file);

// What a report is made of; everything but the metrics may be missing.
struct ReportInput {
  std::string name;  // of the run
  RunMetrics metrics;
  PlanRecord plans;        // whole, or as read_plan_overview() reads them
  std::string run_config;  // run.yaml
  std::string machine;     // machine.txt: what it ran on, in words
  std::vector<RunEvent> events;
  int64_t step = 0;  // whose schedule is drawn first; 0: one with a typical speed-up
};

// One HTML page that needs nothing else: pictures, styles and scripts are in it, and a content policy forbids it to
// load anything.
std::string write_report(const ReportInput& input);

// Reads a run's directory, of its plans as much as a report shows. UserError when it holds no metrics.jsonl.
ReportInput read_run(const std::filesystem::path& directory, int64_t step = 0);

}  // namespace sb
