#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <thread>

#include "core/errors.h"
#include "core/files/durable_file.h"
#include "model/flops.h"
#include "run/host_memory.h"
#include "run/logs/console.h"
#include "run/logs/metrics_log.h"
#include "run/logs/run_log.h"
#include "run/logs/step_ticker.h"
#include "run/logs/trace.h"
#include "run/time_left.h"
#include "tests/run/scratch_directory.h"

namespace sb {
namespace {

std::vector<nlohmann::json> lines(const std::filesystem::path& file) {
  std::istringstream in(read_bytes(file));
  std::vector<nlohmann::json> result;
  std::string line;
  while (std::getline(in, line)) result.push_back(nlohmann::json::parse(line));
  return result;
}

TEST(MetricsLog, OneObjectALineIntegersAsIntegersNanAsNull) {
  ScratchDirectory scratch;
  MetricsLog log(scratch / "metrics.jsonl", 0);
  log.write({{"step", 1, true}, {"loss", 0.1}, {"grad_norm", NAN}, {"weird \"name\"\n", INFINITY}});
  const auto all = lines(scratch / "metrics.jsonl");  // readable while the log is open
  ASSERT_EQ(all.size(), 1u);
  EXPECT_TRUE(all[0]["step"].is_number_integer());
  EXPECT_EQ(all[0]["loss"].get<double>(), 0.1);  // the double comes back to the last bit
  EXPECT_TRUE(all[0]["grad_norm"].is_null());
  EXPECT_TRUE(all[0]["weird \"name\"\n"].is_null());
}

TEST(MetricsLog, ResumingTakesOutLaterStepsAndTheUnfinishedLine) {
  ScratchDirectory scratch;
  const auto file = scratch / "metrics.jsonl";
  write_bytes(file,
              "{\"step\":0,\"validation_loss\":3}\n{\"step\":1,\"loss\":2}\n{\"step\":2,\"loss\":1}\n"
              "{\"step\":3,\"loss\":1}\n{\"step\":4,\"lo");
  {
    MetricsLog log(file, 2);
    log.write({{"step", 3, true}, {"loss", 0.5}});
  }
  const auto all = lines(file);
  ASSERT_EQ(all.size(), 4u);
  EXPECT_EQ(all[0]["validation_loss"], 3);
  EXPECT_EQ(all[2]["step"], 2);
  EXPECT_EQ(all[3]["step"], 3);
  EXPECT_EQ(all[3]["loss"], 0.5);
}

TEST(MetricsLog, ResumingLeavesDamagedLinesOut) {
  ScratchDirectory scratch;
  const auto file = scratch / "metrics.jsonl";
  write_bytes(file,
              "{\"step\":1,\"loss\":2}\n{\"step\":\"x\"}\n{\"step\":null}\n{\"step\":1.5}\n{\"loss\":2}\n[1]\n\n7\n"
              "{\"step\":\n{\"step\":2,\"loss\":1}\n");
  testing::internal::CaptureStderr();
  { const MetricsLog log(file, 2); }
  const std::string said = testing::internal::GetCapturedStderr();
  const auto all = lines(file);
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0]["step"], 1);
  EXPECT_EQ(all[1]["step"], 2);
  EXPECT_NE(said.find("skipped 8 damaged lines, the first of which is line 2"), std::string::npos) << said;
}

TEST(MetricsLog, ErrorsNameTheFile) {
  ScratchDirectory scratch;
  EXPECT_THROW(MetricsLog(scratch / "missing" / "metrics.jsonl", 0), UserError);
}

TEST(DurableFile, ReplacesAtOnceAndReportsFailures) {
  ScratchDirectory scratch;
  replace_file(scratch / "a", "one");
  replace_file(scratch / "a", "two");
  EXPECT_EQ(read_bytes(scratch / "a"), "two");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(scratch.path()), {}), 1);
  EXPECT_THROW(replace_file(scratch / "none" / "a", "x"), UserError);
  EXPECT_THROW(sync_directory(scratch / "none"), UserError);
  DurableFile full("/dev/full");
  try {
    full.write("x", 1);
    FAIL();
  } catch (const UserError& error) {
    EXPECT_STREQ(error.what(), "/dev/full: cannot write: No space left on device");
  }
}

