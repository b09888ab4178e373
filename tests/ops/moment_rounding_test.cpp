// AdamW's moments in bf16: the rounding by itself, and updates on every device.
#include "ops/random/moment_rounding.h"

#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "ops/adamw.h"
#include "tests/ops/ops_fixture.h"

namespace sb::test {
namespace {

float from_bits(uint32_t bits) {
  return std::bit_cast<float>(bits);
}

constexpr uint32_t kAllBits = 1 << 16;

// Over all random numbers there are: exact, not a sample.
TEST(MomentRounding, TheMeanOfAllRoundingsIsTheValue) {
  std::vector<float> values = random_values(20, 5, 3.0);
  for (const float x : {1.001f, -1.001f, 1.9999999f, 0.1f, -3.4e-5f, 1e-38f, 3e37f}) values.push_back(x);
  // Denormals, below the smallest one of bf16, too; the last below a power of two; the largest below bf16's largest.
  for (const uint32_t bits : {0x00000001u, 0x0000ffffu, 0x00018001u, 0x80712345u, 0x3fffffffu, 0x7f7e1234u})
    values.push_back(from_bits(bits));
  for (const float x : values) {
    const float below = from_bits(std::bit_cast<uint32_t>(x) & 0xffff0000),
                above = from_bits((std::bit_cast<uint32_t>(x) & 0xffff0000) + 0x10000);
    double sum = 0;
    for (uint32_t random = 0; random < kAllBits; ++random) {
      const float rounded = round_moment(x, random);
      ASSERT_TRUE(rounded == below || rounded == above) << x << " became " << rounded;
      sum += static_cast<double>(rounded) / kAllBits;
    }
    EXPECT_EQ(sum, static_cast<double>(x));
  }
}

TEST(MomentRounding, WhatBf16HoldsStays) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float x : {0.0f, -0.0f, 1.0f, -2.5f, 0x1p-126f, from_bits(0x00010000), from_bits(0x807f0000),
                        from_bits(0x7f7f0000), from_bits(0xff7f0000), infinity, -infinity})
    for (const uint32_t random : {0u, 1u, 0x8000u, 0xffffu})
      EXPECT_EQ(std::bit_cast<uint32_t>(round_moment(x, random)), std::bit_cast<uint32_t>(x)) << x;
  for (const uint32_t bits : {0x7fc00000u, 0x7f800001u, 0xffffffffu})
    for (const uint32_t random : {0u, 1u, 0xffffu}) EXPECT_TRUE(std::isnan(round_moment(from_bits(bits), random)));
}

TEST(MomentRounding, NothingFiniteBecomesInfinite) {
  const float largest = from_bits(0x7f7f0000);
  for (uint32_t random = 0; random < kAllBits; ++random) {
    ASSERT_EQ(round_moment(std::numeric_limits<float>::max(), random), largest);
    ASSERT_EQ(round_moment(-std::numeric_limits<float>::max(), random), -largest);
  }
}

TEST(MomentBits, AreThoseOfCore) {
  const uint64_t tensor = 0x123456789abcdef0;
  for (const int64_t step : {int64_t{1}, int64_t{7}, (int64_t{1} << 33) + 5}) {
    MomentBits bits(tensor, step);
    for (const int64_t place : {int64_t{0}, int64_t{3}, int64_t{1}, int64_t{4}, int64_t{5}, int64_t{2},
                                (int64_t{1} << 36) + 6, (int64_t{1} << 36) + 7})
      EXPECT_EQ(bits.at(place), Random::block(tensor, static_cast<uint64_t>(place / 4),
                                              static_cast<uint64_t>(step))[static_cast<size_t>(place % 4)]);
  }
}

