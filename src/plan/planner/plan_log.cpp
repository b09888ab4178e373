#include "plan/planner/plan_log.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "core/errors.h"
#include "core/files/crc32c.h"
#include "core/files/durable_file.h"
#include "core/log.h"

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

// Either of both.
struct PlanLine {
  int64_t step = 0;
  std::optional<LoggedStep> planned;
  std::optional<StepMeasurement> measured;
};

PlanLine parse_line(const std::string& line, const std::string& where) {
  // Deeper nesting than a plan has would only cost stack.
  const auto shallow = [](int depth, Json::parse_event_t, Json&) { return depth < kDeepest; };
  const Json json = Json::parse(line, shallow, /*allow_exceptions=*/false);
  SB_USER_CHECK(json.is_object() && json.contains("step") && json["step"].is_number_integer(),
                "{}: is not a line of a plan log", where);
  PlanLine result;
  const int64_t step = result.step = json["step"].get<int64_t>();
  if (json.contains("measured")) {
    result.measured = parse_measured(step, json["measured"], where);
    return result;
  }
  SB_USER_CHECK(json.contains("plan") && json.contains("crc32c") && json["crc32c"].is_string(),
                "{}: has neither a plan nor a measurement", where);
  const std::string plan = json["plan"].dump();
  SB_USER_CHECK(json["crc32c"].get<std::string>() == checksum(plan), "{}: the plan does not match its checksum {}",
                where, json["crc32c"].get<std::string>());
  LoggedStep& logged = result.planned.emplace();
  logged.plan = parse_plan(plan, where);
  SB_USER_CHECK(logged.plan.step == step, "{}: the line is for step {}, but its plan is for step {}", where, step,
                logged.plan.step);
  if (json.contains("in_order")) logged.in_order = parse_plan(json["in_order"].dump(), where);
  if (json.contains("predicted_step_us") && json["predicted_step_us"].is_number())
    logged.predicted_step_us = json["predicted_step_us"].get<double>();
  return result;
}

std::string line_name(const std::filesystem::path& file, const PlanLinePlace& place) {
  if (place.number == 0) return fmt::format("{}, the line at byte {}", file.string(), place.offset);
  return fmt::format("{}, line {}", file.string(), place.number);
}

std::ifstream open_log(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  SB_USER_CHECK(in.good(), "{}: cannot be read", file.string());
  return in;
}

// Gives the lines up to the first that is not sound, and says what is wrong with that one; "": nothing. Plans of
// another version are not damage: OtherPlanVersion. `take(line, text, place)`. Begins where the file is, which is
// `place`.
template <typename Take>
std::string read_lines(std::ifstream& in, const std::filesystem::path& file, const Take& take,
                       PlanLinePlace place = {0, 1}) {
  std::set<int64_t> planned;
  std::string text;
  for (; std::getline(in, text); place.number += place.number > 0) {
    const std::string where = line_name(file, place);
    if (in.eof()) return where + ": the line is not finished";
    try {
      PlanLine line = parse_line(text, where);
      if (line.planned) planned.insert(line.step);
      SB_USER_CHECK(planned.contains(line.step), "{}: step {} was measured but not planned", where, line.step);
      take(std::move(line), text, place);
    } catch (const OtherPlanVersion&) {
      throw;
    } catch (const UserError& error) {
      return error.what();
    }
    place.offset += std::ssize(text) + 1;
  }
  // Lines that the disk does not give are not lines that there are not.
  SB_USER_CHECK(!in.bad(), "{}: cannot be read to its end", file.string());
  return "";
}

// The same for a reader who only wants to show them: what cannot be read is damage, whatever the reason.
template <typename Take>
std::string read_shown_lines(std::ifstream& in, const std::filesystem::path& file, const Take& take) {
  try {
    return read_lines(in, file, take);
  } catch (const OtherPlanVersion& error) {
    return error.what();
  }
}

// Again what read_lines() has given from this place. UserError when it is not there any more.
PlanLine read_line_at(std::ifstream& in, const std::filesystem::path& file, const PlanLinePlace& place, int64_t step,
                      bool planned) {
  const std::string where = line_name(file, place);
  std::string text;
  in.clear();
  in.seekg(place.offset);
  const bool whole = std::getline(in, text) && !in.eof();
  PlanLine line = whole ? parse_line(text, where) : PlanLine();
  SB_USER_CHECK(line.step == step && (planned ? line.planned.has_value() : line.measured.has_value()),
                "{}: the {} of step {} has disappeared from the file", where, planned ? "plan" : "measurement", step);
  return line;
}