TEST(Trace, IsAChromeTraceOfNestedSpans) {
  ScratchDirectory scratch;
  {
    TraceWriter trace(true, scratch / "trace.json", 0, "training loop");
    const auto outer = trace.span("step", 7);
    const auto inner = trace.span("forward", 0);
  }
  const auto events = nlohmann::json::parse(read_bytes(scratch / "trace.json"));
  std::vector<nlohmann::json> complete;
  for (const auto& event : events)
    if (event["ph"] == "X") complete.push_back(event);
  ASSERT_EQ(complete.size(), 2u);
  EXPECT_EQ(complete[0]["name"], "forward");
  EXPECT_EQ(complete[1]["name"], "step");
  EXPECT_EQ(complete[1]["args"]["n"], 7);
  EXPECT_LE(complete[1]["ts"].get<double>(), complete[0]["ts"].get<double>());
  EXPECT_GE(complete[1]["ts"].get<double>() + complete[1]["dur"].get<double>(),
            complete[0]["ts"].get<double>() + complete[0]["dur"].get<double>());
}

TEST(Trace, HoldsTheEventsOfAllRanks) {
  ScratchDirectory scratch;
  {
    TraceWriter first(true, scratch / "trace.json", 0, "stage 0"), second(true, {}, 1, "stage 1");
    for (int step = 0; step < 2; ++step) {
      { const auto span = first.span("step", step); }
      { const auto span = second.span("step", step); }
      const std::vector<std::string> events = {first.take(), second.take()};
      first.write(events);
    }
  }
  std::map<std::pair<int, std::string>, int> count;
  for (const auto& event : nlohmann::json::parse(read_bytes(scratch / "trace.json")))
    ++count[{event["pid"].get<int>(), event["name"].get<std::string>()}];
  for (const int rank : {0, 1}) {
    EXPECT_EQ((count[{rank, "step"}]), 2);
    EXPECT_EQ((count[{rank, "process_name"}]), 1);
  }
}

// The next attempt at a run that failed early takes the same name.
TEST(Trace, LeavesNoFileWithoutEvents) {
  ScratchDirectory scratch;
  { const TraceWriter trace(true, scratch / "trace.json", 0, "training loop"); }
  EXPECT_FALSE(std::filesystem::exists(scratch / "trace.json"));
  {
    TraceWriter trace(true, scratch / "trace.json", 0, "training loop");
    EXPECT_EQ(trace.written(), "");
    { const auto span = trace.span("step", 1); }
    const std::vector<std::string> events = {trace.take()};
    trace.write(events);
    EXPECT_EQ(trace.written(), scratch / "trace.json");
  }
  EXPECT_EQ(nlohmann::json::parse(read_bytes(scratch / "trace.json")).back()["name"], "step");
  {
    TraceWriter nowhere(true, scratch / "none" / "trace.json", 0, "training loop");
    { const auto span = nowhere.span("step", 1); }
    const std::vector<std::string> events = {nowhere.take()};
    EXPECT_THROW(nowhere.write(events), UserError);
    testing::internal::CaptureStderr();
  }
  EXPECT_NE(testing::internal::GetCapturedStderr().find("trace.json: cannot be created"), std::string::npos);
}

TEST(Trace, SwitchedOffItDoesNothing) {
  TraceWriter trace(false, {}, 0, "");
  { const auto span = trace.span("step", 1); }
  EXPECT_EQ(trace.take(), "");
}

StepReport report(int64_t step) {
  StepReport r;
  r.step = step;
  r.max_steps = 100;
  r.loss = 2.34567;
  r.grad_norm = 1.5;
  r.learning_rate = 1e-3;
  r.tokens = 30000;
  r.seconds = 2.0;
  r.seconds_left = 2.0 * static_cast<double>(100 - step);
  r.flops = 5e10;
  return r;
}

