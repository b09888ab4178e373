// What a report says in words: the headline, the table of numbers, what was left out.

#include <gtest/gtest.h>

#include "core/errors.h"
#include "report/report.h"
#include "report/report_headline.h"
#include "report/report_schedule.h"
#include "tests/data/temporary_folder.h"
#include "tests/report/picture_parts.h"
#include "tests/report/report_fixture.h"

namespace sb {
namespace {

// The value of one row of either table; empty: there is none.
std::string row(const std::string& page, const std::string& name) {
  for (const char* cell : {"td", "th"}) {
    const auto found = parts_of(page, "<tr><" + std::string(cell) + ">" + name + "</" + cell + "><td>", "</td>");
    if (!found.empty()) return found[0];
  }
  return "";
}

TEST(ReportMetrics, LinesOfEveryKind) {
  struct Line {
    const char* text;
    bool taken;
    size_t series;
  };
  const Line lines[] = {{"{\"step\":0,\"a\":1}", true, 1},
                        {"{\"step\":1}", true, 0},
                        {"{\"step\":1,\"a\":1}\r", true, 1},
                        {"  {\"step\":1,\"a\":-0.0}  ", true, 1},
                        {"{\"step\":1,\"a\":true,\"b\":false,\"c\":\"1\",\"d\":{},\"e\":{\"f\":1}}", true, 0},
                        {"{\"a\":{\"step\":1}}", false, 0},
                        {"{\"step\":1.0,\"a\":1}", false, 0},
                        {"{\"step\":null,\"a\":1}", false, 0},
                        {"{\"step\":18446744073709551615,\"a\":1}", false, 0},
                        {"{\"step\":1,\"a\":NaN}", false, 0},
                        {"{\"step\":1,\"a\":-Infinity}", false, 0},
                        {"{\"step\":1,\"a\":1}{\"step\":2}", false, 0},
                        {"{\"step\":1,\"a\":1,}", false, 0},
                        {"null", false, 0},
                        {" ", false, 0}};
  for (const Line& line : lines) {
    const RunMetrics metrics = parsed_metrics(std::string(line.text) + "\n");
    EXPECT_EQ(metrics.lines, 1) << line.text;
    EXPECT_EQ(metrics.skipped, line.taken ? 0 : 1) << line.text;
    EXPECT_EQ(metrics.series.size(), line.series) << line.text;
  }
  EXPECT_EQ(parsed_metrics("").lines, 0);
  EXPECT_EQ(parsed_metrics("\n\n\n").lines, 0);
}

TEST(ReportMetrics, ALaterLineOfAStepWinsValueByValue) {
  const RunMetrics metrics =
      parsed_metrics("{\"step\":5,\"a\":1,\"b\":2}\n{\"step\":4,\"a\":7}\n{\"step\":5,\"a\":3,\"b\":null}\n");
  EXPECT_EQ(metrics.series.at("a"), (std::map<int64_t, double>{{4, 7.0}, {5, 3.0}}));
  EXPECT_EQ(metrics.series.at("b"), (std::map<int64_t, double>{{5, 2.0}}));
}

TEST(ReportMetrics, HugeLinesAndTooManyNamesAreLeftOut) {
  const std::string padding(1 << 20, ' ');
  EXPECT_EQ(parsed_metrics("{\"step\":1," + padding + "\"a\":1}\n{\"step\":2,\"a\":1}\n").skipped, 1);
  std::string many = "{\"step\":1";
  for (int i = 0; i < 5000; ++i) many += ",\"n" + std::to_string(i) + "\":1";
  EXPECT_EQ(parsed_metrics(many + "}\n").series.size(), 4096u);
}

TEST(ReportText, ThePageSaysHowManyLinesWereLeftOut) {
  ReportInput input;
  input.metrics = parsed_metrics("{\"step\":1,\"loss\":2}\nx\n{\"step\":2,\"loss\":1}\n[]\n");
  EXPECT_NE(write_report(input).find("2 of 4 lines of metrics.jsonl could not be read"), std::string::npos);
  input.metrics = parsed_metrics("{\"step\":1,\"loss\":2}\n");
  EXPECT_EQ(write_report(input).find("could not be read"), std::string::npos);
}

TEST(ReportText, TheTableOfNumbers) {
  ReportInput input;
  auto& series = input.metrics.series;
  series["loss"] = {{10, 4.5}, {20, 3.25}};
  series["validation_loss"] = {{10, 5.0}, {20, 3.5}};
  series["tokens_per_second"] = {{10, 1000}, {20, 3000}};
  series["coverage"] = {{10, 0.5}, {20, 1.0}};
  series["budget"] = {{10, 512}, {20, 1024}};
  series["planning_percent"] = {{10, 1}, {20, 2}};
  series["predicted_step_ms"] = {{10, 110}, {20, 80}, {30, 7}};
  series["step_ms"] = {{10, 100}, {20, 100}, {40, 1}};
  const std::string page = write_report(input);
  EXPECT_EQ(row(page, "steps"), "20");
  EXPECT_EQ(row(page, "loss, first and last"), "4.5000 → 3.2500");
  EXPECT_EQ(row(page, "validation loss, last"), "3.5000");
  EXPECT_EQ(row(page, "tokens/s, mean"), "2000");
  EXPECT_EQ(row(page, "coverage, mean"), "0.7500");
  EXPECT_EQ(row(page, "budget, mean"), "768 keys");
  EXPECT_EQ(row(page, "planning and tuning, share of the step"), "1.50%");
  // Of 10 % and 20 %, the upper; steps without the one or the other do not count.
  EXPECT_EQ(row(page, "prediction error of the step time, median"), "20.0%");
}

// Without a step that was both predicted and measured there is no error to speak of, and certainly none of 0 %.
TEST(ReportText, NoErrorOfWhatWasNotCompared) {
  ReportInput input;
  for (const std::map<int64_t, double>& measured : {std::map<int64_t, double>{{2, 100}}, {{1, 0}}, {}}) {
    input.metrics.series["predicted_step_ms"] = {{1, 110}};
    input.metrics.series["step_ms"] = measured;
    EXPECT_EQ(row(write_report(input), "prediction error of the step time, median"), "");
  }
}

TEST(ReportText, WhereTheTimeWent) {
  ReportInput input;
  auto& series = input.metrics.series;
  EXPECT_EQ(row(report_headline(input), "time"), "");
  series["step_ms"] = {{1, 1000}, {2, 3000}};
  EXPECT_EQ(row(report_headline(input), "time"), "4.0 s in 2 steps.");
  series["bubble_percent"] = {{1, 20}, {2, 40}};
  EXPECT_EQ(row(report_headline(input), "time"), "4.0 s in 2 steps: ranks computed 70% of the time and were idle 30%.");
  series["predicted_bubble_percent"] = {{1, 10}, {2, 10}};
  series["planning_wait_ms"] = {{1, 40}, {2, 60}};
  EXPECT_EQ(row(report_headline(input), "time"),
            "4.0 s in 2 steps: ranks computed 70% of the time and were idle 30% (10% in the predicted schedule alone); "
            "waiting for plans took 2.5%.");
  series["step_ms"] = {{1, 0}};
  EXPECT_EQ(report_headline(input).find("waiting for plans"), std::string::npos)
      << "no share of a clock that stood still";
}

TEST(ReportText, WhatBalancingGained) {
  ReportInput input = example_run(2, 1);
  // 61 and 62 ms in order, 51 ms balanced.
  EXPECT_NE(report_headline(input).find("schedules of the steps <b>1.21× as fast</b>"), std::string::npos);
  auto& series = input.metrics.series;
  series["compared_in_order_ms"] = {{1, 300}};
  EXPECT_EQ(report_headline(input).find("measured by"), std::string::npos) << "half of a comparison";
  series["compared_balanced_ms"] = {{1, 0}};
  EXPECT_EQ(report_headline(input).find("measured by"), std::string::npos) << "no division by nothing";
  series["compared_balanced_ms"] = {{1, 200}};
  EXPECT_NE(report_headline(input).find("<b>1.50× as fast</b>"), std::string::npos);
  EXPECT_NE(report_headline(input).find("predicted for all steps: 1.21×"), std::string::npos);
  for (auto& [number, step] : input.plans.steps) step.plan.baseline_us = 0;
  EXPECT_EQ(report_headline(input).find("predicted for"), std::string::npos);
  series.erase("compared_balanced_ms");
  EXPECT_EQ(report_headline(input).find("as fast"), std::string::npos) << "nothing was balanced";
}

TEST(ReportText, FamiliesDataAndMachines) {
  const std::string data = "data: {synthetic: {vocab_size: 64, length: 128}}\n";
  ReportInput input;
  for (const auto& [type, name] : {std::pair{"qwen2", "Qwen2"}, {"qwen3", "Qwen3"}, {"llama", "Llama"}}) {
    input.run_config = "model: {init: {model_type: " + std::string(type) + ", vocab_size: 64}}\n" + data;
    EXPECT_TRUE(row(report_headline(input), "model").starts_with(std::string(name) + " from scratch: ")) << type;
  }
  EXPECT_EQ(row(report_headline(input), "machine"), "CPU");
  input.machine = "A <b>fast</b> machine";
  EXPECT_EQ(row(report_headline(input), "machine"), "A &lt;b&gt;fast&lt;/b&gt; machine");
  input.run_config =
      "model: {path: '/models/<i>x'}\ndata: {train: ['/data/<u>one', /data/two], max_sequence_length: 4096}\n";
  EXPECT_EQ(row(report_headline(input), "model"), "/models/&lt;i&gt;x");
  EXPECT_EQ(row(report_headline(input), "data"), "/data/&lt;u&gt;one, /data/two, sequences of up to 4096 tokens");
  for (const char* damaged : {"", "model: [", "nonsense: 3", "model: {path: }"}) {
    input.run_config = damaged;
    EXPECT_EQ(report_headline(input).find("<th>model</th>"), std::string::npos) << damaged;
  }
}

TEST(ReportText, ManySourcesWithHostileNames) {
  ReportInput input = example_run(2, 1);
  const std::string attack = "</script><img src=x onerror=alert(1)>";
  for (int i = 0; i < 30; ++i)
    input.metrics.series["loss_source_" + attack + std::to_string(100 + i)] = {{1, 2.0 + i}, {2, 1.0 + i}};
  const std::string page = write_report(input);
  EXPECT_EQ(page.find("<img"), std::string::npos);
  EXPECT_EQ(parts_of(page, "</i>&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;", "<").size(), 16u)
      << "as many as can be told apart";
  EXPECT_EQ(parts_of(page, "<script", ">").size(), parts_of(page, "</script", ">").size());
}

TEST(ReportText, ReadsWhatIsInAFolderAndNoMore) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder.path("a <run>"));
  const std::string run = folder.path("a <run>") + "/";
  EXPECT_NE(user_error([&] { read_run(run); }).find("has no metrics.jsonl"), std::string::npos);
  write_bytes(run + "metrics.jsonl", "");
  ReportInput input = read_run(run);
  EXPECT_EQ(input.name, "a <run>") << "with or without a slash behind it";
  EXPECT_NE(write_report(input).find("<title>a &lt;run&gt; · SparseBalance</title>"), std::string::npos);
  EXPECT_TRUE(input.machine.empty() && input.run_config.empty() && input.plans.steps.empty());
  EXPECT_NE(write_report(input).find("No step of this run has finished yet."), std::string::npos);
  write_bytes(run + "machine.txt", "One GPU\n  rank  host\n  0     a\n");
  write_bytes(run + "events.jsonl", R"({"time":"T1","event":"lost","host":"h<2>","rank":1,"step":29,"reason":"it ended"}
{"time":"T2","event":"resumed","host":"h1","step":20,"steps_lost":9,"seconds_lost":61.0}
)");
  write_bytes(run + "run.yaml", "a: <b>\n");
  input = read_run(folder.path("a <run>/."), 3);
  EXPECT_EQ(input.name, "a <run>");
  EXPECT_EQ(input.machine, "One GPU");
  EXPECT_EQ(input.step, 3);
  EXPECT_NE(write_report(input).find("<pre>a: &lt;b&gt;\n</pre>"), std::string::npos);
  EXPECT_NE(write_report(input).find("<td>29</td><td>h&lt;2&gt;</td><td>1</td><td>it ended</td>"), std::string::npos);
  EXPECT_NE(write_report(input).find("<td>9 steps and 1m01s lost</td>"), std::string::npos);
  std::filesystem::create_directory(run + "plan.jsonl");
  EXPECT_NE(user_error([&] { read_run(run); }).find("it is a directory"), std::string::npos);
}

}  // namespace
}  // namespace sb
