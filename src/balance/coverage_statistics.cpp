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
const double kHalfOctave = 0.5 * std::log(2.0);

// Half octaves.
int length_class(int64_t tokens) {
  return static_cast<int>(std::floor(2.0 * std::log2(static_cast<double>(std::max<int64_t>(1, tokens)))));
}

}  // namespace

void CoverageStatistics::observe(int layer, int64_t tokens, std::span<const int64_t> budgets,
                                 std::span<const int64_t> coverage_ppm) {
  SB_CHECK(budgets.size() == coverage_ppm.size() && !budgets.empty(), "{} budgets, {} values", budgets.size(),
           coverage_ppm.size());
  if (budgets.size() < 2) return;  // as short as the smallest budget: says nothing about what a budget holds
  Curve& curve = curves_[{layer, length_class(tokens)}];
  curve.seen = std::min(curve.seen + 1, kMemory);
  const double log_tokens = std::log(static_cast<double>(tokens));
  const auto log_budget = [&](size_t i) { return std::min(std::log(static_cast<double>(budgets[i])), log_tokens); };
  size_t at = budgets.size() - 1;
  for (int point = 1; point <= kPoints; ++point) {
    const double log_k = log_tokens - point * kHalfOctave;
    while (at > 0 && log_budget(at - 1) > log_k) --at;
    // Between two measured budgets the coverage is linear in log k; below the smallest it is taken as proportional to
    // k, the least it can be.
    const double right = log_budget(at), above = static_cast<double>(coverage_ppm[at]);
    double value = above * std::exp(std::min(0.0, log_k - right));
    if (at > 0 && log_budget(at - 1) < right) {
      const double left = log_budget(at - 1), below = static_cast<double>(coverage_ppm[at - 1]);
      value = below + (above - below) * (log_k - left) / (right - left);
    }
    int64_t& kept = curve.ppm[static_cast<size_t>(point - 1)];
    kept += std::llround((std::clamp(value, 0.0, kOne) - static_cast<double>(kept)) / static_cast<double>(curve.seen));
  }
}

void CoverageStatistics::set_curves(Curves curves, const std::string& where) {
  for (const auto& [key, curve] : curves) {
    int64_t above = static_cast<int64_t>(kOne);
    bool falls = curve.seen > 0 && key.first >= 0;
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
    const double depth = (log_tokens - log_budgets[i]) / kHalfOctave;  // points below the whole sequence
    if (curve == nullptr) {
      out[i] = std::exp(-kColdExponent * depth * kHalfOctave);
      continue;
    }
    const auto value = [&](int point) {
      return point == 0 ? 1.0 : static_cast<double>(curve->ppm[static_cast<size_t>(point - 1)]) / kOne;
    };
    const int point = static_cast<int>(std::min(depth, static_cast<double>(kPoints)));
    if (point >= kPoints)
      out[i] = value(kPoints) * std::exp(-(depth - kPoints) * kHalfOctave);
    else
      out[i] = value(point) + (value(point + 1) - value(point)) * (depth - point);
  }
}

}  // namespace sb
