#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "core/cpu_isa.h"
#include "tests/ops/simd_probe.h"

namespace sb::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
bool wide() {
  return cpu_isa() == CpuIsa::avx512;
}

std::vector<float> vector_exp(const std::vector<float>& x) {
  std::vector<float> y(x.size());
  (wide() ? avx512::probe_exp : avx2::probe_exp)(x.data(), static_cast<int64_t>(x.size()), y.data());
  return y;
}

std::vector<float> vector_exp_nonpositive(const std::vector<float>& x) {
  std::vector<float> y(x.size());
  (wide() ? avx512::probe_exp_nonpositive : avx2::probe_exp_nonpositive)(x.data(), static_cast<int64_t>(x.size()),
                                                                         y.data());
  return y;
}

double ulps(float actual, double expected) {
  int exponent;
  std::frexp(expected, &exponent);
  return std::abs(actual - expected) / std::ldexp(1.0, std::max(exponent, -125) - 24);
}

TEST(SimdExp, WithinTwoUlpsOverTheWholeRange) {
  std::vector<float> x;
  for (double v = -87.3; v < 88.72; v += 0.000913) x.push_back(static_cast<float>(v));
  const std::vector<float> y = vector_exp(x);
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) worst = std::max(worst, ulps(y[i], std::exp(static_cast<double>(x[i]))));
  EXPECT_LT(worst, 2.0);
}

TEST(SimdExp, NonpositiveAgreesBitForBit) {
  std::vector<float> x = {-kInfinity, -1e30f, -87.4f, -0.0f, 0.0f};
  for (double v = -90; v < 0; v += 0.00713) x.push_back(static_cast<float>(v));
  EXPECT_EQ(vector_exp(x), vector_exp_nonpositive(x));
}

TEST(SimdExp, EndsOfTheRange) {
  const std::vector<float> y =
      vector_exp({-kInfinity, -1e30f, -87.5f, 0.0f, -0.0f, 88.7f, 88.8f, 1e30f, kInfinity, NAN});
  EXPECT_EQ(y[0], 0.0f);
  EXPECT_EQ(y[1], 0.0f);
  EXPECT_EQ(y[2], 0.0f);
  EXPECT_EQ(y[3], 1.0f);
  EXPECT_EQ(y[4], 1.0f);
  EXPECT_TRUE(std::isfinite(y[5]));
  EXPECT_EQ(y[6], kInfinity);
  EXPECT_EQ(y[7], kInfinity);
  EXPECT_EQ(y[8], kInfinity);
  EXPECT_TRUE(std::isnan(y[9]));
  EXPECT_TRUE(std::isnan(vector_exp_nonpositive({NAN})[0]));
}

TEST(SimdExp, BothInstructionSetsAgreeBitForBit) {
  if (!wide()) GTEST_SKIP() << "needs AVX-512";
  std::vector<float> x;
  for (double v = -100; v < 100; v += 0.0317) x.push_back(static_cast<float>(v));
  std::vector<float> narrow(x.size());
  avx2::probe_exp(x.data(), static_cast<int64_t>(x.size()), narrow.data());
  EXPECT_EQ(vector_exp(x), narrow);
}

TEST(Simd, Reductions) {
  std::vector<float> x(static_cast<size_t>(wide() ? avx512::probe_lanes() : avx2::probe_lanes()));
  float sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += x[i] = static_cast<float>(1 << i);
  EXPECT_EQ((wide() ? avx512::probe_sum : avx2::probe_sum)(x.data()), sum);
  for (size_t i = 0; i < x.size(); ++i) {
    std::vector<float> y(x.size(), -3.0f);
    y[i] = -1.0f;
    EXPECT_EQ((wide() ? avx512::probe_max : avx2::probe_max)(y.data()), -1.0f) << i;
  }
}

}  // namespace
}  // namespace sb::test
