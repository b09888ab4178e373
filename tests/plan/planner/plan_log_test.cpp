// plan.jsonl: what a planner writes, goes on from, replays and refuses.

#include "plan/planner/plan_log.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/stat.h>

#include <fstream>
#include <sstream>
#include <thread>

#include "core/errors.h"
#include "core/files/crc32c.h"
#include "tests/data/temporary_folder.h"
#include "tests/plan/planner/planned_steps.h"

namespace sb::test {
namespace {

std::string checksum_of(const std::string& text) {
  return fmt::format("{:08x}", crc32c(0, text.data(), text.size()));
}

TEST(BalancedPlanner, ReplaysTheLogOfAKilledProcess) {
  TemporaryFolder folder;
  BalancedPlannerOptions chosen = options();
  chosen.log = std::filesystem::path(folder.path("plan.jsonl"));
  const auto slow = [](int64_t step) { return 1.0 + 0.3 * static_cast<double>(step % 2); };
  const auto whole = run(*planner(chosen), chosen, 1, 9, slow);
  // A second process starts after step 4 on a machine that has become slower: up to step 9 the plans are the old ones.
  ::testing::internal::CaptureStderr();
  const auto again = run(*planner(chosen), chosen, 5, 11, [](int64_t) { return 3.0; });
  EXPECT_NE(::testing::internal::GetCapturedStderr().find("steps 5 to 9 run as"), std::string::npos);
  EXPECT_EQ(std::vector(whole.begin() + 4, whole.end()), std::vector(again.begin(), again.begin() + 5));
  const PlanRecord record = read_plan_log(chosen.log);
  EXPECT_EQ(record.damage, "");
  ASSERT_EQ(record.steps.size(), 11u);
  EXPECT_EQ(write_plan(record.steps.at(11).plan), again.back());
  ASSERT_TRUE(record.steps.at(7).measured);
  EXPECT_EQ(record.steps.at(7).measured->ranks.size(), 2u);
  EXPECT_FALSE(record.steps.at(7).in_order.ranks.empty());

  // And the whole of it in another run.
  BalancedPlannerOptions replay = options();
  replay.replay = chosen.log;
  replay.log = std::filesystem::path(folder.path("other.jsonl"));
  std::vector<std::string> expected(whole.begin(), whole.begin() + 8);
  EXPECT_EQ(run(*planner(replay), replay, 1, 8, steady), expected);
  EXPECT_EQ(read_plan_log(replay.log).steps.size(), 8u);
  const auto past_the_end = [&] { run(*planner(replay), replay, 9, 12, steady); };
  EXPECT_NE(error_of(past_the_end).find("no plan for step 12; it has steps 1 to 11"), std::string::npos);
}

TEST(BalancedPlanner, ReplaysPlansThatCutSequences) {
  TemporaryFolder folder;
  BalancedPlannerOptions chosen = options(2, 2);
  chosen.plan.chunk.tokens = 4096;
  chosen.log = std::filesystem::path(folder.path("plan.jsonl"));
  const auto plans = run(*planner(chosen), chosen, 1, 6, steady);
  EXPECT_NE(plans[0].find("\"piece\":[0,"), std::string::npos);
  BalancedPlannerOptions replay = options(2, 2);
  replay.plan.chunk.tokens = 4096;
  replay.replay = chosen.log;
  EXPECT_EQ(run(*planner(replay), replay, 1, 4, steady), std::vector(plans.begin(), plans.begin() + 4));
  // What memory is not planned for is refused.
  replay.plan.chunk.tokens = 0;
  const auto again = [&] { run(*planner(replay), replay, 1, 4, steady); };
  EXPECT_NE(error_of(again).find("memory is planned for whole ones; set balance.chunk"), std::string::npos);
  replay.plan.chunk.tokens = 2048;
  EXPECT_NE(error_of(again).find("more than the balance.chunk 2048"), std::string::npos);
  replay.plan.chunk.tokens = 4096;
  replay.spec.block = 1 << 14;
  replay.spec.budget = 1 << 20;
  EXPECT_NE(error_of(again).find("blocks end at multiples of 16384"), std::string::npos);
}

TEST(BalancedPlanner, PlansOfAnOlderReleaseAreRefusedAndKept) {
  TemporaryFolder folder;
  BalancedPlannerOptions chosen = options();
  chosen.log = std::filesystem::path(folder.path("plan.jsonl"));
  run(*planner(chosen), chosen, 1, 3, steady);
  // As a version 1 had them: with their own checksum.
  const PlanRecord record = read_plan_log(chosen.log);
  std::string old = write_plan(record.steps.at(1).plan);
  old.replace(old.find("\"version\":2"), 11, "\"version\":1");
  const std::string line = fmt::format("{{\"step\":1,\"crc32c\":\"{}\",\"plan\":{}}}\n", checksum_of(old), old);
  std::ofstream(chosen.log) << line;
  EXPECT_NE(error_of([&] {
              planner(chosen);
            }).find("has plan version 1, but this program reads 2; continue with the release"),
            std::string::npos);
  EXPECT_EQ(read_bytes(chosen.log), line);
  // A report only says so.
  EXPECT_NE(read_plan_log(chosen.log).damage.find("plan version 1"), std::string::npos);
}

// From a pipe, which cannot be read twice.
TEST(BalancedPlanner, ChecksAReplayAsItIsRead) {
  TemporaryFolder folder;
  BalancedPlannerOptions chosen = options(), replay = options();
  chosen.log = std::filesystem::path(folder.path("plan.jsonl"));
  run(*planner(chosen), chosen, 1, 6, steady);
  const std::string text = read_bytes(chosen.log);
  replay.replay = std::filesystem::path(folder.path("pipe"));
  ASSERT_EQ(::mkfifo(replay.replay.c_str(), 0600), 0);
  const auto refused = [&](const ReplayedSteps& steps) {
    std::thread writer([&] { std::ofstream(replay.replay) << text; });
    const std::string error = error_of([&] { planner(replay, steps); });
    writer.join();
    return error;
  };
  std::vector<int64_t> asked;
  const auto batch = [&](int64_t step) {
    asked.push_back(step);
    return batch_of(step);
  };
  EXPECT_EQ(refused({5, batch}), "");
  EXPECT_EQ(asked, (std::vector<int64_t>{1, 2, 3, 4, 5}));
  EXPECT_NE(refused({5, [](int64_t step) { return batch_of(step == 4 ? 3 : step); }})
                .find("line 7: the plan of step 4 has sequence"),
            std::string::npos);
}

// A global batch that is no multiple of dp under a tight cap: pipelines with different numbers of micro-batches.
TEST(BalancedPlanner, ReplaysPipelinesOfDifferentLengths) {
  TemporaryFolder folder;
  BalancedPlannerOptions chosen = options(2, 2);
  chosen.plan.batching.micro_batch_tokens = 10000;
  chosen.log = std::filesystem::path(folder.path("plan.jsonl"));
  const std::vector<Sequence> three = {{0, 9000}, {1, 8000}, {2, 7000}};
  ::testing::internal::CaptureStderr();
  const auto first = planner(chosen);
  first->announce(1, three);
  const Plan plan = first->next();
  EXPECT_NE(plan.ranks[0].micro_batches.size(), plan.ranks[1].micro_batches.size());
  first->announce(2, three);
  first->next();
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("step 1: batching sab found no arrangement"), std::string::npos) << log;
  EXPECT_EQ(log.find("step 2"), std::string::npos) << log;  // said once

