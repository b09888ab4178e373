#include "tests/ops/simd_probe.h"

#include "ops/cpu/simd.h"

namespace sb::SB_ISA {

void probe_exp(const float* x, int64_t count, float* y) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const Mask m = first_lanes(count - i < kLanes ? count - i : kLanes);
    store(y + i, m, exp(load(x + i, m)));
  }
}

void probe_exp_nonpositive(const float* x, int64_t count, float* y) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const Mask m = first_lanes(count - i < kLanes ? count - i : kLanes);
    store(y + i, m, exp_nonpositive(load(x + i, m)));
  }
}

float probe_sum(const float* x) {
  return reduce_add(load(x));
}
float probe_max(const float* x) {
  return reduce_max(load(x));
}
int probe_lanes() {
  return kLanes;
}

}  // namespace sb::SB_ISA
