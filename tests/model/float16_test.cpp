#include "device/float16.h"

#include <gtest/gtest.h>

#include <cmath>

namespace sb {
namespace {

TEST(Float16Test, HalfByItsDefinition) {
  // Every pattern against sign · mantissa · 2^exponent, computed in fp64.
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const int exponent = static_cast<int>(bits >> 10 & 31), mantissa = static_cast<int>(bits & 1023);
    const float got = f32_from_f16(static_cast<uint16_t>(bits));
    EXPECT_EQ(std::signbit(got), bits >> 15 == 1);
    if (exponent == 31) {
      EXPECT_TRUE(mantissa == 0 ? std::isinf(got) : std::isnan(got)) << bits;
      continue;
    }
    const double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
    EXPECT_EQ(std::fabs(double{got}), magnitude) << bits;
  }
}

TEST(Float16Test, EveryBf16SurvivesARoundTrip) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float value = f32_from_bf16(static_cast<uint16_t>(bits));
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(f32_from_bf16(bf16_from_f32(value)))) << bits;
    } else {
      EXPECT_EQ(bf16_from_f32(value), bits);
    }
  }
}

TEST(Float16Test, Bf16RoundsToNearestEven) {
  EXPECT_EQ(f32_from_bf16(bf16_from_f32(1.0f + 0x1p-8f)), 1.0f);                       // a tie, down to even
  EXPECT_EQ(f32_from_bf16(bf16_from_f32(1.0f + 3 * 0x1p-8f)), 1.0f + 4 * 0x1p-8f);     // a tie, up to even
  EXPECT_EQ(f32_from_bf16(bf16_from_f32(1.0f + 0x1p-8f + 0x1p-20f)), 1.0f + 0x1p-7f);  // above a tie
  EXPECT_TRUE(std::isinf(f32_from_bf16(bf16_from_f32(3.4e38f))));                      // beyond the largest
  EXPECT_TRUE(std::isnan(f32_from_bf16(bf16_from_f32(std::nanf("1")))));
}

}  // namespace
}  // namespace sb
