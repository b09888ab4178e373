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

}  // namespace
}  // namespace sb
