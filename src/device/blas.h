#pragma once

#include <cstdint>

#include "core/thread_pool.h"

namespace sb {

// C [m, n] = op(A) · op(B) + beta · C, row-major fp32, on the calling thread alone. op(A) is m × k and op(B) is k × n;
// with the transpose flag the matrix is stored the other way round. The ld are the distances between stored rows.
struct Sgemm {
  bool transpose_a = false, transpose_b = false;
  int64_t m = 0, n = 0, k = 0;
  const float* a = nullptr;
  int64_t lda = 0;
  const float* b = nullptr;
  int64_t ldb = 0;
  float beta = 0;
  float* c = nullptr;
  int64_t ldc = 0;
  const float* bias = nullptr;  // [n], added to every row
};
// The first of a process are OutOfMemory where the system does not give OpenBLAS its buffers.
void sgemm(const Sgemm& product);

// The same over the threads of the pool: C is cut into one piece a thread. The cut depends on (m, n, threads) only, so
// that a product repeated gives the same bits.
void parallel_sgemm(ThreadPool& pool, const Sgemm& product);

// What OpenBLAS maps for each thread that multiplies at the same time; little of it is ever touched.
inline constexpr int64_t kBlasBufferBytes = int64_t{128} << 20;

}  // namespace sb
