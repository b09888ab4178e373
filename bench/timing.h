#pragma once

#include <cblas.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#include "device/blas_kernels.h"

namespace sb::bench {

inline double seconds_of(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The shortest of several runs after one to warm up: other work on the machine only ever adds.
inline double best_seconds(int runs, const std::function<void()>& body) {
  body();
  double best = 1e300;
  for (int i = 0; i < runs; ++i) best = std::min(best, seconds_of(body));
  return best;
}

// FLOP/s of OpenBLAS's own sgemm at 2048³ with its own threads and our choice of its kernels: what the rest is measured
// against.
inline double sgemm_rate(int threads, int runs = 12) {
  constexpr int kSize = 2048;
  std::vector<float> a(size_t{kSize} * kSize, 0.5f), b(a), c(a.size());
  blas_kernels();
  openblas_set_num_threads(threads);
  const double seconds = best_seconds(runs, [&] {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, kSize, kSize, kSize, 1.0f, a.data(), kSize, b.data(), kSize,
                0.0f, c.data(), kSize);
  });
  openblas_set_num_threads(1);
  // Its threads go on spinning for a while; they must not disturb what is measured next.
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  return 2.0 * kSize * kSize * kSize / seconds;
}

}  // namespace sb::bench