  BalancedPlannerOptions replay = options(2, 2);
  replay.replay = chosen.log;
  replay.plan.batching.micro_batch_tokens = 10000;
  const auto again = planner(replay);
  again->announce(1, three);
  EXPECT_EQ(write_plan(again->next()), write_plan(plan));
}

TEST(BalancedPlanner, WhatReplayedStepsTookStaysInALogThatIsWrittenAnew) {
  TemporaryFolder folder;
  BalancedPlannerOptions chosen = options();
  chosen.log = std::filesystem::path(folder.path("plan.jsonl"));
  run(*planner(chosen), chosen, 1, 9, steady);
  // Resumed after step 2; from step 8 on the data are others, which is seen when step 5 is done.
  const auto batch = [](int64_t step) {
    std::vector<Sequence> sequences = batch_of(step);
    if (step >= 8) sequences[0].tokens += 1;
    return sequences;
  };
  const auto resumed = planner(chosen);
  for (int64_t step = 3; step <= 3 + resumed->ahead(); ++step) resumed->announce(step, batch(step));
  std::map<int64_t, int64_t> took;
  ::testing::internal::CaptureStderr();
  for (int64_t step = 3; step <= 7; ++step) {
    const StepMeasurement measured = measure(resumed->next(), chosen, 2.0 + static_cast<double>(step));
    took[step] = measured.step_ns;
    resumed->learn(measured);
    resumed->announce(step + 1 + resumed->ahead(), batch(step + 1 + resumed->ahead()));
  }
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("steps are planned again from here on"), std::string::npos) << log;
  const PlanRecord record = read_plan_log(chosen.log);
  EXPECT_EQ(record.damage, "");
  for (const auto& [step, step_ns] : took) {
    ASSERT_TRUE(record.steps.contains(step)) << step;
    ASSERT_TRUE(record.steps.at(step).measured) << step;
    EXPECT_EQ(record.steps.at(step).measured->step_ns, step_ns) << step;
  }
}

