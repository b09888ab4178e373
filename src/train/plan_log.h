#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "balance/plan.h"
#include "train/step_planner.h"

namespace sb {

// One step as plan.jsonl has it.
struct LoggedStep {
  Plan plan;
  Plan in_order;                            // what the same sequences would have cost unbalanced; no ranks: not known
  double predicted_step_us = 0;             // makespan and what a step takes beyond it; 0: not known
  std::optional<StepMeasurement> measured;  // without coverage
};

// What is in a plan.jsonl, by step. A line that is damaged (it carries a checksum) or unfinished ends the useful part:
// `damage` then says what and where, and nothing after it is taken.
struct PlanRecord {
  std::map<int64_t, LoggedStep> steps;
  std::string damage;
};
PlanRecord read_plan_log(const std::filesystem::path& file);

// A plan on its way from rank 0 to the others, with a checksum. A damaged one, or one of another step, is an Error that
// ends the run: ranks that follow different plans would wait for each other.
std::string pack_plan(const Plan& plan);
Plan unpack_plan(const std::string& message, int64_t step);

// plan.jsonl, the record of what every step was told to do. Lines: {"step", "crc32c", "plan", "in_order",
// "predicted_step_us"} before a step, {"step", "measured"} after it. Every line is flushed.
class PlanLog {
 public:
  // Opens the file to append; with `keep`, its content is first replaced by these steps.
  explicit PlanLog(std::filesystem::path file, const PlanRecord* keep = nullptr);
  void plan(const LoggedStep& step);
  void measured(const StepMeasurement& measurement);

 private:
  struct Closer {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  void write(const std::string& line);
  std::filesystem::path file_;
  std::unique_ptr<std::FILE, Closer> stream_;
};

}  // namespace sb
