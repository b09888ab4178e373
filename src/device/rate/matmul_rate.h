#pragma once

#include <string>

#include "core/thread_pool.h"
#include "device/blas_kernels.h"

namespace sb {

// fp32 FLOP/s of one large matmul on all threads of the pool: the best of several, a fraction of a second.
double matmul_rate(ThreadPool& pool);
// "OpenBLAS for SkylakeX, 512 GFLOP/s on 2 threads"
std::string describe_matmul_rate(double rate, int threads);

// How near matmuls come to the processor's peak (independent multiply-adds of its widest vectors), and whether kernels
// of another width would come nearer. FLOP/s of all threads, measured in turns, the best of each.
struct MatmulSpeed {
  BlasKernels kernels;  // in use
  std::string other;    // of another width, by OpenBLAS' name; empty where there are none to compare with
  double rate = 0, other_rate = 0, peak = 0;
};
MatmulSpeed measure_matmul_speed(ThreadPool& pool);

// What to try where matmuls are slower than a processor with this instruction set allows; empty where they are not.
std::string advise(const MatmulSpeed& speed, CpuIsa isa);

}  // namespace sb
