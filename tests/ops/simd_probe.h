#pragma once

#include <cstdint>

// Opens ops/cpu/simd.h, which only files compiled per instruction set may include, to a test.
#define SB_DECLARE_PROBES(isa)                                         \
  namespace sb::isa {                                                  \
  void probe_exp(const float* x, int64_t count, float* y);             \
  void probe_exp_nonpositive(const float* x, int64_t count, float* y); \
  float probe_sum(const float* x);                                     \
  float probe_max(const float* x);                                     \
  int probe_lanes();                                                   \
  }
SB_DECLARE_PROBES(avx2)
SB_DECLARE_PROBES(avx512)
