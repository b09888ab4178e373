#include "device/blas.h"

#include <cblas.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

#include "core/errors.h"
#include "core/memory_plan.h"
#include "device/blas_kernels.h"

// OpenBLAS' own: takes one of its buffers, and asks the system for another where all are in use. Weak, since other
// builds of the library may not show them.
extern "C" {
__attribute__((weak)) void* blas_memory_alloc(int);
__attribute__((weak)) void blas_memory_free(void*);
}

namespace sb {
namespace {

// OpenBLAS asks for its buffers in a loop without an end when the system refuses: they are taken once, by one thread,
// after the system was seen to have the room.
void take_buffers(int threads) {
  const int64_t bytes = threads * kBlasBufferBytes;
  void* room = ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (room == MAP_FAILED)
    throw OutOfMemory(
        "OpenBLAS needs {} of address space for {} threads, which the system does not allow: raise the limit (ulimit "
        "-v), or lower the number of threads (train.threads, --threads)",
        format_bytes(bytes), threads);
  ::munmap(room, static_cast<size_t>(bytes));
  if (blas_memory_alloc == nullptr || blas_memory_free == nullptr) return;
  std::vector<void*> buffers;
  for (int i = 0; i < threads; ++i) buffers.push_back(blas_memory_alloc(0));
  for (void* buffer : buffers) blas_memory_free(buffer);
}

// Before `threads` of them multiply at the same time. Our pool owns the threads: OpenBLAS stays on the calling one.
void prepare_openblas(int threads) {
  static std::atomic<int> prepared = 0;
  if (prepared.load(std::memory_order_acquire) >= threads) return;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (prepared.load() >= threads) return;
  if (prepared.load() == 0) {
    openblas_set_num_threads(1);
    blas_kernels();  // before the first product
  }
  take_buffers(threads);
  prepared.store(threads, std::memory_order_release);
}

// Pieces of C by rows and columns: as many as threads, as square as possible, since every piece packs its own rows of
// A and columns of B.
struct Cut {
  int rows = 1, columns = 1;
};
Cut cut_for(int64_t m, int64_t n, int threads) {
  Cut best{threads, 1};
  double best_cost = 1e300;
  for (int rows = 1; rows <= threads; ++rows) {
    if (threads % rows != 0) continue;
    const int columns = threads / rows;
    const double cost = static_cast<double>(m) / rows + static_cast<double>(n) / columns;
    if (cost < best_cost) {
      best_cost = cost;
      best = {rows, columns};
    }
  }
  return best;
}

// Border i of `pieces` over `count`, on a multiple of the kernel's tile.
int64_t border(int64_t count, int pieces, int i) {
  constexpr int64_t kTile = 16;
  if (i == pieces) return count;
  return std::min(count, (count * i / pieces + kTile / 2) / kTile * kTile);
}

}  // namespace

void sgemm(const Sgemm& p) {
  if (p.m == 0 || p.n == 0) return;
  float beta = p.beta;
  if (p.bias != nullptr) {
    // Cheaper than a pass afterwards: the product then adds to what it would otherwise have to clear.
    for (int64_t i = 0; i < p.m; ++i) {
      float* row = p.c + i * p.ldc;
      for (int64_t j = 0; j < p.n; ++j) row[j] = p.bias[j] + (beta == 0.0f ? 0.0f : beta * row[j]);
    }
    beta = 1.0f;
  }
  if (p.k == 0) {
    if (beta == 0.0f) {
      for (int64_t i = 0; i < p.m; ++i) std::fill_n(p.c + i * p.ldc, p.n, 0.0f);
    }
    return;
  }
  prepare_openblas(1);
  cblas_sgemm(CblasRowMajor, p.transpose_a ? CblasTrans : CblasNoTrans, p.transpose_b ? CblasTrans : CblasNoTrans,
              static_cast<blasint>(p.m), static_cast<blasint>(p.n), static_cast<blasint>(p.k), 1.0f, p.a,
              static_cast<blasint>(p.lda), p.b, static_cast<blasint>(p.ldb), beta, p.c, static_cast<blasint>(p.ldc));
}

void parallel_sgemm(ThreadPool& pool, const Sgemm& p) {
  constexpr int64_t kWorthSharing = int64_t{1} << 16;  // multiply-adds; less takes about as long as handing it out
  if (pool.threads() == 1 || p.m * p.n * p.k < kWorthSharing) return sgemm(p);
  const Cut cut = cut_for(p.m, p.n, pool.threads());
  prepare_openblas(pool.threads());
  pool.parallel_for(int64_t{cut.rows} * cut.columns, 1, [&](int64_t piece, int64_t, int) {
    const int row = static_cast<int>(piece / cut.columns), column = static_cast<int>(piece % cut.columns);
    const int64_t m0 = border(p.m, cut.rows, row), m1 = border(p.m, cut.rows, row + 1);
    const int64_t n0 = border(p.n, cut.columns, column), n1 = border(p.n, cut.columns, column + 1);
    Sgemm part = p;
    part.m = m1 - m0;
    part.n = n1 - n0;
    part.a += p.transpose_a ? m0 : m0 * p.lda;
    part.b += p.transpose_b ? n0 * p.ldb : n0;
    part.c += m0 * p.ldc + n0;
    if (p.bias != nullptr) part.bias += n0;
    sgemm(part);
  });
}

}  // namespace sb
