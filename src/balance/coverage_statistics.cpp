#include "balance/coverage_statistics.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "core/errors.h"

namespace sb {
namespace {

constexpr double kOne = 1e6;
constexpr double kColdExponent = 0.22;
// The average forgets: a sample weighs at least 1 / kMemory.
constexpr int64_t kMemory = 20;
// Bounds of what one sample may say: lists worth a twentieth of their budget, or twice of it.
constexpr double kLargestShift = 3.0, kLargestGain = 0.7;
const double kHalfOctave = 0.5 * std::log(2.0);

// Half octaves.
int length_class(int64_t tokens) {
  return static_cast<int>(std::floor(2.0 * std::log2(static_cast<double>(std::max<int64_t>(1, tokens)))));
}

// A measured curve at any budget, as logarithms: linear in log k between two budgets; below the smallest, proportional
// to k, the least it can be.
double sample_at(std::span<const int64_t> budgets, std::span<const int64_t> ppm, double log_tokens, double log_k) {
  const auto log_budget = [&](size_t i) { return std::min(std::log(static_cast<double>(budgets[i])), log_tokens); };
  size_t at = budgets.size() - 1;
  while (at > 0 && log_budget(at - 1) > log_k) --at;
  const double right = log_budget(at), above = static_cast<double>(ppm[at]);
  double value = above * std::exp(std::min(0.0, log_k - right));
  if (at > 0 && log_budget(at - 1) < right) {
    const double left = log_budget(at - 1), below = static_cast<double>(ppm[at - 1]);
    value = below + (above - below) * (log_k - left) / (right - left);
  }
  return std::clamp(value, 0.0, kOne);
}

// Takes one more into a running average of whole numbers.
void average(int64_t& kept, double value, int64_t seen) {
  kept += std::llround((value - static_cast<double>(kept)) / static_cast<double>(seen));
}

}  // namespace

void CoverageStatistics::observe(int layer, int64_t tokens, std::span<const int64_t> budgets,
                                 std::span<const int64_t> coverage_ppm, int64_t used_budget, int64_t held_ppm) {
  SB_CHECK(budgets.size() == coverage_ppm.size() && !budgets.empty(), "{} budgets, {} values", budgets.size(),
           coverage_ppm.size());
  if (budgets.size() < 2) return;  // as short as the smallest budget: says nothing about what a budget holds
  Curve& curve = curves_[{layer, length_class(tokens)}];
  curve.seen = std::min(curve.seen + 1, kMemory);
  const double log_tokens = std::log(static_cast<double>(tokens));
  for (int point = 1; point <= kPoints; ++point)
    average(curve.ppm[static_cast<size_t>(point - 1)],
            sample_at(budgets, coverage_ppm, log_tokens, log_tokens - point * kHalfOctave), curve.seen);
  if (used_budget <= 0 || used_budget >= tokens || held_ppm <= 0) return;
  // The budget whose best blocks hold what the lists held.
  const double used = std::log(static_cast<double>(used_budget));
  double low = used - kLargestShift, high = std::min(used + kLargestGain, log_tokens);
  for (int round = 0; round < 40; ++round) {
    const double middle = 0.5 * (low + high);
    (sample_at(budgets, coverage_ppm, log_tokens, middle) < static_cast<double>(held_ppm) ? low : high) = middle;
  }
  curve.held_seen = std::min(curve.held_seen + 1, kMemory);
  average(curve.shift_ppm, kOne * (used - low), curve.held_seen);
}

void CoverageStatistics::set_curves(Curves curves, const std::string& where) {
  for (const auto& [key, curve] : curves) {
    int64_t above = static_cast<int64_t>(kOne);
    bool falls = curve.seen > 0 && curve.held_seen >= 0 &&
                 std::abs(static_cast<double>(curve.shift_ppm)) <= kLargestShift * kOne && key.first >= 0;
    for (const int64_t ppm : curve.ppm) {
      falls = falls && ppm >= 0 && ppm <= above + 1;  // averages of rounded values may cross by one
      above = ppm;
    }
    SB_USER_CHECK(falls, "{}: the coverage curve of layer {}, class {} is damaged", where, key.first, key.second);
  }
  curves_ = std::move(curves);
}

const CoverageStatistics::Curve* CoverageStatistics::nearest(int layer, int64_t tokens) const {
  const int wanted = length_class(tokens);
  const auto above = curves_.lower_bound({layer, wanted});
  const bool has_above = above != curves_.end() && above->first.first == layer;
  const bool has_below = above != curves_.begin() && std::prev(above)->first.first == layer;
  if (has_above && has_below)
    return above->first.second - wanted <= wanted - std::prev(above)->first.second ? &above->second
                                                                                   : &std::prev(above)->second;
  if (has_above) return &above->second;
  return has_below ? &std::prev(above)->second : nullptr;
}

void CoverageStatistics::evaluate(const Sequence& sequence, int layer, std::span<const int32_t> budgets,
                                  std::span<const double> log_budgets, std::span<double> out) const {
  const Curve* curve = nearest(layer, sequence.tokens);
  const double log_tokens = std::log(static_cast<double>(sequence.tokens));
  for (size_t i = 0; i < budgets.size(); ++i) {
    if (budgets[i] >= sequence.tokens) {
      out[i] = 1.0;
      continue;
    }
    double depth = (log_tokens - log_budgets[i]) / kHalfOctave;  // points below the whole sequence
    if (curve == nullptr) {
      out[i] = std::exp(-kColdExponent * depth * kHalfOctave);
      continue;
    }
    const auto value = [&](int point) {
      return point == 0 ? 1.0 : static_cast<double>(curve->ppm[static_cast<size_t>(point - 1)]) / kOne;
    };
    depth = std::max(0.0, depth + static_cast<double>(curve->shift_ppm) / kOne / kHalfOctave);
    const int point = static_cast<int>(std::min(depth, static_cast<double>(kPoints)));
    if (point >= kPoints)
      out[i] = value(kPoints) * std::exp(-(depth - kPoints) * kHalfOctave);
    else
      out[i] = value(point) + (value(point + 1) - value(point)) * (depth - point);
  }
}

}  // namespace sb
