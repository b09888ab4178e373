#include "device/rate/matmul_rate.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <functional>
#include <vector>

#include "core/cpu_isa.h"
#include "device/blas.h"
#include "device/blas_kernels.h"

namespace sb {

namespace avx2 {
int64_t multiply_add_loop(int64_t rounds);
}
namespace avx512 {
int64_t multiply_add_loop(int64_t rounds);
}

namespace {

constexpr int kRounds = 5;
constexpr double kGood = 0.7;          // of the peak
constexpr double kWorthAChange = 1.1;  // times the rate

double seconds_of(const std::function<void()>& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::max(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(), 1e-9);
}

// One matmul, to be timed again and again.
class TimedMatmul {
 public:
  explicit TimedMatmul(ThreadPool& pool) : pool_(pool), side_(side_for(pool.threads())) {
    a_.assign(static_cast<size_t>(side_ * kInner), 0.5f);
    b_ = a_;
    c_.resize(static_cast<size_t>(side_ * side_));
    run();  // the first sets things up
  }
  double rate() {
    const double flops = 2.0 * static_cast<double>(side_) * static_cast<double>(side_) * static_cast<double>(kInner);
    return flops / seconds_of([&] { run(); });
  }

 private:
  static constexpr int64_t kInner = 2048;
  // No thread's piece of the result is smaller than 512 × 512.
  static int64_t side_for(int threads) {
    return 512 * std::max<int64_t>(4, static_cast<int64_t>(std::ceil(std::sqrt(threads))));
  }
  void run() {
    parallel_sgemm(pool_, {.transpose_b = true,
                           .m = side_,
                           .n = side_,
                           .k = kInner,
                           .a = a_.data(),
                           .lda = kInner,
                           .b = b_.data(),
                           .ldb = kInner,
                           .c = c_.data(),
                           .ldc = side_});
  }

  ThreadPool& pool_;
  int64_t side_;
  std::vector<float> a_, b_, c_;
};

double peak_rate(ThreadPool& pool) {
  constexpr int64_t kLoop = int64_t{1} << 23;  // as long as a matmul, so that other work disturbs both alike
  const auto loop = cpu_isa() == CpuIsa::avx512 ? avx512::multiply_add_loop : avx2::multiply_add_loop;
  std::atomic<int64_t> flops = 0;
  const double seconds =
      seconds_of([&] { pool.parallel_slices(pool.threads(), [&](int64_t, int64_t, int) { flops += loop(kLoop); }); });
  return static_cast<double>(flops) / seconds;
}

// Kernels of the width that these have not, where this processor has the instructions.
std::string other_kernels(const std::string& kernels) {
  const std::string wide(choose_blas_kernels(cpu_isa(), kernels));
  if (wide != kernels) return wide;
  return cpu_isa() == CpuIsa::avx512 ? std::string(choose_blas_kernels(CpuIsa::avx2, kernels)) : "";
}

}  // namespace

double matmul_rate(ThreadPool& pool) {
  TimedMatmul matmul(pool);
  double best = 0;
  for (int i = 0; i < kRounds; ++i) best = std::max(best, matmul.rate());
  return best;
}

std::string describe_matmul_rate(double rate, int threads) {
  return fmt::format("{}, {:.0f} GFLOP/s on {} thread{}", describe(blas_kernels()), rate * 1e-9, threads,
                     threads == 1 ? "" : "s");
}

MatmulSpeed measure_matmul_speed(ThreadPool& pool) {
  MatmulSpeed speed;
  speed.kernels = blas_kernels();
  TimedMatmul matmul(pool);
  const std::string other = other_kernels(speed.kernels.name);
  if (!other.empty() && use_blas_kernels(other)) speed.other = other;
  for (int round = 0; round < kRounds; ++round) {
    speed.peak = std::max(speed.peak, peak_rate(pool));
    if (!speed.other.empty()) {
      use_blas_kernels(speed.other);
      speed.other_rate = std::max(speed.other_rate, matmul.rate());
    }
    use_blas_kernels(speed.kernels.name);
    speed.rate = std::max(speed.rate, matmul.rate());
  }
  return speed;
}

std::string advise(const MatmulSpeed& speed, CpuIsa isa) {
  if (!speed.other.empty() && speed.other_rate > kWorthAChange * speed.rate) {
    const bool would_be_chosen = choose_blas_kernels(isa, speed.other) == speed.other;
    return fmt::format(
        "OpenBLAS' kernels for {} reach {:.0f} GFLOP/s here, {:.1f} times as much: {}", speed.other,
        speed.other_rate * 1e-9, speed.other_rate / speed.rate,
        speed.kernels.by_variable && would_be_chosen
            ? fmt::format("OPENBLAS_CORETYPE={} in the environment forbids them, unset it", speed.kernels.name)
            : fmt::format("set OPENBLAS_CORETYPE={} in the environment of every rank", speed.other));
  }
  if (speed.rate < kGood * speed.peak)
    return "matmuls are far from the peak: measure again while nothing else runs here; if it stays so, a newer "
           "OpenBLAS "
           "may have better kernels for this processor";
  return {};
}

}  // namespace sb
