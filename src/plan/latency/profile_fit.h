#pragma once

#include <span>
#include <vector>

#include "plan/latency/profile.h"

namespace sb {

struct LatencySample {
  Work work;
  double us = 0;
};

// Which rates besides the curve an operation may have.
struct FitTerms {
  bool tile = false, token = false, score = false;
  bool fixed = true;  // a time that even nothing takes
  bool prefix = false;
};

// Monotone fit with the smallest relative error (least squares of predicted / measured - 1): a curve with at most
// `max_knots` pieces along one coordinate, plus the rates asked for, none of them negative.
OperationTable fit_table(Coordinate along, std::span<const LatencySample> samples, FitTerms terms, int max_knots = 6);

// latency + bytes · rate from (bytes, microseconds), neither negative.
Link fit_link(std::span<const std::pair<double, double>> samples);

// min |A x - b| over x ≥ 0; A has `columns` columns, row by row.
std::vector<double> nonnegative_least_squares(std::span<const double> a, std::span<const double> b, int columns);

}  // namespace sb
