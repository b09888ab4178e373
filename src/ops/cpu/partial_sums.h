#pragma once

#include <algorithm>
#include <vector>

#include "core/thread_pool.h"
#include "ops/cpu/kernels.h"
#include "ops/cpu/pieces.h"

namespace sb {

// Runs body(begin, end, sums) over rows of row_width floats in slices of a size that does not depend on the number of
// threads, each with zeroed sums [width] of its own, and adds them to `total` in slice order: the same bits for any
// number of threads.
template <typename Body>
void sum_over_rows(ThreadPool& pool, int64_t rows, int64_t row_width, int64_t width, float* total, const Body& body) {
  constexpr int64_t kSlices = 64;
  if (rows == 0) return;
  const int64_t slice = std::max((rows + kSlices - 1) / kSlices, rows_per_piece(row_width));
  const int64_t slices = (rows + slice - 1) / slice;
  std::vector<float> sums(static_cast<size_t>(slices * width));
  pool.parallel_for(slices, 1, [&](int64_t index, int64_t, int) {
    const int64_t begin = index * slice;
    body(begin, std::min(begin + slice, rows), sums.data() + index * width);
  });
  for (int64_t index = 0; index < slices; ++index) cpu_kernels().add(sums.data() + index * width, width, total);
}

}  // namespace sb
