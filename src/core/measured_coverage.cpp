#include "core/measured_coverage.h"

namespace sb {

CoverageSample& CoverageSample::operator+=(const CoverageSample& more) {
  held += more.held;
  rows += more.rows;
  curve.resize(more.curve.size());
  for (std::size_t i = 0; i < curve.size(); ++i) curve[i] += more.curve[i];
  return *this;
}

std::vector<int64_t> coverage_grid(int64_t tokens, int block) {
  const int64_t all = (tokens + block - 1) / block * block;
  std::vector<int64_t> grid;
  for (int64_t budget = int64_t{4} * block; budget < all; budget *= 2) {
    grid.push_back(budget);
    if (budget / 2 * 3 < all) grid.push_back(budget / 2 * 3);
  }
  grid.push_back(all);
  return grid;
}

}  // namespace sb
