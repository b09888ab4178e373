#include "core/random.h"

#include <gtest/gtest.h>

#include <vector>

namespace sb {
namespace {

// Known answers published with the Random123 library (philox4x32-10).
TEST(Random, MatchesPublishedVectors) {
  EXPECT_EQ(Random::block(0, 0, 0), (std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Random::block(~0ull, ~0ull, ~0ull),
            (std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Random::block(0x299f31d0a4093822, 0x85a308d3243f6a88, 0x0370734413198a2e),
            (std::array<uint32_t, 4>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Random, PositionIsTheWholeState) {
  Random a(7, 1);
  std::vector<uint32_t> all;
  for (int i = 0; i < 50; ++i) all.push_back(a.next_u32());
  Random b(7, 1, 20);
  for (int i = 20; i < 50; ++i) EXPECT_EQ(b.next_u32(), all[i]);
  EXPECT_EQ(a.position(), b.position());
}

TEST(Random, StreamsAndSeedsDiffer) {
  EXPECT_NE(Random(1, 0).next_u64(), Random(1, 1).next_u64());
  EXPECT_NE(Random(1, 0).next_u64(), Random(2, 0).next_u64());
}

TEST(Random, BelowStaysInRangeAndIsEven) {
  Random random(3);
  std::vector<int> seen(7);
  for (int i = 0; i < 70000; ++i) ++seen[random.below(7)];
  for (const int n : seen) EXPECT_NEAR(n, 10000, 500);
  for (int i = 0; i < 10; ++i) EXPECT_EQ(random.below(1), 0u);
}

TEST(Random, NormalHasUnitVariance) {
  Random random(5);
  double sum = 0, squares = 0;
  const int n = 100000;
  for (int i = 0; i < n; ++i) {
    const double x = random.normal();
    sum += x;
    squares += x * x;
  }
  EXPECT_NEAR(sum / n, 0, 0.02);
  EXPECT_NEAR(squares / n, 1, 0.03);
}

// What a stream gives at a position, from the published function alone.
TEST(Random, EveryPositionIsAWordOfItsBlock) {
  const uint64_t seed = 0x123456789abcdef0, stream = 77;
  for (const uint64_t start :
       {uint64_t{0}, uint64_t{1}, uint64_t{3}, uint64_t{4}, (uint64_t{1} << 34) - 2, (uint64_t{1} << 60) + 1}) {
    Random random(seed, stream, start);
    for (uint64_t at = start; at < start + 9; ++at) {
      const uint32_t expected = Random::block(seed, at >> 2, stream)[at & 3];
      EXPECT_EQ(random.bits_at(at), expected) << at;
      EXPECT_EQ(random.position(), at) << "looking does not move";
      EXPECT_EQ(random.next_u32(), expected) << at;
    }
  }
}

TEST(Random, WiderNumbersAreMadeOfTheSameWords) {
  Random words(9, 2), numbers(9, 2);
  for (int i = 0; i < 20; ++i) {
    const uint64_t high = words.next_u32(), low = words.next_u32(), both = high * 0x100000000u + low;
    if (i % 2 == 0) {
      EXPECT_EQ(numbers.next_u64(), both);
    } else {
      EXPECT_EQ(numbers.uniform(), static_cast<double>(both / 2048) / 9007199254740992.0);  // 53 bits
    }
  }
  EXPECT_EQ(numbers.position(), 40u);
  numbers.normal();
  EXPECT_EQ(numbers.position(), 44u) << "a resumed run counts on it";
}

TEST(Random, UniformFillsItsRangeEvenly) {
  Random random(21);
  std::vector<int> bins(16);
  constexpr int kDraws = 64000;
  for (int i = 0; i < kDraws; ++i) {
    const double value = random.uniform();
    ASSERT_GE(value, 0.0);
    ASSERT_LT(value, 1.0);
    ++bins[static_cast<size_t>(value * 16)];
  }
  // Chi squared with 15 degrees of freedom: 44 is passed once in ten thousand, and the numbers are always the same.
  double chi = 0;
  for (const int n : bins) chi += (n - kDraws / 16.0) * (n - kDraws / 16.0) / (kDraws / 16.0);
  EXPECT_LT(chi, 44);
  EXPECT_GT(chi, 2) << "too even to be random";
}

// Bounds for which half of all draws must be thrown away, or none.
TEST(Random, BelowLargeBounds) {
  for (const uint64_t bound :
       {uint64_t{1} << 63, (uint64_t{1} << 63) + 1, UINT64_MAX, UINT64_MAX - 1, (uint64_t{1} << 32) + 1}) {
    Random random(4);
    double sum = 0;
    constexpr int kDraws = 4000;
    for (int i = 0; i < kDraws; ++i) {
      const uint64_t value = random.below(bound);
      ASSERT_LT(value, bound);
      sum += static_cast<double>(value) / static_cast<double>(bound) / kDraws;
    }
    EXPECT_NEAR(sum, 0.5, 5 * std::sqrt(1.0 / 12 / kDraws)) << bound;
  }
}

// The share of a normal distribution beyond whole deviations.
TEST(Random, NormalHasTheRightTails) {
  Random random(8);
  constexpr int kDraws = 100000;
  int beyond[3] = {};
  for (int i = 0; i < kDraws; ++i) {
    const double x = random.normal();
    ASSERT_TRUE(std::isfinite(x));
    for (int d = 0; d < 3; ++d) beyond[d] += std::abs(x) > d + 1;
  }
  for (int d = 0; d < 3; ++d) {
    const double share = std::erfc((d + 1) / std::sqrt(2.0));
    EXPECT_NEAR(beyond[d], kDraws * share, 5 * std::sqrt(kDraws * share * (1 - share))) << d;
  }
}

}  // namespace
}  // namespace sb
