#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/files/record_file.h"
#include "plan/plan.h"
#include "plan/planner/step_planner.h"

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
// The same of a log of any length in little memory: every step has what is predicted of it as a whole; ranks,
// `in_order` and `measured` are there of the last steps alone, as many as it takes for so many measured micro-batches,
// and of those that `choose` names when it has seen the others.
PlanRecord read_plan_overview(const std::filesystem::path& file, int64_t micro_batches,
                              const std::function<std::vector<int64_t>(const PlanRecord&)>& choose);

// Where a line of a plan.jsonl stands.
struct PlanLinePlace {
  std::streamoff offset = 0;
  int64_t number = 0;  // from 1; 0: not known
};

// The plans of a plan.jsonl, which stay in the file: a long run has gigabytes of them, and a planner wants one at a
// time. The file is read once to learn where they stand and whether it is damaged. It stays open, so that it may be
// replaced meanwhile.
class RecordedPlans {
 public:
  // Sees every plan as the file is read, a step's last one last; `place` is its file and line.
  using Visit = std::function<void(const Plan& plan, const std::string& place)>;

  // What takes long says how far it is, this often.
  explicit RecordedPlans(std::filesystem::path file, const Visit& visit = {},
                         std::chrono::milliseconds report = std::chrono::seconds(5));
  // Of the steps from this one on, and the one before: reads the end of a run's own log alone, however long it is.
  // Where that end is in doubt it is read whole.
  RecordedPlans(std::filesystem::path file, int64_t step);

  const std::filesystem::path& file() const { return file_; }
  const std::string& damage() const { return damage_; }
  bool empty() const { return places_.empty(); }
  // Of those not forgotten.
  bool contains(int64_t step) const { return places_.contains(step); }
  int64_t first() const { return places_.begin()->first; }
  int64_t last() const { return places_.rbegin()->first; }
  // UserError when there is no plan of this step.
  void require(int64_t step) const;
  // File and line of a step's plan, for messages.
  std::string place(int64_t step) const;
  // Without what was measured. UserError when the line is not there any more.
  LoggedStep read(int64_t step);
  void forget_before(int64_t step);
  void forget_from(int64_t step);
  // Writes the file anew, without what is damaged, what was forgotten with forget_from() and what was measured from
  // step `measured_end` on. What was appended meanwhile stays.
  void trim_file(int64_t measured_end) const;

 private:
  void read(const Visit& visit, std::chrono::milliseconds report);
  // The first line that was read.
  PlanLinePlace first_place() const { return {begin_, begin_ == 0 ? 1 : 0}; }
  void close_if_empty();
  std::filesystem::path file_;
  std::ifstream in_;
  std::streamoff begin_ = 0;  // nothing before it was read
  std::map<int64_t, PlanLinePlace> places_;
  std::string damage_;
  int64_t last_in_file_ = 0;
  int64_t forgotten_from_ = std::numeric_limits<int64_t>::max();
};

// A plan on its way from rank 0 to the others, with a checksum. A damaged one, or one of another step, is an Error that
// ends the run: ranks that follow different plans would wait for each other.
std::string pack_plan(const Plan& plan);
Plan unpack_plan(const std::string& message, int64_t step);

// plan.jsonl, the record of what every step was told to do. Lines: {"step", "crc32c", "plan", "in_order",
// "predicted_step_us"} before a step, {"step", "measured"} after it. Every line is flushed.
class PlanLog {
 public:
  // Opens the file to append.
  explicit PlanLog(const std::filesystem::path& file);
  void plan(const LoggedStep& step);
  void measured(const StepMeasurement& measurement);

 private:
  RecordFile file_;
};

}  // namespace sb
