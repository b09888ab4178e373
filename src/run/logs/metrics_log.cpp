#include "run/logs/metrics_log.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "core/files/durable_file.h"
#include "core/files/regular_file.h"
#include "core/log.h"

namespace sb {
namespace {

// The lines of steps up to `last_step`. The last one may be unfinished, being written when the process was killed; any
// other that is no metrics line is damage, and left out with a word about it.
std::string kept_lines(const std::filesystem::path& file, int64_t last_step, int64_t& last_validation) {
  std::istringstream in(read_regular_file(file));
  std::string kept, line;
  int64_t damaged = 0, first_damaged = 0;
  for (int64_t number = 1; std::getline(in, line); ++number) {
    const nlohmann::json object = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    const auto step = object.find("step");
    if (object.is_object() && step != object.end() && step->is_number_integer()) {
      const int64_t number_of_step = step->get<int64_t>();
      if (number_of_step > last_step) continue;
      kept += line + "\n";
      if (object.contains("validation_loss")) last_validation = std::max(last_validation, number_of_step);
    } else if (!in.eof() && damaged++ == 0) {
      first_damaged = number;
    }
  }
  if (damaged > 0)
    log::warning("{}: skipped {} damaged lines, the first of which is line {}", file.string(), damaged, first_damaged);
  return kept;
}

}  // namespace

MetricsLog::MetricsLog(const std::filesystem::path& file, int64_t last_step) {
  if (std::filesystem::exists(file)) replace_file(file, kept_lines(file, last_step, last_validation_));
  file_.emplace(file, RecordFile::Start::append);
}

void MetricsLog::write(const std::vector<Metric>& metrics) {
  nlohmann::ordered_json object;
  for (const Metric& metric : metrics) {
    if (!std::isfinite(metric.value))
      object[metric.name] = nullptr;
    else if (metric.integer)
      object[metric.name] = static_cast<int64_t>(metric.value);
    else
      object[metric.name] = metric.value;
  }
  file_->write(object.dump() + "\n");
}

}  // namespace sb