// The first ones of a file as they are.
void copy_bytes(std::ifstream& in, std::streamoff count, DurableFile& to, const std::filesystem::path& file) {
  std::vector<char> piece(1 << 20);
  while (count > 0) {
    in.read(piece.data(), std::min<std::streamoff>(count, std::ssize(piece)));
    SB_USER_CHECK(in.gcount() > 0, "{}: cannot be read to its end", file.string());
    to.write(piece.data(), static_cast<size_t>(in.gcount()));
    count -= in.gcount();
  }
}

// Where the line begins that ends before `end`.
std::streamoff line_begin(std::ifstream& in, std::streamoff end) {
  std::vector<char> piece(1 << 16);
  --end;  // its own end
  while (end > 0) {
    const std::streamoff size = std::min<std::streamoff>(end, std::ssize(piece)), begin = end - size;
    in.seekg(begin);
    in.read(piece.data(), size);
    for (std::streamoff i = in.gcount(); i > 0; --i)
      if (piece[static_cast<size_t>(i - 1)] == '\n') return begin + i;
    end = begin;
  }
  return 0;
}

// Where the last plan of a step before `step` stands, found from the end: what concerns later steps comes after it,
// since a run plans its steps in order. The beginning of the file where that is not certain, as with a line that is not
// sound; an unfinished one at the end is.
std::streamoff find_end_of_log(std::ifstream& in, const std::filesystem::path& file, int64_t step) {
  if (step <= 1) return 0;
  in.seekg(0, std::ios::end);
  std::streamoff end = in.tellg();
  int64_t next = std::numeric_limits<int64_t>::max();  // the step planned after
  std::string text;
  for (bool last = true; end > 0; last = false) {
    const std::streamoff begin = line_begin(in, end);
    in.clear();
    in.seekg(begin);
    std::getline(in, text);
    const bool unfinished = in.eof();
    end = begin;
    if (unfinished && last) continue;
    try {
      const PlanLine line = parse_line(text, file.string());
      if (!line.planned) continue;
      if (line.step >= std::exchange(next, line.step)) break;
      if (line.step < step) return begin;
    } catch (const UserError&) {
      break;
    }
  }
  return 0;
}

}  // namespace

PlanRecord read_plan_log(const std::filesystem::path& file) {
  std::ifstream in = open_log(file);
  PlanRecord record;
  record.damage = read_shown_lines(in, file, [&](PlanLine line, const std::string&, const PlanLinePlace&) {
    if (line.planned)
      record.steps[line.step] = std::move(*line.planned);
    else
      record.steps[line.step].measured = std::move(line.measured);
  });
  return record;
}

PlanRecord read_plan_overview(const std::filesystem::path& file, int64_t micro_batches,
                              const std::function<std::vector<int64_t>(const PlanRecord&)>& choose) {
  struct Lines {
    PlanLinePlace plan;
    std::optional<PlanLinePlace> measured;
  };
  std::map<int64_t, Lines> places;
  std::map<int64_t, int64_t> whole;  // steps that have everything, and how many measured micro-batches
  int64_t held = 0;
  PlanRecord record;
  std::ifstream in = open_log(file);
  record.damage = read_shown_lines(in, file, [&](PlanLine line, const std::string&, const PlanLinePlace& place) {
    LoggedStep& step = record.steps[line.step];
    if (line.planned) {
      step = std::move(*line.planned);
      places[line.step] = {place, std::nullopt};
      held -= std::exchange(whole[line.step], 0);
    } else {
      places[line.step].measured = place;
      const auto own = whole.find(line.step);
      if (own == whole.end()) return;
      held -= std::exchange(own->second, 0);
      for (const auto& rank : line.measured->ranks) own->second += std::ssize(rank);
      held += own->second;
      step.measured = std::move(line.measured);
    }
    while (!whole.empty() && held - whole.begin()->second >= micro_batches) {
      LoggedStep& oldest = record.steps[whole.begin()->first];
      oldest.plan.ranks = std::vector<PlannedRank>();  // gives its memory back
      oldest.in_order = Plan();
      oldest.measured.reset();
      held -= whole.begin()->second;
      whole.erase(whole.begin());
    }
  });

  for (const int64_t step : choose(record)) {
    if (whole.contains(step)) continue;
    const Lines& lines = places.at(step);
    record.steps[step] = *read_line_at(in, file, lines.plan, step, /*planned=*/true).planned;
    if (lines.measured)
      record.steps[step].measured = read_line_at(in, file, *lines.measured, step, /*planned=*/false).measured;
  }
  return record;
}

