#include "run/logs/event_log.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <exception>
#include <functional>
#include <nlohmann/json.hpp>
#include <sstream>

#include "comm/host_name.h"
#include "core/files/record_file.h"
#include "core/files/regular_file.h"
#include "core/log.h"

namespace sb {
namespace {

namespace fs = std::filesystem;

constexpr const char *kEvents = "events.jsonl", *kMetrics = "metrics.jsonl";
constexpr int64_t kLongestLog = int64_t{1} << 32;

std::string now_text() {
  return fmt::format("{:%Y-%m-%dT%H:%M:%S}", fmt::gmtime(std::time(nullptr)));
}

void for_lines(const fs::path& file, const std::function<void(const nlohmann::json&)>& take) {
  if (!fs::exists(file)) return;
  std::istringstream in(read_regular_file(file, kLongestLog));
  for (std::string line; std::getline(in, line);) {
    const nlohmann::json object = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (object.is_object()) take(object);
  }
}

int64_t integer(const nlohmann::json& object, const char* key, int64_t otherwise) {
  const auto found = object.find(key);
  return found != object.end() && found->is_number_integer() ? found->get<int64_t>() : otherwise;
}
double number(const nlohmann::json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_number() ? found->get<double>() : 0.0;
}
std::string text(const nlohmann::json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

// Takes (step, seconds) of every step in the record; validations are none.
void for_steps(const fs::path& directory, const std::function<void(int64_t, double)>& take) {
  for_lines(directory / kMetrics, [&](const nlohmann::json& object) {
    if (object.contains("step_ms")) take(integer(object, "step", 0), 1e-3 * number(object, "step_ms"));
  });
}

int64_t last_step(const fs::path& directory) {
  int64_t last = 0;
  for_steps(directory, [&](int64_t step, double) { last = std::max(last, step); });
  return last;
}

// Since the file was written to.
double age_seconds(const fs::path& file) {
  struct stat found = {};
  if (::stat(file.c_str(), &found) != 0) return 0;
  return std::max(0.0, std::difftime(std::time(nullptr), found.st_mtime));
}

}  // namespace

void append_event(const fs::path& directory, RunEvent event) noexcept {
  try {
    if (!fs::exists(directory / kMetrics)) return;
    if (event.time.empty()) event.time = now_text();
    if (event.host.empty()) event.host = host_name();
    if (event.step == 0 && event.event != "resumed") event.step = last_step(directory);
    nlohmann::ordered_json object = {{"time", event.time}, {"event", event.event}, {"host", event.host}};
    if (event.rank >= 0) object["rank"] = event.rank;
    object["step"] = event.step;
    if (!event.reason.empty()) object["reason"] = event.reason;
    if (event.event == "resumed") {
      object["steps_lost"] = event.steps_lost;
      object["seconds_lost"] = event.seconds_lost;
    }
    RecordFile file(directory / kEvents, RecordFile::Start::append);
    file.write(object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
    file.close();
  } catch (const std::exception& error) {
    log::warning("{}: {}", (directory / kEvents).string(), error.what());
  }
}

void append_event_once(const fs::path& directory, const RunEvent& event) noexcept {
  try {
    constexpr double kSameMoment = 10;
    const std::vector<RunEvent> events = read_events(directory);
    if (!events.empty() && events.back().event == event.event && age_seconds(directory / kEvents) < kSameMoment) return;
  } catch (const std::exception&) {  // then it is written twice at worst
  }
  append_event(directory, event);
}

std::vector<RunEvent> read_events(const fs::path& directory) {
  std::vector<RunEvent> events;
  for_lines(directory / kEvents, [&](const nlohmann::json& object) {
    RunEvent event;
    event.event = text(object, "event");
    event.time = text(object, "time");
    event.host = text(object, "host");
    event.rank = static_cast<int>(integer(object, "rank", -1));
    event.reason = text(object, "reason");
    event.step = integer(object, "step", 0);
    event.steps_lost = integer(object, "steps_lost", 0);
    event.seconds_lost = number(object, "seconds_lost");
    if (!event.event.empty()) events.push_back(std::move(event));
  });
  return events;
}

void note_resume(const fs::path& directory, int64_t step) {
  RunEvent event;
  event.event = "resumed";
  event.step = step;
  bool anything = false;
  for_steps(directory, [&](int64_t done, double seconds) {
    anything = true;
    if (done <= step) return;
    ++event.steps_lost;
    event.seconds_lost += seconds;
  });
  if (!anything) return;
  const std::vector<RunEvent> events = read_events(directory);
  const bool in_peace = !events.empty() && (events.back().event == "stopped" || events.back().event == "finished");
  if (!in_peace) event.seconds_lost += age_seconds(directory / kMetrics);
  append_event(directory, event);
}

RunTimes run_times(const fs::path& directory) {
  RunTimes times;
  for_steps(directory, [&](int64_t, double seconds) { times.trained += seconds; });
  for (const RunEvent& event : read_events(directory)) {
    if (event.event != "resumed") continue;
    times.lost += event.seconds_lost;
    times.losses += event.seconds_lost > 0 ? 1 : 0;
  }
  return times;
}

}  // namespace sb