TEST(BalancedPlanner, RefusesPlansOfOtherRanksOrData) {
  TemporaryFolder folder;
  BalancedPlannerOptions chosen = options();
  chosen.log = std::filesystem::path(folder.path("plan.jsonl"));
  run(*planner(chosen), chosen, 1, 6, steady);

  BalancedPlannerOptions replay = options(4);
  replay.replay = chosen.log;
  EXPECT_NE(error_of([&] { planner(replay)->announce(1, batch_of(1)); }).find("2 data-parallel ranks, not 4"),
            std::string::npos);
  replay.layout.dp = 2;
  std::vector<Sequence> other = batch_of(1);
  other[3].tokens += 1;
  EXPECT_NE(error_of([&] { planner(replay)->announce(1, other); }).find("other data"), std::string::npos);

  // The own log of a run that goes on with more ranks: planned anew from there, and the log says so from there on.
  BalancedPlannerOptions wider = options(4);
  wider.log = chosen.log;
  ::testing::internal::CaptureStderr();
  const auto plans = run(*planner(wider), wider, 4, 6, steady);
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("is for 2 data-parallel ranks, not 4; steps are planned again from here on"), std::string::npos)
      << log;
  EXPECT_EQ(log.find("run as"), std::string::npos) << log;
  EXPECT_EQ(parse_plan(plans[0], "plan").ranks.size(), 4u);
  const PlanRecord record = read_plan_log(chosen.log);
  EXPECT_EQ(record.steps.at(3).plan.ranks.size(), 2u);
  EXPECT_EQ(record.steps.at(4).plan.ranks.size(), 4u);
}

