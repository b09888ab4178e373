#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <filesystem>

#include "core/errors.h"
#include "core/files/durable_file.h"
#include "core/thread_pool.h"
#include "data/files/token_file.h"
#include "plan/latency/measured_profiles.h"
#include "plan/latency/profile.h"
#include "plan/planner/plan_log.h"
#include "python/bindings/bindings.h"
#include "python/bindings/plan_object.h"
#include "report/report.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace sb::python {
namespace {

std::vector<std::string> profile_names() {
  std::vector<std::string> names = analytic_profiles();
  for (const MeasuredProfile& profile : measured_profiles())
    if (std::ranges::find(names, profile.name) == names.end()) names.emplace_back(profile.name);
  return names;
}

std::string profile_json(const std::string& name_or_path, const std::string& model) {
  return write_profile(find_profile(name_or_path, find_model_shape(model), {}));
}

// Microseconds of what was measured, [micro-batch][stage].
std::vector<std::vector<std::pair<double, double>>> measured_rank(const LoggedStep& step, size_t rank) {
  SB_USER_CHECK(step.measured && rank < step.measured->ranks.size(), "step {} has no measurement of rank {}",
                step.plan.step, rank);
  std::vector<std::vector<std::pair<double, double>>> times;
  for (const MicroBatchTimes& micro_batch : step.measured->ranks[rank]) {
    auto& stages = times.emplace_back();
    for (size_t s = 0; s < micro_batch.forward.size(); ++s)
      stages.emplace_back(static_cast<double>(micro_batch.forward[s]) / 1e3,
                          static_cast<double>(micro_batch.backward[s]) / 1e3);
  }
  return times;
}

std::string report_html(const std::filesystem::path& run, int64_t step) {
  const ReportInput input = read_run(run, step);
  SB_USER_CHECK(step == 0 || input.plans.steps.contains(step), "{} has no plan of step {}",
                (run / "plan.jsonl").string(), step);
  return write_report(input);
}

std::vector<int64_t> token_file_lengths(const std::string& path) {
  const std::unique_ptr<TokenFile> file = open_token_file(path);
  std::vector<int64_t> lengths;
  for (int64_t d = 0; d < file->documents(); ++d) lengths.push_back(file->length(d));
  return lengths;
}

void bind_plan_log(nb::module_& module) {
  nb::class_<LoggedStep>(module, "LoggedStep", "One step of a run's plan.jsonl.")
      .def_prop_ro("plan",
                   [](const LoggedStep& step) {
                     return PlanObject{std::make_shared<const Plan>(step.plan), nullptr};
                   })
      .def_prop_ro(
          "in_order",
          [](const LoggedStep& step) -> std::optional<PlanObject> {
            if (step.in_order.ranks.empty()) return std::nullopt;
            return PlanObject{std::make_shared<const Plan>(step.in_order), nullptr};
          },
          "What the same sequences would have cost unbalanced.")
      .def_ro("predicted_step_us", &LoggedStep::predicted_step_us, "0: not known.")
      .def_prop_ro("measured_step_us",
                   [](const LoggedStep& step) -> std::optional<double> {
                     if (!step.measured) return std::nullopt;
                     return static_cast<double>(step.measured->step_ns) / 1e3;
                   })
      .def("measured_us", measured_rank, "rank"_a,
           "(forward, backward) of every micro-batch of a rank, on every stage.");
  nb::class_<PlanRecord>(module, "PlanRecord")
      .def_ro("steps", &PlanRecord::steps)
      .def_ro("damage", &PlanRecord::damage, "What ends the useful part of the file; \"\": nothing.");
}

}  // namespace

void bind_run_files(nb::module_& module) {
  using Released = nb::call_guard<nb::gil_scoped_release>;
  bind_plan_log(module);
  nb::class_<RunMetrics>(module, "RunMetrics")
      .def_ro("series", &RunMetrics::series)
      .def_ro("lines", &RunMetrics::lines)
      .def_ro("skipped", &RunMetrics::skipped, "Lines that are no objects with a step.");
  module.def("read_metrics", read_metrics, "file"_a, Released());
  module.def("read_plan_log", read_plan_log, "file"_a, Released());
  module.def("report_html", report_html, "run"_a, "step"_a, Released());
  module.def(
      "replace_file", [](const std::filesystem::path& file, const std::string& text) { replace_file(file, text); },
      "file"_a, "text"_a, "Writes a file whole or not at all.");
  module.def("token_file_lengths", token_file_lengths, "path"_a, Released());
  module.def("profile_names", profile_names);
  module.def("profile_json", profile_json, "name_or_path"_a, "model"_a);
  module.def("available_cores", available_cores);
}

}  // namespace sb::python
