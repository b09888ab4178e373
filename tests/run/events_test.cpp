// What ranks say of themselves and of each other: events.jsonl, the table at the start, the time-out that follows.
#include <gtest/gtest.h>

#include <fstream>

#include "run/logs/event_log.h"
#include "run/rank_start.h"
#include "run/rank_table.h"
#include "tests/run/scratch_directory.h"

namespace sb {
namespace {

std::string steps(int first, int last, int milliseconds) {
  std::string lines;
  for (int step = first; step <= last; ++step)
    lines += "{\"step\":" + std::to_string(step) + ",\"step_ms\":" + std::to_string(milliseconds) + "}\n";
  return lines;
}

TEST(Events, SayWhatARestartLost) {
  ScratchDirectory scratch;
  append_event(scratch.path(), {.event = "lost", .rank = 3});
  EXPECT_TRUE(read_events(scratch.path()).empty()) << "there is no run yet, and maybe one of somebody else's";

  write_bytes(scratch / "metrics.jsonl", steps(1, 12, 500) + "{\"step\":12,\"validation_loss\":1.0}\n{\"step\":13,");
  append_event(scratch.path(), {.event = "lost", .host = "b", .rank = 3, .reason = "rank 3 on b \"ended\""});
  note_resume(scratch.path(), 10);
  write_bytes(scratch / "metrics.jsonl", steps(1, 20, 500));
  append_event(scratch.path(), {.event = "stopped", .step = 20});
  note_resume(scratch.path(), 20);

  const std::vector<RunEvent> events = read_events(scratch.path());
  ASSERT_EQ(events.size(), 4u);
  EXPECT_EQ(events[0].event, "lost");
  EXPECT_EQ(events[0].host, "b");
  EXPECT_EQ(events[0].rank, 3);
  EXPECT_EQ(events[0].reason, "rank 3 on b \"ended\"");
  EXPECT_EQ(events[0].step, 12) << "the last one done";
  EXPECT_EQ(events[1].event, "resumed");
  EXPECT_EQ(events[1].step, 10);
  EXPECT_EQ(events[1].steps_lost, 2);
  EXPECT_GE(events[1].seconds_lost, 1.0);
  EXPECT_LT(events[1].seconds_lost, 30.0) << "two steps of half a second, and the time of this test";
  EXPECT_EQ(events[3].event, "resumed");
  EXPECT_EQ(events[3].steps_lost, 0);
  EXPECT_EQ(events[3].seconds_lost, 0) << "a stop loses nothing, however long it lasts";
  const RunTimes times = run_times(scratch.path());
  EXPECT_DOUBLE_EQ(times.trained, 10.0);
  EXPECT_DOUBLE_EQ(times.lost, events[1].seconds_lost);
  EXPECT_EQ(times.losses, 1);
}

TEST(Events, WhatManyRanksSeeIsWrittenOnce) {
  ScratchDirectory scratch;
  write_bytes(scratch / "metrics.jsonl", steps(1, 2, 1));
  for (const int rank : {0, 1, 2}) append_event_once(scratch.path(), {.event = "timeout", .rank = rank});
  EXPECT_EQ(read_events(scratch.path()).size(), 1u);
}

TEST(Events, DamagedLinesAreLeftOut) {
  ScratchDirectory scratch;
  write_bytes(scratch / "events.jsonl", "[]\n{\"event\": 7}\n{\"event\":\"lost\",\"rank\":\"x\",\"step\":1e99}\n{\"ev");
  const std::vector<RunEvent> events = read_events(scratch.path());
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].rank, -1);
  EXPECT_EQ(events[0].step, 0);
}

TEST(RankTable, RanksOfOneKindShareALineAndOthersAreWarnedOf) {
  const RankMachine one{"a", "EPYC", "SkylakeX", 4}, other{"b", "EPYC", "Haswell", 4};
  EXPECT_EQ(rank_table({one, one, other}),
            "  rank  host  device  kernels   threads\n"
            "  0-1   a     EPYC    SkylakeX  4\n"
            "  2     b     EPYC    Haswell   4\n");
  EXPECT_EQ(rank_differences({one, one}), "");
  EXPECT_EQ(rank_differences({one, one, other}),
            "rank 2 on b has another set of kernels (Haswell) than rank 0 on a (SkylakeX)");
}

TEST(Timeout, FollowsFromThePredictedStep) {
  RunConfig config;
  config.parallel.dp = 4;
  config.batch.global_batch_size = 8;
  config.train.validation_sequences = 40;
  // 120 s, 20 steps, 5 batches of validation, a quarter of 8 GB at 50 MB/s.
  EXPECT_EQ(timeout_seconds(config, 3.0, 8'000'000'000), 120 + 60 + 15 + 40);
  config.train.validation_sequences = 0;
  EXPECT_EQ(timeout_seconds(config, 3.0, 8'000'000'000), 600) << "all of the validation data, however many";
}

}  // namespace
}  // namespace sb