// Of one value a quarter of the way to its upper neighbour: a quarter goes up, whichever moment, element, step or
// tensor it is, and one says nothing of another.
TEST(MomentBits, RoundTheRightShareUpIndependently) {
  const float x = from_bits(0x3f804000);
  const int64_t n = 100000;
  const auto goes_up = [&](uint32_t random) { return round_moment(x, random) > x; };
  const auto ups = [&](uint64_t tensor, int64_t step, int shift) {
    MomentBits bits(tensor, step);
    std::vector<int> all;
    for (int64_t i = 0; i < n; ++i) all.push_back(goes_up(bits.at(i) >> shift & 0xffff));
    return all;
  };
  const auto first = ups(1, 1, 0);
  const double deviation = std::sqrt(n * 0.25 * 0.75);
  EXPECT_NEAR(std::accumulate(first.begin(), first.end(), 0), n / 4, 5 * deviation);
  for (const auto& other : {ups(1, 1, 16), ups(1, 2, 0), ups(2, 1, 0)}) {
    EXPECT_NEAR(std::accumulate(other.begin(), other.end(), 0), n / 4, 5 * deviation);
    EXPECT_NEAR(std::inner_product(first.begin(), first.end(), other.begin(), 0), n / 16,
                5 * std::sqrt(n * 15.0 / 256.0));
  }
}

TEST(MomentPlace, PartsOfColumnsFindTheirElements) {
  // Columns 3 to 8 of 11, from the third element of the second row on.
  const MomentPlace place{.tensor = 1, .first = 7, .begin = 3, .run = 5, .stride = 11};
  for (int64_t i = 0; i < 30; ++i) {
    const int64_t row = (7 + i) / 5, column = (7 + i) % 5;
    EXPECT_EQ(place.of(i), row * 11 + 3 + column);
  }
  EXPECT_EQ((MomentPlace{.first = 4, .begin = 100}.of(9)), 113);
}

class Bf16MomentsTest : public OpsTest {
 protected:
  TensorView zeros(int64_t n) { return halves(std::vector<float>(static_cast<size_t>(n)), {n}); }
};
SB_INSTANTIATE_ON_ALL_DEVICES(Bf16MomentsTest);

constexpr AdamWStep kBf16Step = {.learning_rate = 1e-2f,
                                 .beta1 = 0.9f,
                                 .beta2 = 0.999f,
                                 .eps = 1e-8f,
                                 .weight_decay = 0.1f,
                                 .step = 1,
                                 .gradient_scale = 1.0f};

// Numbers whose moments fp32 holds exactly, so that every device has the same ones to round.
TEST_P(Bf16MomentsTest, AreRoundedByTheElementsPlace) {
  const int64_t n = 2011;
  // On and off the borders of vectors and of random blocks, whole and by columns.
  const std::vector<DecayRange> ranges = {{0, 512, true, {7, 0, 0, 1, 1}},
                                          {512, 1003, false, {7, 512, 40, 1, 1}},
                                          {1003, 1500, true, {8, 3, 5, 6, 17}},
                                          {1504, 2007, true, {9, 0, 4, 8, 24}}};
  AdamWStep step = kBf16Step;
  step.beta1 = step.beta2 = 0.5f;
  step.step = 11;
  std::vector<float> p0 = random_values(n, 1), g(static_cast<size_t>(n)), m0(g), v0(g);
  for (size_t i = 0; i < g.size(); ++i) {
    g[i] = (i % 2 == 0 ? 1.0f : -1.0f) * (1.0f + static_cast<float>(i * 37 % 256) / 256.0f);
    m0[i] = 1.0f + static_cast<float>(i % 64) / 64.0f;
    v0[i] = 0.5f + static_cast<float>(i % 32) / 64.0f;
  }
  const TensorView p = floats(p0, {n}), m = halves(m0, {n}), v = halves(v0, {n}), gt = floats(g, {n});
  const TensorView exact = floats(p0, {n}), exact_m = floats(m0, {n}), exact_v = floats(v0, {n});
  adamw_update(exec(), step, ranges, {p, gt, m, v, {}, {}});
  adamw_update(exec(), step, ranges, {exact, gt, exact_m, exact_v, {}, {}});
  std::vector<float> expected_m = m0, expected_v = v0;
  for (const DecayRange& range : ranges)
    for (int64_t i = range.begin; i < range.end; ++i) {
      const auto at = static_cast<size_t>(i);
      const int64_t place = range.place.of(i - range.begin);
      const uint32_t random = Random::block(range.place.tensor, static_cast<uint64_t>(place / 4),
                                            static_cast<uint64_t>(step.step))[static_cast<size_t>(place % 4)];
      expected_m[at] = round_moment(0.5f * m0[at] + 0.5f * g[at], random & 0xffff);
      expected_v[at] = round_moment(0.5f * v0[at] + 0.5f * g[at] * g[at], random >> 16);
    }
  EXPECT_EQ(host(m), expected_m);
  EXPECT_EQ(host(v), expected_v);
  // What is rounded is what is kept: this step's parameters are those of exact moments.
  expect_close(host(p), doubles(host(exact)), 1e-6, "parameters");
}

