#include "plan/latency/profile_fit.h"

#include <algorithm>
#include <cmath>

#include "core/errors.h"

namespace sb {
namespace {

// Ends of the pieces: the coordinates that were measured, thinned evenly in their logarithm.
std::vector<double> choose_knots(Coordinate along, std::span<const LatencySample> samples, int most) {
  std::vector<double> values;
  for (const LatencySample& sample : samples) {
    const double x = coordinate(sample.work, along);
    if (x > 0) values.push_back(x);
  }
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end(), [](double a, double b) { return b <= 1.3 * a; }),
               values.end());
  if (values.empty()) return {1.0};
  std::vector<double> knots;
  const auto count = std::min(values.size(), static_cast<size_t>(most));
  for (size_t i = 1; i <= count; ++i) knots.push_back(values[i * values.size() / count - 1]);
  return knots;
}

}  // namespace

std::vector<double> nonnegative_least_squares(std::span<const double> a, std::span<const double> b, int columns) {
  const auto n = static_cast<size_t>(columns);
  const size_t rows = b.size();
  SB_CHECK(a.size() == rows * n, "{} values are not {} rows of {}", a.size(), rows, n);
  // Normal equations of unit columns, then cyclic coordinate descent: exact for these few, and each step keeps x ≥ 0.
  std::vector<double> scale(n, 0.0), gram(n * n, 0.0), right(n, 0.0), x(n, 0.0);
  for (size_t j = 0; j < n; ++j) {
    for (size_t r = 0; r < rows; ++r) scale[j] += a[r * n + j] * a[r * n + j];
    scale[j] = std::sqrt(scale[j]);
  }
  for (size_t r = 0; r < rows; ++r)
    for (size_t j = 0; j < n; ++j) {
      if (scale[j] == 0) continue;
      const double aj = a[r * n + j] / scale[j];
      right[j] += aj * b[r];
      for (size_t k = 0; k < n; ++k)
        if (scale[k] > 0) gram[j * n + k] += aj * a[r * n + k] / scale[k];
    }
  for (int sweep = 0; sweep < 20'000; ++sweep) {
    double change = 0;
    for (size_t j = 0; j < n; ++j) {
      if (gram[j * n + j] <= 0) continue;
      double residual = right[j];
      for (size_t k = 0; k < n; ++k) residual -= gram[j * n + k] * x[k];
      const double next = std::max(0.0, x[j] + residual / gram[j * n + j]);
      change = std::max(change, std::abs(next - x[j]));
      x[j] = next;
    }
    if (change < 1e-13) break;
  }
  for (size_t j = 0; j < n; ++j) x[j] = scale[j] > 0 ? x[j] / scale[j] : 0.0;
  return x;
}

OperationTable fit_table(Coordinate along, std::span<const LatencySample> samples, FitTerms terms, int max_knots) {
  SB_CHECK(!samples.empty(), "nothing was measured");
  const std::vector<double> knots = choose_knots(along, samples, max_knots);
  const size_t pieces = knots.size(), n = 1 + pieces + 4;
  std::vector<double> a, b;
  for (const LatencySample& sample : samples) {
    if (sample.us <= 0) continue;
    const double weight = 1.0 / sample.us, x = coordinate(sample.work, along);
    a.push_back(terms.fixed ? weight : 0.0);
    for (size_t j = 0; j < pieces; ++j) {
      const double from = j == 0 ? 0.0 : knots[j - 1];
      // The last piece goes on for ever.
      const double to = j + 1 == pieces ? 1e300 : knots[j];
      a.push_back(weight * std::clamp(x - from, 0.0, to - from));
    }
    a.push_back(terms.tile ? weight * sample.work.tiles : 0.0);
    a.push_back(terms.token ? weight * sample.work.tokens : 0.0);
    a.push_back(terms.score ? weight * sample.work.scores : 0.0);
    a.push_back(terms.prefix ? weight * sample.work.prefix : 0.0);
    b.push_back(1.0);
  }
  const std::vector<double> solution = nonnegative_least_squares(a, b, static_cast<int>(n));
  OperationTable table;
  table.along = along;
  table.curve.x.push_back(0);
  table.curve.y.push_back(solution[0]);
  for (size_t j = 0; j < pieces; ++j) {
    table.curve.x.push_back(knots[j]);
    table.curve.y.push_back(table.curve.y.back() + solution[1 + j] * (knots[j] - (j == 0 ? 0.0 : knots[j - 1])));
  }
  table.per_tile = solution[n - 4];
  table.per_token = solution[n - 3];
  table.per_score = solution[n - 2];
  table.per_prefix = solution[n - 1];
  return table;
}

Link fit_link(std::span<const std::pair<double, double>> samples) {
  std::vector<double> a, b;
  for (const auto& [bytes, us] : samples) {
    if (us <= 0) continue;
    a.push_back(1.0 / us);
    a.push_back(bytes / us);
    b.push_back(1.0);
  }
  if (b.empty()) return {};
  const auto solution = nonnegative_least_squares(a, b, 2);
  return {solution[0], solution[1]};
}

}  // namespace sb
