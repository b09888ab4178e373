#include "data/synthetic/curriculum.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "core/errors.h"

namespace sb {

LengthCurriculum::LengthCurriculum(CurriculumOptions options) : options_(options) {
  SB_USER_CHECK(options.start > 0 && options.start <= options.end,
                "curriculum: start ({}) must be positive and at most end ({})", options.start, options.end);
  SB_USER_CHECK(options.threshold > 0.0 && options.threshold < 1.0,
                "curriculum: threshold must lie between 0 and 1, got {}", options.threshold);
  SB_USER_CHECK(options.smoothing >= 0.0 && options.smoothing < 1.0,
                "curriculum: smoothing must be at least 0 and below 1, got {}", options.smoothing);
  switches_.push_back({0, options.start});
}

int64_t LengthCurriculum::length_at(uint64_t position) const {
  auto after = std::upper_bound(switches_.begin(), switches_.end(), position,
                                [](uint64_t p, const Switch& s) { return p < s.position; });
  return std::prev(after)->length;
}

double LengthCurriculum::running_accuracy() const {
  const double weight = 1.0 - std::pow(options_.smoothing, static_cast<double>(observations_));
  return weight > 0.0 ? average_ / weight : 0.0;
}

bool LengthCurriculum::observe(int64_t correct, int64_t counted, uint64_t next_position) {
  SB_CHECK(correct >= 0 && correct <= counted, "{} correct of {}", correct, counted);
  if (counted == 0) return false;
  const double accuracy = static_cast<double>(correct) / static_cast<double>(counted);
  average_ = options_.smoothing * average_ + (1.0 - options_.smoothing) * accuracy;
  ++observations_;
  if (observations_ < options_.min_observations || running_accuracy() <= options_.threshold ||
      current_length() >= options_.end)
    return false;
  const int64_t length = std::min(2 * current_length(), options_.end);
  if (next_position <= switches_.back().position)
    switches_.back().length = length;
  else
    switches_.push_back({next_position, length});
  observations_ = 0;
  average_ = 0.0;
  return true;
}

std::string LengthCurriculum::state() const {
  std::string text = fmt::format("curriculum 1 {} {:a}", observations_, average_);
  for (const Switch& s : switches_) text += fmt::format(" {}:{}", s.position, s.length);
  return text;
}

void LengthCurriculum::restore(const std::string& state) {
  std::istringstream in(state);
  std::string word, average;
  int version = 0;
  int64_t observations = -1;
  in >> word >> version >> observations >> average;
  SB_USER_CHECK(in && word == "curriculum" && version == 1 && observations >= 0,
                "curriculum state \"{}\" was not written by this version", state);
  std::vector<Switch> switches;
  Switch next{};
  char colon = 0;
  while (in >> next.position >> colon >> next.length) {
    SB_USER_CHECK(colon == ':' && next.length > 0 && next.length <= options_.end &&
                      (switches.empty() ? next.position == 0 : next.position > switches.back().position),
                  "curriculum state \"{}\" does not match this configuration (end {})", state, options_.end);
    switches.push_back(next);
  }
  SB_USER_CHECK(in.eof() && !switches.empty(), "curriculum state \"{}\" is damaged", state);
  char* rest = nullptr;
  const double value = std::strtod(average.c_str(), &rest);
  SB_USER_CHECK(*rest == '\0' && value >= 0.0 && value <= 1.0, "curriculum state \"{}\" is damaged", state);
  switches_ = std::move(switches);
  observations_ = observations;
  average_ = value;
}

}  // namespace sb