TEST(Console, StepLineSaysWhatIsKnownAndNothingElse) {
  StepReport r = report(7);
  EXPECT_EQ(format_step(r), "step 7/100  loss 2.3457  grad norm 1.500  lr 1.00e-03  15.0k tok/s  25.0 GFLOP/s");
  r.peak_flops = 1e11;
  r.coverage = 0.9;
  r.density = 0.125;
  r.skipped = true;
  r.skipped_total = 3;
  EXPECT_EQ(format_step(r),
            "step 7/100  SKIPPED: gradient not finite (3 so far)  loss 2.3457  grad norm 1.500  lr 1.00e-03  15.0k "
            "tok/s  MFU 25.0%  coverage 0.900  density 0.125");
}

TEST(Console, StepLineShowsWhatBalancingGains) {
  StepReport r = report(7);
  r.rank_imbalance = 1.041;
  r.bubble_percent = 3.2;
  r.gain = 1.256;
  EXPECT_TRUE(format_step(r).ends_with("  imbalance 1.04  bubbles 3%  gain 1.26x")) << format_step(r);
  r.in_order_seconds = 3.0;
  r.balanced_seconds = 2.0;
  EXPECT_TRUE(format_step(r).ends_with("  gain 1.50x measured")) << format_step(r);
}

TEST(Console, ANarrowLineKeepsWhatMattersMost) {
  StepReport r = report(99999);
  r.max_steps = 100000;
  r.peak_flops = 1e11;
  r.coverage = 0.9;
  r.density = 0.125;
  r.rank_imbalance = 1.04;
  r.bubble_percent = 3.2;
  r.gain = 1.25;
  EXPECT_GT(format_step(r).size(), 120u);
  const std::string line = format_step(r, 104);
  EXPECT_LE(line.size(), 104u);
  EXPECT_EQ(line, "step 99999/100000  loss 2.3457  15.0k tok/s  MFU 25.0%  imbalance 1.04  bubbles 3%  gain 1.25x");
  EXPECT_EQ(format_step(r, 1), "step 99999/100000  loss 2.3457") << "never less than this";
}

// What a log shows, with the time left.
TEST(Console, LinesFitIntoOneHundredAndTwentyColumns) {
  ScratchDirectory scratch;
  std::FILE* out = std::fopen((scratch / "out").c_str(), "w");
  Console console(out, false, 1);
  StepReport r = report(99999);
  r.max_steps = 100000;
  r.seconds_left = 1e7;
  r.peak_flops = 1e11;
  r.coverage = 0.9;
  r.density = 0.125;
  r.rank_imbalance = 1.04;
  r.bubble_percent = 3.2;
  r.gain = 1.25;
  console.step(r);
  std::fclose(out);
  const std::string line = read_bytes(scratch / "out");
  EXPECT_LE(line.size(), 121u) << line;
  EXPECT_NE(line.find("  ETA 2777h46m\n"), std::string::npos) << line;
}

