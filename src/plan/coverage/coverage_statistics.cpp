#include "plan/coverage/coverage_statistics.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <set>

#include "core/errors.h"
#include "plan/schedule/vector_kernels.h"

namespace sb {
namespace {

constexpr double kMillion = 1e6;
constexpr double kColdExponent = 0.22;
// The average forgets: a sample weighs at least 1 / kMemory.
constexpr int64_t kMemory = 20;
// Bounds of what one sample may say: lists worth a twentieth of their budget, or twice of it.
constexpr double kLargestShift = 3.0, kLargestGain = 0.7;
const double kHalfOctave = 0.5 * std::log(2.0);

// Half octaves. Every length has one of these classes.
constexpr int kClasses = 128;

int half_octave(int64_t tokens) {
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
  return std::clamp(value, 0.0, kMillion);
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
  SB_CHECK(layer >= 0 && layer < kMostLayers, "layer {}", layer);
  const int own_class = half_octave(tokens);
  const auto [entry, fresh] = curves_.try_emplace({layer, own_class});
  Curve& curve = entry->second;
  curve.seen = std::min(curve.seen + 1, kMemory);
  const double log_tokens = std::log(static_cast<double>(tokens));
  for (int point = 1; point <= kPoints; ++point)
    average(curve.ppm[static_cast<size_t>(point - 1)],
            sample_at(budgets, coverage_ppm, log_tokens, log_tokens - point * kHalfOctave), curve.seen);
  if (used_budget > 0 && used_budget < tokens && held_ppm > 0) {
    // The budget whose best blocks hold what the lists held.
    const double used = std::log(static_cast<double>(used_budget));
    double low = used - kLargestShift, high = std::min(used + kLargestGain, log_tokens);
    for (int round = 0; round < 40; ++round) {
      const double middle = 0.5 * (low + high);
      (sample_at(budgets, coverage_ppm, log_tokens, middle) < static_cast<double>(held_ppm) ? low : high) = middle;
    }
    curve.held_seen = std::min(curve.held_seen + 1, kMemory);
    average(curve.shift_ppm, kMillion * (used - low), curve.held_seen);
  }
  refresh(layer, own_class, curve, fresh);
}

void CoverageStatistics::set_curves(Curves curves, const std::string& where) {
  for (const auto& [key, curve] : curves) {
    int64_t above = static_cast<int64_t>(kMillion);
    bool falls = curve.seen > 0 && curve.held_seen >= 0 &&
                 std::abs(static_cast<double>(curve.shift_ppm)) <= kLargestShift * kMillion && key.first >= 0 &&
                 key.first < kMostLayers && key.second >= 0 && key.second < kClasses;
    for (const int64_t ppm : curve.ppm) {
      falls = falls && ppm >= 0 && ppm <= above + 1;  // averages of rounded values may cross by one
      above = ppm;
    }
    SB_USER_CHECK(falls, "{}: the coverage curve of layer {}, class {} is damaged", where, key.first, key.second);
  }
  curves_ = std::move(curves);
  shares_.clear();
  nearest_.clear();
  for (const auto& [key, curve] : curves_) refresh(key.first, key.second, curve, /*fresh=*/true);
}

CoverageTable CoverageStatistics::table(int layers) const {
  SB_CHECK(!curves_.empty(), "no coverage was observed");
  std::set<int> classes;
  for (const auto& [key, curve] : curves_) classes.insert(key.second);
  CoverageTable table;
  table.layers = layers;
  for (const int seen : classes)
    table.length_classes.push_back(static_cast<int64_t>(std::ceil(std::exp2(0.5 * (seen + 1)))) - 1);
  const int64_t longest = table.length_classes.back();
  for (int i = 0; i <= kPoints + static_cast<int>(classes.size()); ++i) {
    const int64_t budget = std::llround(static_cast<double>(longest) * std::exp2(-0.5 * i));
    if (budget > 0 && (table.budgets.empty() || budget < table.budgets.back())) table.budgets.push_back(budget);
  }
  std::reverse(table.budgets.begin(), table.budgets.end());
  for (int layer = 0; layer < layers; ++layer) {
    const auto own = curves_.lower_bound({layer, 0});
    if (own == curves_.end() || own->first.first != layer) table.assumed_layers.push_back(layer);
    auto& curves = table.coverage.emplace_back();
    for (const int64_t tokens : table.length_classes) {
      auto& curve = curves.emplace_back();
      for (const int64_t budget : table.budgets) {
        const double value = std::clamp(at({0, tokens}, layer, budget), 0.0, 1.0);
        curve.push_back(curve.empty() ? value : std::max(value, curve.back()));  // averages may cross by a millionth
      }
    }
  }
  return table;
}

void CoverageStatistics::refresh(int layer, int length_class, const Curve& curve, bool fresh) {
  const auto row = static_cast<size_t>(layer) * kClasses;
  if (fresh) {
    const auto own = static_cast<int32_t>(shares_.size());
    shares_.push_back({length_class});
    if (nearest_.size() < row + kClasses) nearest_.resize(row + kClasses, -1);
    for (int wanted = 0; wanted < kClasses; ++wanted) {
      int32_t& kept = nearest_[row + static_cast<size_t>(wanted)];
      if (kept >= 0) {
        // Of two equally near ones, that of the longer sequences.
        const int other = shares_[static_cast<size_t>(kept)].length_class;
        const int distance = std::abs(wanted - length_class), before = std::abs(wanted - other);
        if (distance > before || (distance == before && length_class < other)) continue;
      }
      kept = own;
    }
  }
  // A class that has a curve is nearest to itself.
  Shares& shares = shares_[static_cast<size_t>(nearest_[row + static_cast<size_t>(length_class)])];
  shares.shift = static_cast<double>(curve.shift_ppm) / kMillion / kHalfOctave;
  shares.share[0] = 1.0;
  // Averages may cross by one, and a budget that gains less than nothing has no price.
  for (size_t i = 0; i < curve.ppm.size(); ++i)
    shares.share[i + 1] = std::min(shares.share[i], static_cast<double>(curve.ppm[i]) / kMillion);
  shares.share[kPoints + 1] = shares.share[kPoints];
}

const CoverageStatistics::Shares* CoverageStatistics::nearest(int layer, int length_class) const {
  const size_t at = static_cast<size_t>(layer) * kClasses + static_cast<size_t>(length_class);
  if (at >= nearest_.size() || nearest_[at] < 0) return nullptr;
  return &shares_[static_cast<size_t>(nearest_[at])];
}

double CoverageStatistics::value(const Shares* curve, double depth) {
  if (curve == nullptr) return std::exp(-kColdExponent * depth * kHalfOctave);
  depth = std::max(0.0, depth + curve->shift);
  const double inside = std::min(depth, static_cast<double>(kPoints));
  const auto point = static_cast<size_t>(inside);
  const double left = curve->share[point], right = curve->share[point + 1];
  const double share = left + (right - left) * (inside - static_cast<double>(point));
  return depth > kPoints ? share * std::exp(-(depth - kPoints) * kHalfOctave) : share;
}

void CoverageStatistics::evaluate(const Sequence& sequence, int layer, std::span<const int32_t> budgets,
                                  std::span<const double> log_budgets, std::span<double> out) const {
  const Shares* curve = nearest(layer, half_octave(sequence.tokens));
  const double log_tokens = std::log(static_cast<double>(sequence.tokens));
  for (size_t i = 0; i < budgets.size(); ++i)
    out[i] = budgets[i] >= sequence.tokens ? 1.0 : value(curve, (log_tokens - log_budgets[i]) / kHalfOctave);
}

void CoverageStatistics::evaluate_each(const Sequence& sequence, std::span<const int32_t> budgets,
                                       std::span<const double> log_budgets, std::span<double> out) const {
  const double log_tokens = std::log(static_cast<double>(sequence.tokens));
  const int own_class = half_octave(sequence.tokens);
  for (size_t l = 0; l < budgets.size(); ++l)
    out[l] = budgets[l] >= sequence.tokens
                 ? 1.0
                 : value(nearest(static_cast<int>(l), own_class), (log_tokens - log_budgets[l]) / kHalfOctave);
}

// All layers look into curves of one class, at the same depths.
void CoverageStatistics::evaluate_layers(const Sequence& sequence, int layers, std::span<const int32_t> budgets,
                                         std::span<const double> log_budgets, std::span<double> out) const {
  const double log_tokens = std::log(static_cast<double>(sequence.tokens));
  const int own_class = half_octave(sequence.tokens);
  const size_t count = budgets.size();
  const auto dense = static_cast<size_t>(
      std::lower_bound(budgets.begin(), budgets.end(), sequence.tokens, [](int32_t a, int64_t b) { return a < b; }) -
      budgets.begin());
  std::vector<double> depths(dense);
  for (size_t i = 0; i < dense; ++i) depths[i] = (log_tokens - log_budgets[i]) / kHalfOctave;
  for (int l = 0; l < layers; ++l) {
    double* to = out.data() + static_cast<size_t>(l) * count;
    std::fill(to + dense, to + count, 1.0);
    const Shares* curve = nearest(l, own_class);
    // The kernel knows nothing beyond the last point; depths fall, so what lies there comes first.
    size_t first = 0;
    while (first < dense && (curve == nullptr || depths[first] + curve->shift > kPoints)) {
      to[first] = value(curve, depths[first]);
      ++first;
    }
    if (first < dense) read_curve(curve->share.data(), curve->shift, depths.data() + first, dense - first, to + first);
  }
}

}  // namespace sb
