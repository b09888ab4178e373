#pragma once

#include <cstddef>
#include <cstdint>

#include "plan/schedule/schedule.h"

// Inner loops of the planner, compiled once per instruction set. Plans of thousands of sequences evaluate millions of
// coverages and schedules.
#define SB_DECLARE_BALANCE_KERNELS                                                                                     \
  /* e^x in place, for x from -700 to 0, to a few units in the last place. */                                          \
  void exp_all(double* x, size_t count);                                                                               \
  void log_all(const int32_t* x, size_t count, double* out);                                                           \
  /* out[i] = the curve through share[0], share[1] … at max(0, depth[i] + shift), linear between two points. */      \
  void read_curve(const double* share, double shift, const double* depth, size_t count, double* out);                  \
  /* out[row · 8 + lane] = Σ_q weight[q · 8 + lane] · value[row · levels + q]. */                                 \
  void blend_lanes(const double* value, size_t rows, size_t levels, const double* weight, double* out);                \
  /* Ends of all nodes in 8 lanes, after what every stage begins with, the first one's last; transfers are the same */ \
  /* in every lane or not, and may be null. */                                                                         \
  void run_lanes(const Schedule::Node* nodes, size_t count, int stages, const double* forward, const double* backward, \
                 const double* forward_transfer, const double* backward_transfer, bool transfers_by_lane,              \
                 double* end);

namespace sb::avx2 {
SB_DECLARE_BALANCE_KERNELS
}
namespace sb::avx512 {
SB_DECLARE_BALANCE_KERNELS
}
namespace sb {
SB_DECLARE_BALANCE_KERNELS  // for this processor
}
#undef SB_DECLARE_BALANCE_KERNELS