TEST_P(Bf16MomentsTest, HaveEqualBitsForAnyCutAndAnyNumberOfThreads) {
  const int64_t n = 140003;
  const TensorView gt = floats(random_values(n, 2, 1e-3), {n});
  ThreadPool one(1);
  Exec serial = exec();
  serial.pool = &one;
  const TensorView p = floats(random_values(n, 1), {n}), p2 = floats(random_values(n, 1), {n});
  const TensorView m = zeros(n), v = zeros(n), m2 = zeros(n), v2 = zeros(n);
  for (int64_t t = 1; t <= 3; ++t) {
    AdamWStep step = kBf16Step;
    step.step = t;
    const DecayRange whole = {0, n, true, {3, 0, 0, 1, 1}};
    adamw_update(serial, step, std::span(&whole, 1), {p, gt, m, v, {}, {}});
    // Cuts on borders of vectors, off which a GPU may join other products.
    for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 8}, {8, 70000}, {70000, n}}) {
      const DecayRange part = {0, end - begin, true, {3, begin, 0, 1, 1}};
      adamw_update(exec(), step, std::span(&part, 1),
                   {p2.rows(begin, end), gt.rows(begin, end), m2.rows(begin, end), v2.rows(begin, end), {}, {}});
    }
  }
  EXPECT_EQ(host(p2), host(p));
  EXPECT_EQ(host(m2), host(m));
  EXPECT_EQ(host(v2), host(v));
}

double mean(const std::vector<float>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

// Steps of a thousandth: rounded to the nearest bf16, the second moment would stop half-way up and never come down.
TEST_P(Bf16MomentsTest, FollowTheExactOnesOnAverage) {
  const int64_t n = 4096;
  const int steps = 1500;
  const TensorView p = filled_f32({n}, 1), m = zeros(n), v = zeros(n);
  int64_t t = 0;
  double exact_m = 0, exact_v = 0, nearest = 0;
  for (const float gradient : {-0.3f, 0.0f}) {
    const TensorView g = filled_f32({n}, gradient);
    const double g1 = static_cast<double>(gradient), g2 = g1 * g1;
    for (int i = 0; i < steps; ++i) {
      AdamWStep step = kBf16Step;
      step.step = ++t;
      step.learning_rate = 1e-5f;
      adamw_update(exec(), step, p, g, m, v);
      exact_m = 0.9 * exact_m + 0.1 * g1;
      exact_v = 0.999 * exact_v + 0.001 * g2;
      nearest = static_cast<double>(to_bf16(static_cast<float>(0.999 * nearest + 0.001 * g2)));
      // Each step's rounding has a standard deviation of at most half a unit, 2^-8 of the value, and adds up over about
      // 1 / (2 · 0.001) steps: below 9 % of an element, 0.14 % of the mean of all. Five of these.
      if (t % 250 != 0) continue;
      EXPECT_NEAR(mean(host(v)) / exact_v, 1.0, 0.007) << "step " << t;
    }
    EXPECT_NEAR(mean(host(m)), exact_m, 0.001 * 0.3);
    EXPECT_GT(std::abs(nearest / exact_v - 1), 0.3) << "this test would see nothing";
  }
}

TEST_P(Bf16MomentsTest, OfDifferentTypesAreRefused) {
  const TensorView a = filled_f32({4}, 0), b = zeros(4);
  EXPECT_THROW(adamw_update(exec(), kBf16Step, a, a, a, b), InternalError);
  EXPECT_THROW(adamw_update(exec(), kBf16Step, a, a, b, a), InternalError);
}

}  // namespace
}  // namespace sb::test