TEST(PlanLog, DamagedAndUnfinishedLines) {
  TemporaryFolder folder;
  BalancedPlannerOptions chosen = options();
  chosen.log = std::filesystem::path(folder.path("plan.jsonl"));
  const auto whole = run(*planner(chosen), chosen, 1, 6, steady);
  std::ifstream in(chosen.log);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  ASSERT_EQ(lines.size(), 12u);  // a plan and a measurement a step
  const auto write = [&](const std::string& text) { std::ofstream(chosen.log, std::ios::binary) << text; };
  const auto joined = [&](size_t count) {
    std::string text;
    for (size_t i = 0; i < count; ++i) text += lines[i] + "\n";
    return text;
  };

  write(joined(8) + lines[8].substr(0, lines[8].size() / 2));
  PlanRecord record = read_plan_log(chosen.log);
  EXPECT_EQ(record.steps.size(), 4u);
  EXPECT_NE(record.damage.find("line 9: the line is not finished"), std::string::npos);

  // A digit of a budget: still JSON, and caught by the checksum.
  std::string damaged = lines[2];
  const size_t digit = damaged.find("\"budgets\":[[") + 12;
  damaged[digit] = damaged[digit] == '1' ? '2' : '1';
  write(lines[0] + "\n" + lines[1] + "\n" + damaged + "\n" + lines[3] + "\n");
  record = read_plan_log(chosen.log);
  EXPECT_EQ(record.steps.size(), 1u);
  EXPECT_NE(record.damage.find("line 3"), std::string::npos);
  EXPECT_NE(record.damage.find("checksum"), std::string::npos);

  // The run goes on from what is left, and its log is whole again.
  const auto rest = run(*planner(chosen), chosen, 1, 6, steady);
  EXPECT_EQ(rest, whole);
  record = read_plan_log(chosen.log);
  EXPECT_EQ(record.damage, "");
  EXPECT_EQ(record.steps.size(), 6u);
  EXPECT_THROW(read_plan_log(folder.path("none.jsonl")), UserError);
}

std::string text_of(const std::filesystem::path& file) {
  std::ostringstream text;
  text << std::ifstream(file, std::ios::binary).rdbuf();
  return text.str();
}

size_t times_in(const std::string& text, const std::string& what) {
  size_t count = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++count;
  return count;
}

