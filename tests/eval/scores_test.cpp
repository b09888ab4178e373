#include <gtest/gtest.h>

#include <cmath>

#include "core/labels.h"
#include "eval/needle.h"
#include "eval/perplexity.h"

namespace sb {
namespace {

TEST(PositionLosses, BucketsDoubleAndIgnoredLabelsDoNotCount) {
  PositionLosses losses(4);
  const std::vector<float> loss = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  std::vector<int32_t> labels(10, 0);
  labels[1] = kIgnoredLabel;
  losses.add(loss, labels);
  losses.add(std::vector<float>{100}, std::vector<int32_t>{3});
  ASSERT_EQ(losses.buckets().size(), 3u);
  EXPECT_EQ(losses.buckets()[0].begin, 0);
  EXPECT_EQ(losses.buckets()[0].end, 4);
  EXPECT_EQ(losses.buckets()[1].end, 8);
  EXPECT_EQ(losses.buckets()[2].end, 16);
  EXPECT_EQ(losses.buckets()[0].tokens, 4);
  EXPECT_DOUBLE_EQ(losses.buckets()[0].loss, 1 + 3 + 4 + 100);
  EXPECT_DOUBLE_EQ(losses.buckets()[1].loss, 5 + 6 + 7 + 8);
  EXPECT_DOUBLE_EQ(losses.buckets()[2].perplexity(), std::exp(9.5));
  EXPECT_EQ(losses.total().tokens, 10);
}

TEST(PositionLosses, NothingGivesNothing) {
  const PositionLosses losses;
  EXPECT_EQ(losses.total().tokens, 0);
  EXPECT_DOUBLE_EQ(losses.total().perplexity(), 0.0);
}

TEST(Ruler, StringMatchAsPublished) {
  EXPECT_DOUBLE_EQ(ruler_match_all("It is 42 and ABC.", {"42", "abc"}), 1.0);
  EXPECT_DOUBLE_EQ(ruler_match_all("It is 42.", {"42", "abc", "x1", "y2"}), 0.25);
  EXPECT_DOUBLE_EQ(ruler_match_part("It is 42.", {"7", "42"}), 1.0);
  EXPECT_DOUBLE_EQ(ruler_match_part("", {"7", "42"}), 0.0);
}

TEST(Needle, TableAndHeatMap) {
  const NeedleGrid grid{{0.0, 0.5}, {1024, 1500}, {{1.0, 0.5}, {0.25, 0.0}}};
  EXPECT_DOUBLE_EQ(grid.mean(), 0.4375);
  const std::string table = needle_table(grid);
  EXPECT_NE(table.find("1K"), std::string::npos);
  EXPECT_NE(table.find("1500"), std::string::npos);
  EXPECT_NE(table.find("25.0%"), std::string::npos);
  const std::string svg = needle_svg(grid, "a < b");
  EXPECT_NE(svg.find("a &lt; b"), std::string::npos);
  EXPECT_EQ(svg.find("<image"), std::string::npos);
  EXPECT_NE(svg.find("hsl(120,"), std::string::npos);  // all found: green
  EXPECT_NE(svg.find("hsl(0,"), std::string::npos);
  size_t cells = 0;
  for (size_t at = svg.find("hsl("); at != std::string::npos; at = svg.find("hsl(", at + 1)) ++cells;
  EXPECT_EQ(cells, 4u);
}

// A narrow grid with a long name: what is written beside the cells has room, too.
TEST(Needle, ThePictureIsAsWideAsItsWords) {
  const std::string svg = needle_svg({{0.5}, {1024}, {{1.0}}}, "needle: " + std::string(92, 'x'));
  const size_t at = svg.find("width=\"") + 7;
  EXPECT_GE(std::stoi(svg.substr(at)), 70 + 8 * 100);
}

}  // namespace
}  // namespace sb
