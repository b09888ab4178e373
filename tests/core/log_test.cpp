#include "core/log.h"

#include <gtest/gtest.h>

#include "core/measured_coverage.h"

namespace sb {
namespace {

class LogTest : public testing::Test {
 protected:
  ~LogTest() override {
    log::set_prefix("");
    log::set_level(log::Level::info);
  }
  template <typename Action>
  static std::string written(const Action& action) {
    testing::internal::CaptureStderr();
    action();
    return testing::internal::GetCapturedStderr();
  }
};

TEST_F(LogTest, LevelsLetThroughWhatIsAtLeastAsGrave) {
  using enum log::Level;
  const log::Level levels[] = {debug, info, warning, error, off};
  for (int level = 0; level < 5; ++level) {
    log::set_level(levels[level]);
    const std::string text = written([] {
      log::debug("message {}", 0);
      log::info("message {}", 1);
      log::warning("message {}", 2);
      log::error("message {}", 3);
    });
    for (int message = 0; message < 4; ++message)
      EXPECT_EQ(text.find("message " + std::to_string(message)) != std::string::npos, message >= level)
          << level << ": " << text;
  }
}

TEST_F(LogTest, MessagesAreTextAndComeAfterThePrefix) {
  log::set_level(log::Level::info);
  log::set_prefix("rank 3");
  const std::string text = written([] { log::write(log::Level::info, "50 % of {} %v"); });
  EXPECT_NE(text.find("50 % of {} %v\n"), std::string::npos) << text;
  EXPECT_LT(text.find("[rank 3]"), text.find("50 %")) << text;
  log::set_prefix("");
  EXPECT_EQ(written([] { log::info("alone"); }).find("["), std::string::npos);
}

// Ascending, of whole blocks, neighbours at most half as much again apart once there is a choice, the last everything.
TEST(Coverage, TheGridsOfAllLengths) {
  for (const int block : {1, 16, 64}) {
    for (const int64_t tokens : {1, 63, 64, 65, 255, 256, 257, 1000, 4096, 100'000}) {
      const std::vector<int64_t> grid = coverage_grid(tokens, block);
      ASSERT_FALSE(grid.empty());
      EXPECT_GE(grid.back(), tokens);
      EXPECT_LT(grid.back(), tokens + block);
      for (size_t i = 0; i < grid.size(); ++i) {
        EXPECT_EQ(grid[i] % block, 0) << tokens << " " << block;
        if (i == 0) continue;
        EXPECT_GT(grid[i], grid[i - 1]) << tokens << " " << block;
        EXPECT_LE(2 * grid[i], 3 * grid[i - 1] + 2 * block) << tokens << " " << block;
      }
    }
  }
  EXPECT_EQ(coverage_grid(1024, 64), (std::vector<int64_t>{256, 384, 512, 768, 1024}));
  EXPECT_EQ(coverage_grid(1, 64), std::vector<int64_t>{64});
}

TEST(Coverage, SamplesAddUp) {
  CoverageSample sum;
  sum += {.held = 0.25, .curve = {0.1, 0.5}, .rows = 1};
  sum += {.held = 0.5, .curve = {0.2, 0.25}, .rows = 3};
  EXPECT_EQ(sum.held, 0.75);
  EXPECT_EQ(sum.rows, 4);
  ASSERT_EQ(sum.curve.size(), 2u);
  EXPECT_DOUBLE_EQ(sum.curve[0], 0.3);
  EXPECT_EQ(sum.curve[1], 0.75);
}

}  // namespace
}  // namespace sb
