#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/errors.h"
#include "core/files/regular_file.h"
#include "report/report.h"
#include "report/report_schedule.h"

namespace sb {
namespace {

// A line of metrics has a few hundred bytes; what is much longer is none.
constexpr size_t kLongestLine = size_t{1} << 20;
constexpr int kDeepest = 4;
constexpr size_t kMostSeries = 4096;

void take_line(const std::string& line, RunMetrics& metrics) {
  ++metrics.lines;
  // Deeply nested text would cost stack; nothing below the first levels is of interest.
  const auto shallow = [](int depth, nlohmann::json::parse_event_t, nlohmann::json&) { return depth < kDeepest; };
  const nlohmann::json object =
      line.size() <= kLongestLine ? nlohmann::json::parse(line, shallow, /*allow_exceptions=*/false) : nlohmann::json();
  const auto step = object.is_object() ? object.find("step") : object.end();
  if (!object.is_object() || step == object.end() || !step->is_number_integer() || step->get<int64_t>() < 0) {
    ++metrics.skipped;
    return;
  }
  for (const auto& [name, value] : object.items()) {
    if (name == "step" || !value.is_number() || !std::isfinite(value.get<double>())) continue;
    if (metrics.series.size() >= kMostSeries && !metrics.series.contains(name)) continue;
    metrics.series[name][step->get<int64_t>()] = value.get<double>();
  }
}

}  // namespace

RunMetrics read_metrics(const std::filesystem::path& file) {
  std::istringstream in(read_regular_file(file));
  RunMetrics metrics;
  for (std::string line; std::getline(in, line);)
    if (!line.empty()) take_line(line, metrics);
  return metrics;
}

ReportInput read_run(const std::filesystem::path& directory, int64_t step) {
  const std::filesystem::path metrics = directory / "metrics.jsonl";
  SB_USER_CHECK(std::filesystem::exists(metrics),
                "{}: has no metrics.jsonl; name the directory of a run (its train.output_dir)", directory.string());
  ReportInput input;
  const std::filesystem::path whole = std::filesystem::absolute(directory).lexically_normal();
  input.name = (whole.has_filename() ? whole : whole.parent_path()).filename().string();  // "runs/a" and "runs/a/"
  if (input.name.empty()) input.name = directory.string();
  input.metrics = read_metrics(metrics);
  input.step = step;
  if (std::filesystem::exists(directory / "plan.jsonl")) {
    check_regular_file(directory / "plan.jsonl");
    input.plans = read_plan_overview(directory / "plan.jsonl", kMostMicroBatchesShown,
                                     [&](const PlanRecord& plans) { return shown_steps(plans, step); });
  }
  if (std::filesystem::exists(directory / "run.yaml")) input.run_config = read_regular_file(directory / "run.yaml");
  if (std::filesystem::exists(directory / "machine.txt")) {
    input.machine = read_regular_file(directory / "machine.txt");
    input.machine.resize(std::min(input.machine.find('\n'), input.machine.size()));  // a table of ranks follows
  }
  input.events = read_events(directory);
  return input;
}

}  // namespace sb
