#pragma once

#include <cstdint>
#include <vector>

namespace sb {

// How much attention mass a sequence keeps in one layer, measured exactly on a few of its rows, averaged over rows and
// heads.
struct CoverageSample {
  double held = 0;            // by the lists in use
  std::vector<double> curve;  // at every budget of the grid, were each token to select by its own scores
  int64_t rows = 0;
  // More rows of the same sequence, each counted with its share of all that are sampled.
  CoverageSample& operator+=(const CoverageSample& more);
};

// One measured coverage curve: attention takes it, the planner learns from it.
struct MeasuredCoverage {
  int layer;
  int64_t tokens;
  CoverageSample sample;
};

// Budgets (keys per query) at which curves are reported for sequences of this length: ascending, the last holds
// everything.
std::vector<int64_t> coverage_grid(int64_t tokens, int block);

}  // namespace sb
