#include "train/plan_log.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/durable_file.h"
#include "core/errors.h"
#include "train/crc32c.h"

namespace sb {
namespace {

using Json = nlohmann::ordered_json;
constexpr int kDeepest = 12;

std::string checksum(const std::string& text) {
  return fmt::format("{:08x}", crc32c(0, text.data(), text.size()));
}

std::string plan_line(const LoggedStep& step) {
  const std::string plan = write_plan(step.plan);
  std::string line = fmt::format(R"({{"step":{},"crc32c":"{}","predicted_step_us":{},"plan":{})", step.plan.step,
                                 checksum(plan), step.predicted_step_us, plan);
  if (!step.in_order.ranks.empty()) line += R"(,"in_order":)" + write_plan(step.in_order);
  return line + "}\n";
}

std::string measured_line(const StepMeasurement& measurement) {
  Json ranks = Json::array();
  for (const auto& micro_batches : measurement.ranks) {
    Json rank = Json::array();
    for (const MicroBatchTimes& times : micro_batches)
      rank.push_back({{"forward_ns", times.forward}, {"backward_ns", times.backward}});
    ranks.push_back(std::move(rank));
  }
  const Json measured = {{"step_ns", measurement.step_ns}, {"ranks", std::move(ranks)}};
  return Json{{"step", measurement.step}, {"measured", measured}}.dump() + "\n";
}

std::vector<int64_t> nanoseconds(const Json& json, const char* key, const std::string& where) {
  std::vector<int64_t> out;
  SB_USER_CHECK(json.is_object() && json.contains(key) && json[key].is_array(), "{}: `{}` is missing", where, key);
  for (const Json& item : json[key]) {
    SB_USER_CHECK(item.is_number_integer() && item.get<int64_t>() >= 0, "{}: `{}` must hold times", where, key);
    out.push_back(item.get<int64_t>());
  }
  return out;
}

StepMeasurement parse_measured(int64_t step, const Json& json, const std::string& where) {
  StepMeasurement measurement;
  measurement.step = step;
  SB_USER_CHECK(json.is_object() && json.contains("step_ns") && json["step_ns"].is_number_integer() &&
                    json.contains("ranks") && json["ranks"].is_array(),
                "{}: `measured` needs step_ns and ranks", where);
  measurement.step_ns = json["step_ns"].get<int64_t>();
  for (const Json& rank : json["ranks"]) {
    SB_USER_CHECK(rank.is_array(), "{}: `ranks` must hold lists of micro-batches", where);
    auto& micro_batches = measurement.ranks.emplace_back();
    for (const Json& item : rank)
      micro_batches.push_back({nanoseconds(item, "forward_ns", where), nanoseconds(item, "backward_ns", where)});
  }
  return measurement;
}

void parse_line(const std::string& line, const std::string& where, PlanRecord& record) {
  // Deeper nesting than a plan has would only cost stack.
  const auto shallow = [](int depth, Json::parse_event_t, Json&) { return depth < kDeepest; };
  const Json json = Json::parse(line, shallow, /*allow_exceptions=*/false);
  SB_USER_CHECK(json.is_object() && json.contains("step") && json["step"].is_number_integer(),
                "{}: is not a line of a plan log", where);
  const int64_t step = json["step"].get<int64_t>();
  if (json.contains("measured")) {
    const auto found = record.steps.find(step);
    SB_USER_CHECK(found != record.steps.end(), "{}: step {} was measured but not planned", where, step);
    found->second.measured = parse_measured(step, json["measured"], where);
    return;
  }
  SB_USER_CHECK(json.contains("plan") && json.contains("crc32c") && json["crc32c"].is_string(),
                "{}: has neither a plan nor a measurement", where);
  const std::string plan = json["plan"].dump();
  SB_USER_CHECK(json["crc32c"].get<std::string>() == checksum(plan), "{}: the plan does not have its checksum {}",
                where, json["crc32c"].get<std::string>());
  LoggedStep logged;
  logged.plan = parse_plan(plan, where);
  SB_USER_CHECK(logged.plan.step == step, "{}: the line is of step {}, its plan of {}", where, step, logged.plan.step);
  if (json.contains("in_order")) logged.in_order = parse_plan(json["in_order"].dump(), where);
  if (json.contains("predicted_step_us") && json["predicted_step_us"].is_number())
    logged.predicted_step_us = json["predicted_step_us"].get<double>();
  record.steps[step] = std::move(logged);
}

}  // namespace

PlanRecord read_plan_log(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  SB_USER_CHECK(in.good(), "{}: cannot be read", file.string());
  PlanRecord record;
  std::string line;
  for (int64_t number = 1; std::getline(in, line); ++number) {
    const std::string where = fmt::format("{}, line {}", file.string(), number);
    if (in.eof()) {
      record.damage = where + ": the line is not finished";
      break;
    }
    try {
      parse_line(line, where, record);
    } catch (const UserError& error) {
      record.damage = error.what();
      break;
    }
  }
  return record;
}

std::string pack_plan(const Plan& plan) {
  const std::string text = write_plan(plan);
  return checksum(text) + text;
}

Plan unpack_plan(const std::string& message, int64_t step) {
  constexpr size_t kChecksum = 8;
  const std::string text = message.size() > kChecksum ? message.substr(kChecksum) : "";
  if (text.empty() || message.substr(0, kChecksum) != checksum(text))
    throw Error(fmt::format("the plan of step {} came damaged from rank 0: its checksum does not fit", step));
  Plan plan = parse_plan(text, "the plan from rank 0");
  if (plan.step != step)
    throw Error(fmt::format("a plan of step {} came where step {} begins: the ranks are out of step", plan.step, step));
  return plan;
}

PlanLog::PlanLog(std::filesystem::path file, const PlanRecord* keep) : file_(std::move(file)) {
  if (keep != nullptr) {
    std::string text;
    for (const auto& [step, logged] : keep->steps) {
      text += plan_line(logged);
      if (logged.measured) text += measured_line(*logged.measured);
    }
    replace_file(file_, text);
  }
  stream_.reset(std::fopen(file_.c_str(), "ab"));
  SB_USER_CHECK(stream_ != nullptr, "{}: cannot be opened: {}", file_.string(), std::strerror(errno));
}

void PlanLog::plan(const LoggedStep& step) {
  write(plan_line(step));
}

void PlanLog::measured(const StepMeasurement& measurement) {
  write(measured_line(measurement));
}

void PlanLog::write(const std::string& line) {
  const bool written = std::fwrite(line.data(), 1, line.size(), stream_.get()) == line.size();
  SB_USER_CHECK(written && std::fflush(stream_.get()) == 0, "{}: cannot write: {}", file_.string(),
                std::strerror(errno));
}

}  // namespace sb