TEST(RecordedPlans, AreReadOneAtATime) {
  TemporaryFolder folder;
  BalancedPlannerOptions chosen = options();
  chosen.log = std::filesystem::path(folder.path("plan.jsonl"));
  const auto whole = run(*planner(chosen), chosen, 1, 6, steady);
  RecordedPlans plans(chosen.log);
  EXPECT_EQ(plans.damage(), "");
  EXPECT_EQ(plans.first(), 1);
  EXPECT_EQ(plans.last(), 6);
  const PlanRecord record = read_plan_log(chosen.log);
  // What replaces the file does not matter to who has it open.
  std::filesystem::rename(chosen.log, folder.path("moved.jsonl"));
  std::ofstream(chosen.log) << "something else";
  for (const int64_t step : {6, 1, 4, 4}) {
    const LoggedStep read = plans.read(step);
    EXPECT_EQ(write_plan(read.plan), whole[static_cast<size_t>(step - 1)]) << step;
    EXPECT_EQ(write_plan(read.in_order), write_plan(record.steps.at(step).in_order)) << step;
    EXPECT_EQ(read.predicted_step_us, record.steps.at(step).predicted_step_us) << step;
  }
  plans.forget_before(3);
  plans.forget_from(6);
  EXPECT_EQ(plans.first(), 3);
  EXPECT_EQ(plans.last(), 5);
  EXPECT_FALSE(plans.contains(6));
  // A file that is cut off, or written over, under who reads it.
  std::filesystem::resize_file(folder.path("moved.jsonl"), 100);
  EXPECT_NE(error_of([&] { plans.read(4); }).find("line 7: the plan of step 4 has disappeared from the file"),
            std::string::npos);
  std::ofstream(folder.path("moved.jsonl")) << std::string(100'000, '\n');
  EXPECT_NE(error_of([&] { plans.read(4); }).find("line 7"), std::string::npos);
}

TEST(RecordedPlans, SayHowFarTheyAreWhenItTakesLong) {
  TemporaryFolder folder;
  BalancedPlannerOptions chosen = options();
  chosen.log = std::filesystem::path(folder.path("plan.jsonl"));
  run(*planner(chosen), chosen, 1, 2, steady);
  const auto said = [&](std::chrono::milliseconds every) {
    ::testing::internal::CaptureStderr();
    const RecordedPlans plans(chosen.log, {}, every);
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(said(std::chrono::hours(1)), "");
  const std::string each = said(std::chrono::milliseconds(0));
  EXPECT_NE(each.find("plan.jsonl: 1 plans read, 0%"), std::string::npos) << each;
  EXPECT_NE(each.find("plan.jsonl: 2 plans read, "), std::string::npos) << each;
}

// As the overview of a report reads what it has let go.
TEST(PlanOverview, SaysWhenALineIsNotThereAnyMore) {
  TemporaryFolder folder;
  BalancedPlannerOptions chosen = options();
  chosen.log = std::filesystem::path(folder.path("plan.jsonl"));
  run(*planner(chosen), chosen, 1, 6, steady);
  const std::string text = text_of(chosen.log);
  // Chooses step 2, whose lines are the third and the fourth, when the file has become another.
  const auto overview = [&](const std::string& now) {
    std::ofstream(chosen.log) << text;
    return read_plan_overview(chosen.log, 1, [&](const PlanRecord&) {
      std::ofstream(chosen.log) << now;
      return std::vector<int64_t>{2};
    });
  };
  const auto line = [&](int number) {
    size_t begin = 0;
    for (; number > 1; --number) begin = text.find('\n', begin) + 1;
    return begin;
  };
  const PlanRecord whole = read_plan_log(chosen.log), read = overview(text);
  EXPECT_EQ(write_plan(read.steps.at(2).plan), write_plan(whole.steps.at(2).plan));
  ASSERT_TRUE(read.steps.at(2).measured);
  EXPECT_EQ(read.steps.at(2).measured->step_ns, whole.steps.at(2).measured->step_ns);
  EXPECT_TRUE(read.steps.at(1).plan.ranks.empty());

  const auto expect_gone = [&](const std::string& now, const std::string& what) {
    const std::string error = error_of([&] { overview(now); });
    EXPECT_NE(error.find(what + " of step 2 has disappeared from the file"), std::string::npos) << error;
  };
  expect_gone(text.substr(0, line(3)), "line 3: the plan");
  expect_gone(text.substr(0, line(4) - 1), "line 3: the plan");  // whole, but not finished
  expect_gone(text.substr(0, line(5) - 1), "line 4: the measurement");
  std::string other = text;
  other.replace(other.find("\"step\":2", line(4)), 8, "\"step\":1");
  expect_gone(other, "line 4: the measurement");
}

// In a log of many steps. (Sanitizers do not count; the test says nothing there.)
TEST(RecordedPlans, TakeLittleMemory) {
  TemporaryFolder folder;
  BalancedPlannerOptions chosen = options();
  chosen.log = std::filesystem::path(folder.path("plan.jsonl"));
  const auto first = planner(chosen);
  first->announce(1, batch_of(1));
  LoggedStep logged;
  logged.plan = first->next();
  constexpr int64_t kSteps = 2000;
  {
    PlanLog log(chosen.log);
    for (logged.plan.step = 2; logged.plan.step <= kSteps; ++logged.plan.step) log.plan(logged);
  }
  logged.plan.step = kSteps;
  const size_t before = mallinfo2().uordblks;
  const auto resumed = planner(chosen);
  resumed->announce(kSteps, batch_of(1));
  const size_t after = mallinfo2().uordblks;
  EXPECT_EQ(write_plan(resumed->next()), write_plan(logged.plan));
  EXPECT_LT(after, before + std::filesystem::file_size(chosen.log) / 10);
}

TEST(BalancedPlanner, AResumedRunKeepsTheLogAsItIsUpToItsCheckpoint) {
  TemporaryFolder folder;
  BalancedPlannerOptions chosen = options();
  chosen.log = std::filesystem::path(folder.path("plan.jsonl"));
  run(*planner(chosen), chosen, 1, 4, steady);
  const std::string four = text_of(chosen.log);
  run(*planner(chosen), chosen, 5, 7, steady);
  run(*planner(chosen), chosen, 5, 7, steady);
  EXPECT_EQ(text_of(chosen.log).substr(0, four.size()), four);
  for (int64_t step = 1; step <= 7; ++step) {
    EXPECT_EQ(times_in(text_of(chosen.log), fmt::format("{{\"step\":{},\"crc32c\"", step)), 1u) << step;
    EXPECT_EQ(times_in(text_of(chosen.log), fmt::format("{{\"step\":{},\"measured\"", step)), 1u) << step;
  }
  // Nothing to take out: not a byte is written before the first step.
  const auto written = std::filesystem::last_write_time(chosen.log);
  const std::string seven = text_of(chosen.log);
  planner(chosen)->announce(8, batch_of(8));
  EXPECT_EQ(std::filesystem::last_write_time(chosen.log), written);
  EXPECT_EQ(text_of(chosen.log), seven);
}

// A long run's log is not read to go on after its last steps: what stands before is copied as it is.
TEST(BalancedPlanner, AResumedRunReadsTheEndOfItsLogAlone) {
  TemporaryFolder folder;
  BalancedPlannerOptions chosen = options();
  chosen.log = std::filesystem::path(folder.path("plan.jsonl"));
  const auto whole = run(*planner(chosen), chosen, 1, 8, steady);
  std::string text = text_of(chosen.log);
  const size_t third = text.find("{\"step\":3,\"crc32c\"");
  ASSERT_NE(third, std::string::npos);
  text.replace(third, 5, "xxxxx");  // would end the useful part for who reads everything
  for (const bool unfinished : {false, true}) {
    std::ofstream(chosen.log) << text << (unfinished ? "{\"step\":9,\"crc" : "");
    BalancedPlannerOptions resumed = chosen;
    resumed.first_step = 6;
    EXPECT_EQ(run(*planner(resumed), resumed, 6, 7, steady), std::vector(whole.begin() + 5, whole.begin() + 7));
    const std::string after = text_of(chosen.log);
    const size_t sixth = text.find("{\"step\":6,\"crc32c\"");
    EXPECT_EQ(after.substr(0, sixth), text.substr(0, sixth));
    for (int64_t step = 6; step <= 8; ++step) {
      EXPECT_EQ(times_in(after, fmt::format("{{\"step\":{},\"crc32c\"", step)), 1u) << step;
      EXPECT_EQ(times_in(after, fmt::format("{{\"step\":{},\"measured\"", step)), step <= 7 ? 1u : 0u) << step;
    }
    EXPECT_TRUE(after.ends_with("\n"));
  }
}

TEST(RecordedPlans, AreSoughtFromTheEnd) {
  TemporaryFolder folder;
  BalancedPlannerOptions chosen = options();
  chosen.log = std::filesystem::path(folder.path("plan.jsonl"));
  run(*planner(chosen), chosen, 1, 6, steady);
  const std::string text = text_of(chosen.log);
  for (const auto& [step, first] : {std::pair{1, 1}, {2, 1}, {3, 2}, {6, 5}, {7, 6}, {100, 6}}) {
    RecordedPlans plans(chosen.log, step);
    EXPECT_EQ(plans.first(), first) << step;
    EXPECT_EQ(plans.last(), 6) << step;
    EXPECT_EQ(plans.damage(), "") << step;
    EXPECT_EQ(plans.read(6).plan.step, 6);
  }
  EXPECT_NE(RecordedPlans(chosen.log, 5).place(5).find("the line at byte "), std::string::npos);
  // In doubt everything is read: a line that is not sound in what matters, and steps out of order.
  const size_t fifth = text.find("{\"step\":5,\"crc32c\"");
  const std::string damaged = text.substr(0, fifth) + "x" + text.substr(fifth);
  std::ofstream(chosen.log) << damaged;
  EXPECT_EQ(RecordedPlans(chosen.log, 5).last(), 4);
  EXPECT_NE(RecordedPlans(chosen.log, 5).damage().find("line 9"), std::string::npos);
  EXPECT_EQ(RecordedPlans(chosen.log, 7).first(), 6);  // it is not looked at
  const std::string again = text.substr(fifth, text.find('\n', fifth) + 1 - fifth);
  std::ofstream(chosen.log) << text << again;
  EXPECT_EQ(RecordedPlans(chosen.log, 5).first(), 1);
  for (const std::string nothing : {"", "unfinished"}) {
    std::ofstream(chosen.log) << nothing;
    EXPECT_TRUE(RecordedPlans(chosen.log, 5).empty());
  }
}

// It was killed while it wrote a line.
TEST(BalancedPlanner, AResumedReplayHasAWholeLog) {
  TemporaryFolder folder;
  BalancedPlannerOptions chosen = options();
  chosen.log = std::filesystem::path(folder.path("plan.jsonl"));
  const auto whole = run(*planner(chosen), chosen, 1, 8, steady);
  BalancedPlannerOptions replay = options();
  replay.replay = chosen.log;
  replay.log = std::filesystem::path(folder.path("other.jsonl"));
  run(*planner(replay), replay, 1, 5, steady);
  std::filesystem::resize_file(replay.log, std::filesystem::file_size(replay.log) - 10);
  const auto again = run(*planner(replay), replay, 4, 6, steady);
  EXPECT_EQ(again, std::vector(whole.begin() + 3, whole.begin() + 6));
  const PlanRecord record = read_plan_log(replay.log);
  EXPECT_EQ(record.damage, "");
  ASSERT_EQ(record.steps.size(), 6u);
  for (const auto& [step, logged] : record.steps) EXPECT_TRUE(logged.measured) << step;
  EXPECT_EQ(times_in(text_of(replay.log), "{\"step\":5,\"crc32c\""), 1u);
}

// Files that this process has open and that are not there any more.
size_t removed_and_open() {
  size_t count = 0;
  std::error_code gone;  // the listing's own
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    count += std::filesystem::read_symlink(entry.path(), gone).string().ends_with(" (deleted)");
  return count;
}

TEST(BalancedPlanner, ALogThatIsNotNeededAnyMoreTakesNoRoom) {
  TemporaryFolder folder;
  BalancedPlannerOptions chosen = options();
  chosen.log = std::filesystem::path(folder.path("plan.jsonl"));
  run(*planner(chosen), chosen, 1, 6, steady);
  const size_t before = removed_and_open();
  {
    const auto resumed = planner(chosen);  // replaces the log and goes on reading the old one
    resumed->announce(3, batch_of(3));
    EXPECT_EQ(removed_and_open(), before + 1);
    for (int64_t step = 4; step <= 6; ++step) resumed->announce(step, batch_of(step));
    EXPECT_EQ(removed_and_open(), before);
  }
  BalancedPlannerOptions more_ranks = options(4);
  more_ranks.log = chosen.log;
  const auto anew = planner(more_ranks);  // whose plans do not fit
  anew->announce(3, batch_of(3));
  EXPECT_EQ(removed_and_open(), before);
}

TEST(RecordedPlans, SayWhenTheFileCannotBeRead) {
  TemporaryFolder folder;
  std::filesystem::create_directory(folder.path("plan.jsonl"));
  for (const std::string& error : {error_of([&] { RecordedPlans plans(folder.path("plan.jsonl")); }),
                                   error_of([&] { read_plan_log(folder.path("plan.jsonl")); })})
    EXPECT_NE(error.find("plan.jsonl: cannot be read"), std::string::npos) << error;
}

}  // namespace
}  // namespace sb::test