TEST(StepTicker, ALongStepSaysHowFarItIs) {
  ScratchDirectory scratch;
  std::FILE* out = std::fopen((scratch / "out").c_str(), "w");
  Console console(out, false, 1);
  {
    StepTicker ticker(console, std::chrono::milliseconds(20));
    ticker.begin(7, 3);
    ticker.micro_batch();
    ticker.micro_batch();
    for (int i = 0; i < 500 && read_bytes(scratch / "out").empty(); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    ticker.end();
    ticker.begin(8, 1);  // and a short one says nothing
    ticker.end();
  }
  std::fclose(out);
  const std::string text = read_bytes(scratch / "out");
  EXPECT_EQ(text.find("step 7: 0s so far, micro-batch 2 of 3\n"), 0u) << text;
  EXPECT_EQ(text.find("step 8"), std::string::npos) << text;
}

TEST(RunLog, UtilisationIsWrittenWhereThePeakIsKnown) {
  ScratchDirectory scratch;
  std::FILE* out = std::fopen((scratch / "out").c_str(), "w");
  Console console(out, false, 1);
  {
    RunLog log(console, scratch.path(), 0, false);
    StepReport dense = report(1), sparse = report(2);
    sparse.peak_flops = 1e11;
    sparse.executed_flops = 3e10;
    log.step(dense, {});
    log.step(sparse, {});
  }
  std::fclose(out);
  const std::vector<nlohmann::json> written = lines(scratch / "metrics.jsonl");
  ASSERT_EQ(written.size(), 2u);
  const nlohmann::json &unknown = written[0], &known = written[1];
  for (const char* key : {"mfu", "executed_utilization", "executed_gflops_per_second"})
    EXPECT_FALSE(unknown.contains(key)) << key;
  EXPECT_NEAR(known.at("mfu"), 0.25, 1e-12);
  EXPECT_NEAR(known.at("executed_utilization"), 0.15, 1e-12);
  EXPECT_NEAR(known.at("executed_gflops_per_second"), 15, 1e-9);
}

TEST(Console, Durations) {
  EXPECT_EQ(format_duration(0.4), "0s");
  EXPECT_EQ(format_duration(59.4), "59s");
  EXPECT_EQ(format_duration(60), "1m00s");
  EXPECT_EQ(format_duration(3599), "59m59s");
  EXPECT_EQ(format_duration(3725), "1h02m");
  EXPECT_EQ(format_duration(NAN), "n/a");
}

std::string console_output(bool terminal, int64_t log_steps, const std::function<void(Console&)>& use) {
  ScratchDirectory scratch;
  std::FILE* out = std::fopen((scratch / "out").c_str(), "w");
  Console console(out, terminal, log_steps);
  use(console);
  std::fclose(out);
  return read_bytes(scratch / "out");
}

TEST(Console, PlainLinesEverySoManyStepsAndTheLast) {
  const std::string out = console_output(false, 10, [](Console& console) {
    for (int64_t step = 1; step <= 100; ++step)
      if (step <= 20 || step > 95) console.step(report(step));
  });
  EXPECT_EQ(std::count(out.begin(), out.end(), '\n'), 3);  // 10, 20, 100
  EXPECT_EQ(out.find('\r'), std::string::npos);
  EXPECT_EQ(out.find('\033'), std::string::npos);
  EXPECT_NE(out.find("step 10/100"), std::string::npos);
  EXPECT_NE(out.find("ETA 3m00s"), std::string::npos);  // 90 steps of 2 s
  EXPECT_NE(out.find("step 100/100"), std::string::npos);
}

TEST(Console, NoRoomForItsLinesDoesNotEndTheRun) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full";
  std::FILE* full = std::fopen("/dev/full", "w");
  Console console(full, false, 1);
  EXPECT_NO_THROW(console.text(std::string(1 << 20, '#')));
  for (int64_t step = 1; step <= 1000; ++step) EXPECT_NO_THROW(console.step(report(step)));
  EXPECT_NE(std::ferror(full), 0);  // what the program looks at in the end
  std::fclose(full);
}

TEST(Console, TerminalRedrawsOneLineAndKeepsTextApart) {
  const std::string out = console_output(true, 1, [](Console& console) {
    console.step(report(1));
    console.text("a note");
    console.step(report(2));
    console.finish();
    console.finish();
  });
  EXPECT_EQ(std::count(out.begin(), out.end(), '\n'), 2);
  EXPECT_NE(out.find("\033[Ka note\n\r[            ] step 2/100"), std::string::npos) << out;
  EXPECT_TRUE(out.ends_with("\n"));
}

// A file has no width: 80 columns are taken.
TEST(Console, ANarrowTerminalStillShowsTheTimeLeft) {
  StepReport r = report(1);
  r.coverage = 0.9;
  const std::string out = console_output(true, 1, [&](Console& console) { console.step(r); });
  const std::string line = out.substr(1, out.find('\033') - 1);
  EXPECT_LE(line.size(), 79u) << line;
  EXPECT_TRUE(line.starts_with("[            ] step 1/100  loss 2.3457")) << line;
  EXPECT_TRUE(line.ends_with("  ETA 3m18s")) << line;  // 99 steps of 2 s
}

