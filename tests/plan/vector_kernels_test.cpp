#include "plan/schedule/vector_kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "core/cpu_isa.h"
#include "core/random.h"

namespace sb {
namespace {

TEST(VectorKernels, ExpAndLogAreThoseOfTheLibrary) {
  std::vector<double> x{0.0, -1e-300, -1e-9, -0.5, -0.34657359027997264, -1.0, -17.25, -690.0, -700.0};
  Random random(1);
  for (int i = 0; i < 1000; ++i) x.push_back(-5 * random.uniform());
  std::vector<int32_t> n{1, 2, 3, 7, 128, 1 << 20, (1 << 20) + 1, 2147483647};
  for (int i = 0; i < 1000; ++i) n.push_back(1 + static_cast<int32_t>(random.below(600000)));
  std::vector<double> narrow = x, logs(n.size());
  avx2::exp_all(narrow.data(), narrow.size());
  avx2::log_all(n.data(), n.size(), logs.data());
  for (size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(narrow[i] / std::exp(x[i]), 1.0, 1e-14) << x[i];
  EXPECT_EQ(narrow[0], 1.0);
  for (size_t i = 0; i < n.size(); ++i) EXPECT_NEAR(logs[i], std::log(n[i]), 1e-14 * std::max(1.0, logs[i])) << n[i];
  if (cpu_isa() != CpuIsa::avx512) return;
  std::vector<double> wide = x;
  avx512::exp_all(wide.data(), wide.size());
  for (size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(wide[i] / narrow[i], 1.0, 1e-15);
}

TEST(VectorKernels, CurvesAreReadBetweenTheirPoints) {
  const std::vector<double> share{1.0, 0.9, 0.5, 0.45, 0.1, 0.1};
  std::vector<double> depth{4.0, 3.9999, 3.0, 2.25, 1.5, 1.0, 0.5, 0.0, -0.25, -3.0};
  Random random(4);
  for (int i = 0; i < 100; ++i) depth.push_back(4 * random.uniform());
  for (const double shift : {0.0, -0.75}) {
    std::vector<double> narrow(depth.size()), wide(depth.size());
    avx2::read_curve(share.data(), shift, depth.data(), depth.size(), narrow.data());
    for (size_t i = 0; i < depth.size(); ++i) {
      const double at = std::max(0.0, depth[i] + shift), whole = std::floor(at);
      const auto point = static_cast<size_t>(whole);
      EXPECT_NEAR(narrow[i], (1 - (at - whole)) * share[point] + (at - whole) * share[point + 1], 1e-14) << at;
    }
    if (cpu_isa() != CpuIsa::avx512) continue;
    avx512::read_curve(share.data(), shift, depth.data(), depth.size(), wide.data());
    for (size_t i = 0; i < depth.size(); ++i) EXPECT_NEAR(wide[i], narrow[i], 1e-15);
  }
}

TEST(VectorKernels, LanesAreSchedulesOfTheirOwn) {
  Random random(2);
  for (int trial = 0; trial < 40; ++trial) {
    PipelineTimes times;
    times.stages = 1 + static_cast<int>(random.below(6));
    times.micro_batches = 1 + static_cast<int>(random.below(9));
    const auto size = static_cast<size_t>(times.stages * times.micro_batches);
    if (trial % 2 == 0) {
      for (int i = 0; i < times.micro_batches; ++i)
        for (int s = 0; s < times.stages; ++s) {
          times.forward_transfer.push_back(s == 0 ? 0.0 : random.uniform());
          times.backward_transfer.push_back(s + 1 == times.stages ? 0.0 : random.uniform());
        }
      for (int s = 0; s < times.stages; ++s) {
        times.tail.push_back({random.uniform(), 4 * random.uniform(), random.uniform()});
        times.gather.push_back({random.uniform(), 8 * random.uniform(), random.uniform()});
      }
    }
    constexpr auto kLanes = static_cast<size_t>(Schedule::kLanes);
    std::vector<double> forward(size * kLanes), backward(size * kLanes), scratch;
    for (double& t : forward) t = 1 + random.uniform();
    for (double& t : backward) t = 2 + random.uniform();
    const Schedule schedule(times.stages, times.micro_batches);
    double makespan[kLanes];
    schedule.makespans(times, forward, backward, scratch, makespan);
    for (size_t lane = 0; lane < kLanes; ++lane) {
      times.forward.clear();
      times.backward.clear();
      for (size_t i = 0; i < size; ++i) {
        times.forward.push_back(forward[i * kLanes + lane]);
        times.backward.push_back(backward[i * kLanes + lane]);
      }
      EXPECT_DOUBLE_EQ(makespan[lane], schedule.makespan(times, {}));
    }
  }
}

}  // namespace
}  // namespace sb
