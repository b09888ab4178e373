#include "attention/select/kernels/block_scores_kernels.h"

#include <cmath>

#include "ops/cpu/simd.h"

namespace sb::SB_ISA {
namespace {

// log Σ exp of a row.
float log_sum_exp(const float* x, int64_t count) {
  Vf top = splat(-__builtin_inff());
  int64_t j = 0;
  for (; j + kLanes <= count; j += kLanes) top = max(top, load(x + j));
  const Mask tail = first_lanes(count - j);
  if (j < count) top = max(top, select(tail, load(x + j, tail), top));
  const float largest = reduce_max(top);
  Vf sum = zero();
  for (j = 0; j + kLanes <= count; j += kLanes) sum = sum + exp_nonpositive(load(x + j) - splat(largest));
  if (j < count) sum = sum + select(tail, exp_nonpositive(load(x + j, tail) - splat(largest)), zero());
  return largest + std::log(reduce_add(sum));
}

}  // namespace

void relative_masses(const float* scores, int64_t tokens, int group, int64_t count, float* masses) {
  for (int64_t t = 0; t < tokens; ++t) {
    float* out = masses + t * count;
    for (int h = 0; h < group; ++h) {
      const float* row = scores + (t * group + h) * count;
      const Vf shift = splat(log_sum_exp(row, count));
      int64_t j = 0;
      for (; j + kLanes <= count; j += kLanes) {
        const Vf relative = load(row + j) - shift;
        store(out + j, h == 0 ? relative : max(load(out + j), relative));
      }
      if (j < count) {
        const Mask tail = first_lanes(count - j);
        const Vf relative = load(row + j, tail) - shift;
        store(out + j, tail, h == 0 ? relative : max(load(out + j, tail), relative));
      }
    }
  }
}

void sum_masses(const float* masses, int rows, int64_t count, float* out) {
  // Relative masses are at most one, so the plain sum of exponentials neither overflows nor needs a maximum.
  for (int64_t j = 0; j < count; j += kLanes) {
    const int64_t lanes = count - j < kLanes ? count - j : kLanes;
    const Mask mask = first_lanes(lanes);
    Vf sum = zero();
    for (int r = 0; r < rows; ++r) sum = sum + exp_nonpositive(load(masses + r * count + j, mask));
    float sums[kLanes];
    store(sums, sum);
    for (int64_t i = 0; i < lanes; ++i) out[j + i] = std::log(sums[i]);
  }
}

}  // namespace sb::SB_ISA