TEST(Console, ABarShowsTheShareOfTheSteps) {
  const auto drawn = [](int64_t step) {
    const std::string out = console_output(true, 1, [&](Console& console) { console.step(report(step)); });
    return out.substr(1, out.find(']'));
  };
  EXPECT_EQ(drawn(8), "[            ]");  // of 100: not yet a twelfth
  EXPECT_EQ(drawn(9), "[#           ]");
  EXPECT_EQ(drawn(50), "[######      ]");
  EXPECT_EQ(drawn(99), "[########### ]");
  EXPECT_EQ(drawn(100), "[############]");
}

TEST(TimeLeft, CountsStepsValidationsAndCheckpointsToCome) {
  using Seconds = TimeLeft::Seconds;
  TimeLeft left(/*max_steps=*/10, /*validation_steps=*/4, /*save_steps=*/5);
  left.step(Seconds(2));
  EXPECT_DOUBLE_EQ(left.after(1).count(), 18) << "nothing else has happened yet";
  left.validation(Seconds(10));
  left.validation(Seconds(30));
  EXPECT_DOUBLE_EQ(left.after(1).count(), 9 * 2 + 3 * 20) << "after steps 4, 8 and 10";
  EXPECT_DOUBLE_EQ(left.after(4).count(), 6 * 2 + 3 * 20) << "that of step 4 is still to come";
  EXPECT_DOUBLE_EQ(left.after(5).count(), 5 * 2 + 2 * 20);
  left.save(Seconds(100));
  EXPECT_DOUBLE_EQ(left.after(5).count(), 5 * 2 + 2 * 20 + 2 * 100) << "after steps 5 and 10";
  EXPECT_DOUBLE_EQ(left.after(6).count(), 4 * 2 + 2 * 20 + 100);
  EXPECT_DOUBLE_EQ(left.after(10).count(), 20 + 100);
  left.step(Seconds(4));
  EXPECT_DOUBLE_EQ(left.after(9).count(), (0.9 * 2 + 0.1 * 4) + 20 + 100);
  TimeLeft at_the_end(10, 0, 0);
  at_the_end.validation(Seconds(3));
  at_the_end.save(Seconds(5));
  EXPECT_DOUBLE_EQ(at_the_end.after(1).count(), 8);
}

TEST(TimeLeft, WhatIsDueIsCounted) {
  for (int64_t last = 1; last <= 12; ++last)
    for (int64_t every = 0; every <= 13; ++every)
      for (int64_t step = 1; step <= last + 1; ++step) {
        int64_t counted = 0;
        for (int64_t later = step; later <= last; ++later) counted += due_after(later, every, last);
        EXPECT_EQ(times_due(step, every, last), counted) << step << ", every " << every << " of " << last;
      }
}

TEST(Console, ValidationLine) {
  ValidationReport r;
  r.step = 5;
  r.loss = std::log(2.0);
  r.accuracy = 0.25;
  r.sequences = 8;
  EXPECT_EQ(format_validation(r),
            "validation at step 5: loss 0.6931, perplexity 2.00, accuracy 25.0% over 8 sequences");
  r.recall = 0.915;
  EXPECT_NE(format_validation(r).find("recall 91.5% (from the 3rd token of a chunk on)"), std::string::npos);
}

