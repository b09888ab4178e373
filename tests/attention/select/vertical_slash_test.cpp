#include "attention/select/vertical_slash.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace sb {
namespace {

constexpr int kBlock = 64;

// Attention of the `rows` last queries over `tokens` keys with given weight on columns and on token distances; the rest
// uniform.
std::vector<float> make_map(int rows, int64_t tokens, const std::vector<int>& columns, double column_weight,
                            const std::vector<int>& distances, double distance_weight) {
  std::vector<float> map(rows * tokens, 0.0f);
  for (int r = 0; r < rows; ++r) {
    const int64_t query = tokens - rows + r;
    float* row = map.data() + r * tokens;
    const double rest = 1.0 - column_weight - distance_weight;
    for (int64_t m = 0; m <= query; ++m) row[m] = static_cast<float>(rest / static_cast<double>(query + 1));
    for (const int c : columns) row[c] += static_cast<float>(column_weight / static_cast<double>(columns.size()));
    for (const int o : distances) {
      row[query - o] += static_cast<float>(distance_weight / static_cast<double>(distances.size()));
    }
  }
  return map;
}

bool contains(const std::vector<int32_t>& values, int32_t value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

TEST(VerticalSlash, FindsPlantedLines) {
  const int64_t tokens = 4096;
  const std::vector<int> columns = {0, 3, 777, 2000}, distances = {0, 640, 1280};
  const std::vector<float> map = make_map(64, tokens, columns, 0.5, distances, 0.45);
  const VerticalSlash found = find_vertical_slash(map.data(), 64, tokens, kBlock, {0.45, 0.4, 4096, 64});
  EXPECT_EQ(found.verticals, (std::vector<int32_t>{0, 3, 777, 2000}));
  // Queries at the end of the sequence fill whole blocks, so distance 640 lies exactly ten blocks back, 1280 twenty.
  const VerticalSlash more = find_vertical_slash(map.data(), 64, tokens, kBlock, {0.45, 0.6, 4096, 64});
  EXPECT_EQ(more.slashes[0], 0);
  EXPECT_TRUE(contains(more.slashes, 10));
  EXPECT_TRUE(contains(more.slashes, 20));
}

TEST(VerticalSlash, ReachesTheCoverageWithTheFewest) {
  const int64_t tokens = 1000;
  const std::vector<float> map = make_map(64, tokens, {5, 9, 100}, 0.3, {70}, 0.3);
  std::vector<double> columns(tokens, 0.0);
  double total = 0;
  for (int r = 0; r < 64; ++r) {
    for (int64_t m = 0; m < tokens; ++m) {
      columns[m] += map[r * tokens + m];
      total += map[r * tokens + m];
    }
  }
  for (const double p : {0.2, 0.5, 0.9, 0.99}) {
    const VerticalSlash found = find_vertical_slash(map.data(), 64, tokens, kBlock, {p, p, 1 << 20, 1 << 20});
    double held = 0, least = 1e9;
    for (const int32_t c : found.verticals) {
      held += columns[c];
      least = std::min(least, columns[c]);
    }
    EXPECT_GE(held, p * total * (1 - 1e-9));
    EXPECT_LT(held - least, p * total) << "one column fewer would do";
  }
}

TEST(VerticalSlash, RespectsCapsAndForcesTheDiagonal) {
  const std::vector<float> map = make_map(64, 2048, {1000}, 0.0, {1024}, 0.9);
  const VerticalSlash found = find_vertical_slash(map.data(), 64, 2048, kBlock, {0.99, 0.99, 7, 3});
  EXPECT_EQ(found.verticals.size(), 7u);
  EXPECT_EQ(found.slashes.size(), 3u);
  EXPECT_EQ(found.slashes[0], 0);
  EXPECT_TRUE(contains(found.slashes, 16));
  const VerticalSlash none = find_vertical_slash(map.data(), 64, 2048, kBlock, {0.5, 0.5, 0, 0});
  EXPECT_TRUE(none.verticals.empty());
  EXPECT_EQ(none.slashes, std::vector<int32_t>{0});
}

TEST(VerticalSlash, CoverageOneIsEverything) {
  const int64_t tokens = 300;
  const std::vector<float> map = make_map(64, tokens, {2}, 0.999, {}, 0.0);
  const VerticalSlash found = find_vertical_slash(map.data(), 64, tokens, kBlock, {1.0, 1.0, tokens, tokens});
  EXPECT_EQ(static_cast<int64_t>(found.verticals.size()), tokens);
  EXPECT_EQ(found.slashes.size(), 5u);
}

TEST(VerticalSlash, OneToken) {
  const std::vector<float> map = {1.0f};
  const VerticalSlash found = find_vertical_slash(map.data(), 1, 1, kBlock, {0.9, 0.9, 10, 10});
  EXPECT_EQ(found.verticals, std::vector<int32_t>{0});
  EXPECT_EQ(found.slashes, std::vector<int32_t>{0});
}

}  // namespace
}  // namespace sb
