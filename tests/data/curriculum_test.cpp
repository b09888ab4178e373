#include "data/synthetic/curriculum.h"

#include <gtest/gtest.h>

#include "core/errors.h"

namespace sb {
namespace {

CurriculumOptions quick() {
  CurriculumOptions options;
  options.start = 64;
  options.end = 200;
  options.threshold = 0.8;
  options.smoothing = 0.5;
  options.min_observations = 2;
  return options;
}

TEST(LengthCurriculum, DoublesWhenTheRunningAccuracyPassesAndStopsAtTheEnd) {
  LengthCurriculum curriculum(quick());
  EXPECT_FALSE(curriculum.observe(10, 10, 16));  // one observation is not enough
  EXPECT_TRUE(curriculum.observe(9, 10, 32));
  EXPECT_EQ(curriculum.length_at(31), 64);
  EXPECT_EQ(curriculum.length_at(32), 128);
  EXPECT_FALSE(curriculum.observe(1, 10, 48));
  EXPECT_FALSE(curriculum.observe(5, 10, 64));
  // Weights 0.125, 0.25, 0.5 over 0.1, 0.5, 1.0, of 0.875 in all.
  EXPECT_FALSE(curriculum.observe(10, 10, 80));
  EXPECT_NEAR(curriculum.running_accuracy(), (0.125 * 0.1 + 0.25 * 0.5 + 0.5) / 0.875, 1e-12);
  EXPECT_TRUE(curriculum.observe(10, 10, 96));
  EXPECT_EQ(curriculum.length_at(96), 200);  // not 256
  EXPECT_EQ(curriculum.length_at(UINT64_MAX), 200);
  EXPECT_EQ(curriculum.length_at(0), 64);
  for (uint64_t p = 100; p < 110; ++p) EXPECT_FALSE(curriculum.observe(10, 10, p));
}

TEST(LengthCurriculum, AStepWithoutTargetsTellsNothing) {
  LengthCurriculum curriculum(quick());
  curriculum.observe(10, 10, 1);
  const std::string before = curriculum.state();
  EXPECT_FALSE(curriculum.observe(0, 0, 2));
  EXPECT_EQ(curriculum.state(), before);
}

TEST(LengthCurriculum, ResumesExactly) {
  LengthCurriculum straight(quick()), first(quick());
  const int correct[] = {3, 9, 9, 10, 7, 10, 10, 10, 10};
  for (int i = 0; i < 5; ++i) {
    straight.observe(correct[i], 11, static_cast<uint64_t>(8 * i));
    first.observe(correct[i], 11, static_cast<uint64_t>(8 * i));
  }
  LengthCurriculum resumed(quick());
  resumed.restore(first.state());
  for (int i = 5; i < 9; ++i)
    EXPECT_EQ(straight.observe(correct[i], 11, static_cast<uint64_t>(8 * i)),
              resumed.observe(correct[i], 11, static_cast<uint64_t>(8 * i)));
  EXPECT_EQ(straight.state(), resumed.state());
  EXPECT_GT(straight.current_length(), 64);
}

// How far ahead batches are planned may change on resume, so that the last switch lies in the resumed run's future.
TEST(LengthCurriculum, MayBeResumedByARunThatLooksLessFarAhead) {
  LengthCurriculum first(quick());
  first.observe(10, 10, 36);
  ASSERT_TRUE(first.observe(10, 10, 48));
  LengthCurriculum resumed(quick());
  resumed.restore(first.state());
  EXPECT_FALSE(resumed.observe(1, 10, 32));
  EXPECT_EQ(resumed.length_at(47), 64);
  EXPECT_EQ(resumed.length_at(48), 128);
  // Good enough before the switch is reached: that one doubles once more, and nothing before it changes.
  EXPECT_FALSE(resumed.observe(10, 10, 36));
  EXPECT_TRUE(resumed.observe(10, 10, 40));
  EXPECT_EQ(resumed.length_at(47), 64);
  EXPECT_EQ(resumed.length_at(48), 200);
  LengthCurriculum again(quick());
  again.restore(resumed.state());
  EXPECT_EQ(again.state(), resumed.state());
}

TEST(LengthCurriculum, RefusesDamagedStates) {
  LengthCurriculum curriculum(quick());
  for (const char* bad :
       {"", "curriculum", "curriculum 2 0 0x0p+0 0:64", "curriculum 1 0 0x0p+0", "curriculum 1 0 0x0p+0 5:64",
        "curriculum 1 0 0x0p+0 0:64 0:128", "curriculum 1 0 0x0p+0 0:4096", "curriculum 1 0 7 0:64",
        "curriculum 1 0 0x0p+0 0:64 x", "curriculum 1 -1 0x0p+0 0:64"})
    EXPECT_THROW(curriculum.restore(bad), UserError) << bad;
  CurriculumOptions wrong = quick();
  wrong.start = 400;
  EXPECT_THROW(LengthCurriculum{wrong}, UserError);
}

}  // namespace
}  // namespace sb
