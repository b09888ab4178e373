#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "report/report.h"

namespace sb {

using Series = std::map<int64_t, double>;  // a metric, by step

// Null: the run has none, or an empty one.
inline const Series* find_series(const RunMetrics& metrics, const std::string& name) {
  const auto found = metrics.series.find(name);
  return found == metrics.series.end() || found->second.empty() ? nullptr : &found->second;
}

inline double sum(const Series& series) {
  double total = 0;
  for (const auto& [step, value] : series) total += value;
  return total;
}

inline double mean(const Series& series) {
  return sum(series) / static_cast<double>(series.size());
}

}  // namespace sb
