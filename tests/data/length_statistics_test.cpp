#include "data/length_statistics.h"

#include <gtest/gtest.h>

namespace sb {
namespace {

TEST(LengthStatistics, WorkedExample) {
  const LengthStatistics s = measure_lengths({100, 1, 3, 2, 3, 7, 4, 100, 3, 5});
  EXPECT_EQ(s.sequences, 10);
  EXPECT_EQ(s.tokens, 228);
  EXPECT_EQ(s.shortest, 1);
  EXPECT_EQ(s.longest, 100);
  EXPECT_DOUBLE_EQ(s.mean, 22.8);
  // Sorted: 1 2 3 3 3 4 5 7 100 100.
  const auto quantile = [&](double at) {
    for (const auto& q : s.quantiles)
      if (q.at == at) return q.length;
    return int64_t{-1};
  };
  EXPECT_EQ(quantile(0.01), 1);
  EXPECT_EQ(quantile(0.25), 3);
  EXPECT_EQ(quantile(0.5), 3);
  EXPECT_EQ(quantile(0.75), 7);
  EXPECT_EQ(quantile(0.99), 100);
  // [1,2) 1; [2,4) 2 3 3 3; [4,8) 4 5 7; [8,16) [16,32) [32,64) none; [64,128) 100 100.
  ASSERT_EQ(s.classes.size(), 7u);
  EXPECT_EQ(s.classes[1].from, 2);
  EXPECT_EQ(s.classes[1].to, 4);
  EXPECT_EQ(s.classes[1].sequences, 4);
  EXPECT_EQ(s.classes[1].tokens, 11);
  EXPECT_DOUBLE_EQ(s.classes[1].attention, 31);
  EXPECT_EQ(s.classes[4].sequences, 0);
  EXPECT_DOUBLE_EQ(s.attention, 1 + 31 + 90 + 20000);
  const std::string text = format_length_statistics(s);
  EXPECT_NE(text.find("10 sequences, 228 tokens; length 1 to 100, mean 22.8"), std::string::npos) << text;
  EXPECT_NE(text.find("40.00%    4.82%      0.15%"), std::string::npos) << text;
  EXPECT_NE(length_statistics_json(s).find("\"tokens\": 228"), std::string::npos);
}

TEST(LengthStatistics, ZeroAndHugeLengths) {
  const LengthStatistics s = measure_lengths({0, int64_t{1} << 40});
  EXPECT_EQ(s.classes.front().from, 0);
  EXPECT_EQ(s.classes.front().to, 1);
  EXPECT_EQ(s.classes.back().from, int64_t{1} << 40);
  EXPECT_NE(format_length_statistics(measure_lengths({0})).find("1 sequences"), std::string::npos);
}

}  // namespace
}  // namespace sb