RecordedPlans::RecordedPlans(std::filesystem::path file, int64_t step) : file_(std::move(file)), in_(open_log(file_)) {
  begin_ = find_end_of_log(in_, file_, step);
  in_.clear();
  in_.seekg(begin_);
  read({}, std::chrono::hours(1));
}

RecordedPlans::RecordedPlans(std::filesystem::path file, const Visit& visit, std::chrono::milliseconds report)
    : file_(std::move(file)), in_(open_log(file_)) {
  read(visit, report);
}

void RecordedPlans::read(const Visit& visit, std::chrono::milliseconds report) {
  std::error_code unknown;
  const auto bytes = static_cast<double>(std::filesystem::file_size(file_, unknown));
  auto reported = std::chrono::steady_clock::now();
  const auto take = [&](const PlanLine& line, const std::string&, const PlanLinePlace& place) {
    if (!line.planned) return;
    places_[line.step] = place;
    if (visit) visit(line.planned->plan, line_name(file_, place));
    if (const auto now = std::chrono::steady_clock::now(); now - reported >= report) {
      log::info("{}: {} plans read, {:.0f}%", file_.string(), places_.size(),
                100 * static_cast<double>(place.offset) / bytes);
      reported = now;
    }
  };
  damage_ = read_lines(in_, file_, take, first_place());
  if (!empty()) last_in_file_ = last();
}

void RecordedPlans::require(int64_t step) const {
  SB_USER_CHECK(contains(step),
                "{}: has no plan for step {}; {}{}. balance.replay needs one for every step up to train.max_steps: "
                "name a complete log, lower train.max_steps, or remove it",
                file_.string(), step,
                empty() ? std::string("it has none") : fmt::format("it has steps {} to {}", first(), last()),
                damage_.empty() ? "" : "; " + damage_);
}

std::string RecordedPlans::place(int64_t step) const {
  return line_name(file_, places_.at(step));
}

LoggedStep RecordedPlans::read(int64_t step) {
  return *read_line_at(in_, file_, places_.at(step), step, /*planned=*/true).planned;
}

void RecordedPlans::forget_before(int64_t step) {
  places_.erase(places_.begin(), places_.lower_bound(step));
  close_if_empty();
}

void RecordedPlans::forget_from(int64_t step) {
  places_.erase(places_.lower_bound(step), places_.end());
  forgotten_from_ = std::min(forgotten_from_, step);
  close_if_empty();
}

void RecordedPlans::close_if_empty() {
  if (empty()) in_.close();  // a file that was replaced takes room on the disk until then
}

void RecordedPlans::trim_file(int64_t measured_end) const {
  if (damage_.empty() && last_in_file_ < std::min(forgotten_from_, measured_end)) return;
  std::ifstream in = open_log(file_);
  replace_file(file_, [&](DurableFile& kept) {
    copy_bytes(in, begin_, kept, file_);
    const auto take = [&](const PlanLine& line, const std::string& text, const PlanLinePlace&) {
      if (line.step >= forgotten_from_ || (line.measured && line.step >= measured_end)) return;
      kept.write((text + '\n').data(), text.size() + 1);
    };
    read_lines(in, file_, take, first_place());
  });
}

std::string pack_plan(const Plan& plan) {
  const std::string text = write_plan(plan);
  return checksum(text) + text;
}

Plan unpack_plan(const std::string& message, int64_t step) {
  constexpr size_t kChecksum = 8;
  const std::string text = message.size() > kChecksum ? message.substr(kChecksum) : "";
  if (text.empty() || message.substr(0, kChecksum) != checksum(text))
    throw Error(fmt::format("the plan of step {} arrived damaged from rank 0: its checksum does not match", step));
  Plan plan = parse_plan(text, "the plan from rank 0");
  if (plan.step != step)
    throw Error(
        fmt::format("the plan of step {} arrived at the start of step {}: the ranks are out of sync", plan.step, step));
  return plan;
}

PlanLog::PlanLog(const std::filesystem::path& file) : file_(file, RecordFile::Start::append) {}

void PlanLog::plan(const LoggedStep& step) {
  file_.write(plan_line(step));
}

void PlanLog::measured(const StepMeasurement& measurement) {
  file_.write(measured_line(measurement));
}

}  // namespace sb