TEST(Flops, CountsProductsOfASmallModelByHand) {
  ModelConfig config;
  config.vocab_size = 10;
  config.hidden_size = 8;
  config.intermediate_size = 12;
  config.layers = 2;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_dim = 2;
  // Per token and layer: qkv 8×16, output 8×8, gate, up and down 8×12 each; then the vocabulary 8×10.
  const double per_token = 2.0 * (2 * (8 * 16 + 8 * 8 + 3 * 8 * 12) + 8 * 10);
  // Pairs of lengths 3 and 1: 6 + 1; 4 heads of 2 channels, scores and values, 2 flops each, 2 layers.
  const double attention = 7.0 * 4 * 2 * 2 * 2 * 2;
  const std::vector<int64_t> lengths = {3, 1};
  EXPECT_DOUBLE_EQ(training_flops(config, lengths), 3 * (4 * per_token + attention));
  EXPECT_DOUBLE_EQ(training_flops(config, lengths, 0.25), 3 * (4 * per_token + attention / 4)) << "of sparse attention";
  // No gradients of frozen weights; of rank 2 on q and down, inputs plus outputs three times.
  LoraConfig lora;
  lora.rank = 2;
  lora.targets = {true, false, false, false, false, false, true};
  const double adapters =
      2.0 * 2 *
      static_cast<double>(config.layers * (config.hidden_size + int64_t{config.heads} * config.head_dim +
                                           config.intermediate_size + config.hidden_size));
  EXPECT_DOUBLE_EQ(training_flops(config, lengths, 1.0, lora), 2 * 4 * per_token + 3 * 4 * adapters + 3 * attention);
}

TEST(Flops, PeaksAreTheDenseOnesOfKnownGpusOnly) {
  const std::pair<const char*, double> expected[] = {
      {"NVIDIA H200", 989e12},           {"NVIDIA H100 80GB HBM3", 989e12},
      {"NVIDIA A100-SXM4-80GB", 312e12}, {"NVIDIA H20", 148e12},
      {"NVIDIA H20-3e", 148e12},         {"NVIDIA H200 NVL", 0},
      {"NVIDIA H100 PCIe", 0},           {"NVIDIA H800", 0},
      {"NVIDIA GeForce RTX 4090", 0},    {"", 0},
  };
  for (const auto& [name, peak] : expected) EXPECT_EQ(peak_bf16_flops(name), peak) << name;
}

TEST(HostMemory, TheTightestOfAllControlGroupsCounts) {
  ScratchDirectory scratch;
  const auto group = [&](const std::string& place, const std::string& limit, const std::string& used,
                         const std::string& statistics, bool version_2) {
    const std::filesystem::path folder = scratch.path() / place;
    std::filesystem::create_directories(folder);
    write_bytes(folder / (version_2 ? "memory.max" : "memory.limit_in_bytes"), limit + "\n");
    write_bytes(folder / (version_2 ? "memory.current" : "memory.usage_in_bytes"), used + "\n");
    write_bytes(folder / "memory.stat", statistics);
  };
  const auto left = [&](const std::string& own) { return group_memory_left(own, scratch.path()); };
  EXPECT_EQ(left("0::/\n"), kNoMemoryLimit);
  // Version 2: the own group has no limit, the one around it has; files that are cached give way.
  group("job", "1000", "700", "anon 500\nactive_file 100\ninactive_file 50\n", true);
  group("job/step", "max", "600", "", true);
  EXPECT_EQ(left("0::/job/step\n"), 1000 - 700 + 150);
  group("job/step", "620", "600", "", true);
  EXPECT_EQ(left("0::/job/step\n"), 20);
  EXPECT_EQ(left("0::/elsewhere\n"), kNoMemoryLimit);
  // A group that is over its limit leaves next to nothing, not a negative number.
  group("job/step", "500", "600", "", true);
  EXPECT_EQ(left("0::/job/step\n"), 1);
  // Version 1, beside others and by its own files.
  group("memory/batch/42", "2000", "500", "active_file 1\ntotal_active_file 30\ntotal_inactive_file 20\n", false);
  EXPECT_EQ(left("9:cpu,cpuacct:/batch\n4:hugetlb,memory:/batch/42\n0::/\n"), 2000 - 500 + 50);
  group("memory/batch", "1600", "600", "", false);
  EXPECT_EQ(left("4:memory:/batch/42\n"), 1000);
}

}  // namespace
}  // namespace sb
