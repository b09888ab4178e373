#include "attention/select/learned_selection.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <optional>

namespace sb {
namespace {

// Classes of length over budget, before rounding.
double budget_place(const SequenceTiles& tiles) {
  return 2 * std::log2(static_cast<double>(tiles.tokens) / static_cast<double>(tiles.budget));
}

float correction(const LearnedSelection& learned, int layer, int length_class, double budget_place) {
  const auto begin = learned.thresholds.lower_bound({layer, std::numeric_limits<int>::min(), 0});
  int nearest = 0, distance = std::numeric_limits<int>::max();
  for (auto it = begin; it != learned.thresholds.end() && it->first.layer == layer; ++it) {
    const int away = std::abs(it->first.length_class - length_class);
    if (away >= distance) continue;
    distance = away;
    nearest = it->first.length_class;
  }
  if (distance == std::numeric_limits<int>::max()) return 0.0f;
  struct Point {
    double place;
    float value;
  };
  std::optional<Point> below, above;
  for (auto it = begin; it != learned.thresholds.end() && it->first.layer == layer; ++it) {
    if (it->first.length_class != nearest) continue;
    const Point point{static_cast<double>(it->first.budget_class), it->second.correction};
    if (point.place <= budget_place) below = point;
    if (point.place >= budget_place && !above) above = point;
  }
  if (!below) return above->value;
  if (!above || above->place == below->place) return below->value;
  const double share = (budget_place - below->place) / (above->place - below->place);
  return static_cast<float>(below->value + share * (above->value - below->value));
}

// A class follows log(selected / wanted). Lists have a floor and a cap, so that a threshold far off shows little of how
// far: while that logarithm keeps its sign, steps grow. Where it changes, which tells of noise, or of masses so alike
// that a small change of the threshold moves many blocks, they shrink.
MassThreshold follow(MassThreshold threshold, bool seen_before, const MassCounts& counts) {
  constexpr float kLeast = 1.0f / 256, kMost = 4.0f;
  const double ratio = std::max(static_cast<double>(counts.selected), 0.5) / static_cast<double>(counts.wanted);
  const auto error = static_cast<float>(std::clamp(std::log(ratio), -1.0, 1.0));
  if (seen_before) {
    const bool turned = (error > 0) != (threshold.last > 0);
    threshold.gain = std::clamp(threshold.gain * (turned ? 0.5f : threshold.gain < 1 ? 1.25f : 2.0f), kLeast, kMost);
  }
  threshold.correction += threshold.gain * error;
  threshold.last = error;
  return threshold;
}

// Sums become floats, so that a checkpoint keeps them to the bit.
PlaneSums fade(const PlaneSums& before, const PlaneSums& step) {
  PlaneSums sums = before;
  const auto each = [&](const auto& change) {
    change(sums.tokens);
    for (std::vector<double>* values : {&sums.query_squares, &sums.key_sums, &sums.key_squares})
      for (double& value : *values) change(value);
  };
  each([](double& value) { value *= kPlaneMemory; });
  sums += step;
  each([](double& value) { value = static_cast<float>(value); });
  return sums;
}

bool finite(const PlaneSums& sums) {
  const auto all = [](const std::vector<double>& values) {
    return std::ranges::all_of(values, [](double value) { return std::isfinite(value); });
  };
  return all(sums.query_squares) && all(sums.key_sums) && all(sums.key_squares);
}

}  // namespace

MassKey mass_key(int layer, const SequenceTiles& tiles) {
  return {layer, static_cast<int>(std::lround(std::log2(static_cast<double>(tiles.tokens)))),
          static_cast<int>(std::lround(budget_place(tiles)))};
}

int64_t wanted_blocks(const SequenceTiles& tiles) {
  int64_t wanted = 0;
  for (int64_t tile = 0; tile < tiles.tiles(); ++tile) wanted += tiles.wanted(tile);
  return wanted;
}

int64_t given_blocks(const SequenceTiles& tiles) {
  int64_t given = 0;
  for (int64_t tile = 0; tile < tiles.tiles(); ++tile) given += tiles.given(tile);
  return given;
}

SelectionObservations& SelectionObservations::operator+=(const SelectionObservations& other) {
  planes.resize(std::max(planes.size(), other.planes.size()));
  for (size_t layer = 0; layer < other.planes.size(); ++layer) planes[layer] += other.planes[layer];
  for (const auto& [key, counts] : other.masses) masses[key] += counts;
  return *this;
}

float start_threshold(const SequenceTiles& tiles) {
  return -std::log(2.0f * static_cast<float>(tiles.quota(0)));
}

float mass_threshold(const LearnedSelection& learned, int layer, const SequenceTiles& tiles) {
  return start_threshold(tiles) + correction(learned, layer, mass_key(layer, tiles).length_class, budget_place(tiles));
}

LearnedSelection learn(const LearnedSelection& before, const SelectionObservations& step) {
  LearnedSelection after = before;
  after.planes.resize(std::max(before.planes.size(), step.planes.size()));
  for (size_t layer = 0; layer < step.planes.size(); ++layer)
    if (step.planes[layer].tokens > 0 && finite(step.planes[layer]))
      after.planes[layer] = fade(after.planes[layer], step.planes[layer]);
  for (const auto& [key, counts] : step.masses) {
    if (counts.wanted == 0) continue;
    const auto known = before.thresholds.find(key);
    const bool seen = known != before.thresholds.end();
    MassThreshold threshold;
    if (seen)
      threshold = known->second;
    else
      threshold.correction = correction(before, key.layer, key.length_class, key.budget_class);
    after.thresholds[key] = follow(threshold, seen, counts);
  }
  return after;
}

}  // namespace sb
