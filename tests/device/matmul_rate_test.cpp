#include "device/rate/matmul_rate.h"

#include <gtest/gtest.h>

namespace sb {
namespace {

TEST(MatmulRate, NothingToSayNearThePeak) {
  const MatmulSpeed speed = {
      .kernels = {"SkylakeX", false}, .other = "Haswell", .rate = 480e9, .other_rate = 250e9, .peak = 512e9};
  EXPECT_EQ(advise(speed, CpuIsa::avx512), "");
}

TEST(MatmulRate, AVariableThatForbidsFasterKernelsIsToBeUnset) {
  const MatmulSpeed speed = {
      .kernels = {"Haswell", true}, .other = "SkylakeX", .rate = 250e9, .other_rate = 480e9, .peak = 512e9};
  EXPECT_EQ(
      advise(speed, CpuIsa::avx512),
      "OpenBLAS' kernels for SkylakeX reach 480 GFLOP/s here, 1.9 times as much: OPENBLAS_CORETYPE=Haswell in the "
      "environment forbids them, unset it");
}

// Of our own choice or of the user's: unsetting would bring the slower ones back.
TEST(MatmulRate, FasterKernelsThatWouldNotBeChosenAreToBeSet) {
  for (const bool by_variable : {false, true}) {
    const MatmulSpeed speed = {
        .kernels = {"SkylakeX", by_variable}, .other = "Haswell", .rate = 200e9, .other_rate = 240e9, .peak = 250e9};
    EXPECT_EQ(
        advise(speed, CpuIsa::avx512),
        "OpenBLAS' kernels for Haswell reach 240 GFLOP/s here, 1.2 times as much: set OPENBLAS_CORETYPE=Haswell in "
        "the environment of every rank");
  }
}

TEST(MatmulRate, WhatIsFarFromThePeakWithoutBetterKernelsIsSaid) {
  const MatmulSpeed alone = {.kernels = {"Haswell", false}, .other = "", .rate = 69e9, .other_rate = 0, .peak = 100e9};
  EXPECT_EQ(
      advise(alone, CpuIsa::avx2),
      "matmuls are far from the peak: measure again while nothing else runs here; if it stays so, a newer OpenBLAS "
      "may have better kernels for this processor");
  MatmulSpeed near = alone;
  near.rate = 71e9;
  EXPECT_EQ(advise(near, CpuIsa::avx2), "");
}

TEST(MatmulRate, WordsOfARate) {
  EXPECT_EQ(describe_matmul_rate(412.4e9, 2), describe(blas_kernels()) + ", 412 GFLOP/s on 2 threads");
  EXPECT_EQ(describe_matmul_rate(9.6e9, 1), describe(blas_kernels()) + ", 10 GFLOP/s on 1 thread");
}

// Rates depend on what else runs: that they are there, and that the process multiplies as before.
TEST(MatmulRate, MeasuringChangesNoKernels) {
  ThreadPool pool(2);
  const std::string before = blas_kernels().name;
  const MatmulSpeed speed = measure_matmul_speed(pool);
  EXPECT_EQ(blas_kernels().name, before);
  EXPECT_EQ(speed.kernels.name, before);
  EXPECT_NE(speed.other, before);
  EXPECT_EQ(speed.other.empty(), speed.other_rate == 0);
  EXPECT_GT(speed.rate, 0);
  EXPECT_GT(speed.peak, 0);
  EXPECT_GT(matmul_rate(pool), 0);
}

}  // namespace
}  // namespace sb
