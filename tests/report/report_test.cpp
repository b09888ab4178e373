#include "report/report.h"

#include <gtest/gtest.h>

#include "core/errors.h"
#include "core/markup.h"
#include "report/report_chart.h"
#include "report/report_schedule.h"
#include "tests/data/temporary_folder.h"
#include "tests/report/report_fixture.h"

namespace sb {
namespace {

size_t count(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; ++at) ++found;
  return found;
}

TEST(Report, ReadsMetricsWhateverTheyHold) {
  const RunMetrics metrics = parsed_metrics(
      "{\"step\":1,\"loss\":2.5,\"word\":\"x\",\"list\":[1,2],\"nothing\":null}\n"
      "{\"step\":2,\"loss\":1e999}\n"
      "{\"step\":2,\"loss\":2.25,\"validation_loss\":3}\n"
      "\n"
      "not json\n"
      "[1,2,3]\n"
      "{\"loss\":1}\n"
      "{\"step\":-4,\"loss\":1}\n"
      "{\"step\":\"3\",\"loss\":1}\n"
      "{\"step\":9223372036854775807,\"loss\":4}\n"
      "{\"step\":3,\"loss\":2.0");
  EXPECT_EQ(metrics.series.at("loss"), (std::map<int64_t, double>{{1, 2.5}, {2, 2.25}, {INT64_MAX, 4.0}}));
  EXPECT_EQ(metrics.series.at("validation_loss").at(2), 3.0);
  EXPECT_FALSE(metrics.series.contains("word"));
  EXPECT_FALSE(metrics.series.contains("nothing"));
  EXPECT_EQ(metrics.lines, 10);
  EXPECT_EQ(metrics.skipped, 7);  // 1e999 is no JSON number that a double holds
  // Nesting costs no stack, whichever bracket it is made of.
  EXPECT_EQ(parsed_metrics(std::string(3'000'000, '[') + "\n").skipped, 1);
  std::string deep = "{\"step\":1,\"loss\":";
  for (int i = 0; i < 100'000; ++i) deep += "{\"a\":";
  EXPECT_EQ(parsed_metrics(deep + "\n").skipped, 1);
  EXPECT_EQ(parsed_metrics(std::string("\0\xff\xfe{", 4)).skipped, 1);
  EXPECT_THROW(read_metrics("no/such/file"), UserError);
}

TEST(Report, EscapesWhatItShows) {
  EXPECT_EQ(markup_text("<a href=\"x\">'&\x01"), "&lt;a href=&quot;x&quot;&gt;&#39;&amp; ");
  ReportInput input = example_run(3, 1);
  const std::string attack = "</title></script><script>alert(1)</script>\"'><img src=x onerror=alert(1)>";
  input.name = input.run_config = input.plans.damage = attack;
  const std::string page = write_report(input);
  EXPECT_EQ(page.find("<script>alert"), std::string::npos);
  EXPECT_EQ(page.find("<img"), std::string::npos);
  EXPECT_EQ(count(page, "&lt;img src=x"), 4u);  // title, heading, note, configuration
}

TEST(Report, NamesOfLinesCannotEndTheScript) {
  const std::string figure = chart_figure({"t", "u", "x", {{"</script><b>\xff", {{1, 2}, {2, 3}}, true}}});
  EXPECT_EQ(count(figure, "</script>"), 1u);
  EXPECT_EQ(figure.find("<b>"), std::string::npos);
}

TEST(Report, NeedsNothingFromOutside) {
  const std::string page = write_report(example_run(5, 2));
  for (const char* outside : {"http://", "https://", "<link", "src=\"", "@import", "url("})
    EXPECT_EQ(count(page, outside), std::string(outside) == "http://" ? count(page, "http://www.w3.org/2000/svg") : 0u)
        << outside;
  EXPECT_NE(page.find("default-src 'none'"), std::string::npos);
  EXPECT_NE(page.find("in order, predicted"), std::string::npos);
  EXPECT_NE(page.find("balanced, measured"), std::string::npos);
}

TEST(Report, ShowsTheLossOfEverySource) {
  ReportInput input = example_run(5, 2);
  EXPECT_EQ(write_report(input).find("Loss by source"), std::string::npos);
  input.metrics.series["loss_source_data/code"] = {{1, 2.5}, {4, 2.0}};
  input.metrics.series["loss_source_data/books"] = {{2, 3.5}, {3, 3.0}};
  const std::string page = write_report(input);
  for (const char* shown : {"Loss by source", "data/code", "data/books"})
    EXPECT_NE(page.find(shown), std::string::npos) << shown;
  EXPECT_EQ(page.find("loss_source_"), std::string::npos);
}

TEST(Report, PagesOfEmptyAndOddRuns) {
  EXPECT_NE(write_report({}).find("No step of this run has finished yet"), std::string::npos);
  ReportInput one = example_run(1, 1);
  EXPECT_GT(count(write_report(one), "<figure class=\"chart\">"), 5u);
  // Extremes and constants must not give coordinates that are no numbers.
  ReportInput odd = example_run(2, 1);
  odd.metrics.series["loss"] = {{0, 1e308}, {1, -1e308}, {INT64_MAX, 0.0}};
  odd.metrics.series["tokens_per_second"] = {{1, 0.0}, {2, 0.0}};
  odd.metrics.series["coverage"] = {{5, 1e-300}};
  const std::string page = write_report(odd);
  for (const char* bad : {"nan", "inf\"", "inf ", "-inf"}) EXPECT_EQ(count(page, bad), 0u) << bad;
}

TEST(Report, TheHeadlineSaysWhatBalancingGained) {
  ReportInput input = example_run(4, 1);
  EXPECT_NE(write_report(input).find(" as fast</b> as the same batches in order (predicted"), std::string::npos);
  input.metrics.series["compared_in_order_ms"] = {{1, 130}, {3, 120}};
  input.metrics.series["compared_balanced_ms"] = {{1, 100}, {3, 100}};
  input.run_config =
      "model: {init: {vocab_size: 64}}\ndata: {synthetic: {vocab_size: 64, length: 128}}\nparallel: {dp: 2}\n";
  input.machine = "Some CPU, 2 cores";
  const std::string page = write_report(input);
  EXPECT_NE(page.find("<b>1.25× as fast</b> as the same batches in order: measured by running both on 2 steps"),
            std::string::npos);
  EXPECT_NE(page.find("Qwen2 from scratch: 2 layers, hidden size 128, 4 heads, vocabulary of 64"), std::string::npos);
  EXPECT_NE(page.find("the task chunk_recall, sequences of up to 128 tokens"), std::string::npos);
  EXPECT_NE(page.find("2 ranks (data 2 × pipeline 1 × context 1 × tensor 1) on Some CPU, 2 cores"), std::string::npos);
  EXPECT_LT(page.find("as fast</b>"), page.find("<figure")) << "before everything else";
  input.run_config = "model: [";
  EXPECT_EQ(write_report(input).find("<th>model</th>"), std::string::npos) << "a damaged file is no reason to fail";
}

// The slower of two replicas decides the step; the other one's longest chain delays nothing.
TEST(Report, OnlyTheSlowestReplicaHasACriticalPath) {
  LoggedStep step = example_run(1, 1).plans.steps.at(1);
  step.measured.reset();
  step.in_order = {};
  ASSERT_GE(step.plan.ranks.size(), 2u);
  const size_t alike = count(schedule_figure(step), "stroke=\"#d00000\"");
  for (PlannedMicroBatch& micro_batch : step.plan.ranks[1].micro_batches) micro_batch.forward_us[0] *= 2;
  EXPECT_EQ(count(schedule_figure(step), "stroke=\"#d00000\""), alike / step.plan.ranks.size());
}

// Two micro-batches of a plan as the pieces of one sequence: drawn as such, on the page and in the log it is made from.
TEST(Report, PiecesOfASequenceAreDrawn) {
  ReportInput input = example_run(2, 1);
  LoggedStep& step = input.plans.steps.at(2);
  PlannedRank& rank = step.plan.ranks[0];
  ASSERT_GE(rank.micro_batches.size(), 2u);
  int64_t begin = 0;
  for (PlannedMicroBatch& micro_batch : rank.micro_batches) {
    micro_batch.sequences = {7};
    if (!micro_batch.budgets.empty()) micro_batch.budgets.resize(static_cast<size_t>(step.plan.layers));
    micro_batch.begin = begin;
    micro_batch.end = begin += 4096;
  }
  const std::string figure = schedule_figure(step);
  EXPECT_NE(figure.find("sequence 7, tokens 0 to 4096"), std::string::npos);
  EXPECT_NE(figure.find("sequence 7, tokens 4096 to 8192"), std::string::npos);
  const std::string page = write_report(input);
  EXPECT_NE(page.find("tokens 4096 to 8192"), std::string::npos);
  EXPECT_NE(page.find("pieces of a"), std::string::npos);
}

TEST(Report, LongRunsStaySmall) {
  ReportInput input = example_run(4, 1);
  for (int64_t step = 1; step <= 200'000; ++step) input.metrics.series["loss"][step] = 1.0 / static_cast<double>(step);
  EXPECT_LT(write_report(input).size(), 400'000u);
}

TEST(Report, PlansThatDoNotFitAreNotDrawn) {
  const LoggedStep good = example_run(1, 2).plans.steps.at(1);
  EXPECT_NE(schedule_figure(good), "");
  LoggedStep bad = good;
  bad.plan.ranks[1].micro_batches[2].forward_us.pop_back();
  EXPECT_EQ(schedule_figure(bad), "");
  bad = good;
  bad.plan.ranks[0].micro_batches[0].backward_us[1] = -1;
  EXPECT_EQ(schedule_figure(bad), "");
  bad = good;
  bad.plan.ranks[0].micro_batches.clear();
  EXPECT_EQ(schedule_figure(bad), "");
  bad = good;
  bad.plan.layers = 1;  // fewer than stages
  EXPECT_EQ(schedule_figure(bad), "");
  bad = good;
  bad.plan.makespan_us = 0;
  EXPECT_EQ(schedule_figure(bad), "");
  EXPECT_EQ(schedule_figure({}), "");
  // A measurement of another shape is left out, the plan is still drawn.
  bad = good;
  bad.measured->ranks[0].pop_back();
  EXPECT_EQ(schedule_figure(bad).find("measured"), std::string::npos);
  EXPECT_NE(schedule_figure(bad), "");
}

// Of a long run's plans most are not kept: the page is the same.
TEST(Report, OfALongRunNeedsAFewPlansAtATime) {
  TemporaryFolder folder;
  const ReportInput whole = example_run(900, 2);
  std::string metrics;
  for (int64_t step = 1; step <= 900; ++step) {
    metrics += fmt::format("{{\"step\":{}", step);
    for (const auto& [name, series] : whole.metrics.series) metrics += fmt::format(",\"{}\":{}", name, series.at(step));
    metrics += "}\n";
  }
  write_bytes(folder.path("metrics.jsonl"), metrics);
  write_bytes(folder.path("run.yaml"), whole.run_config);
  {
    PlanLog log(folder.path("plan.jsonl"));
    for (const auto& [number, step] : whole.plans.steps) {
      if (number > 2) log.measured(*whole.plans.steps.at(number - 2).measured);  // two are planned ahead
      log.plan(step);
    }
  }
  for (const int64_t step : {0, 7}) {
    ReportInput input = read_run(folder.path(""), step);
    EXPECT_EQ(input.plans.steps.size(), 900u);
    int64_t kept = 0;
    for (const auto& [number, logged] : input.plans.steps) kept += !logged.plan.ranks.empty();
    EXPECT_LE(kept, 4000 / 6 + 1 + 2 + 4);  // the last 4,000 micro-batches, two to come, those that are drawn
    const std::string page = write_report(input);
    EXPECT_EQ(page.find("step 7,") != std::string::npos, step == 7);
    input.plans = read_plan_log(folder.path("plan.jsonl"));
    EXPECT_FALSE(input.plans.steps.at(2).plan.ranks.empty());
    EXPECT_TRUE(page == write_report(input));
  }
}

TEST(Report, ShowsTheTimesOfARehearsedCluster) {
  ReportInput input = example_run(4, 2);
  EXPECT_EQ(write_report(input).find("rehearsed cluster"), std::string::npos);
  auto& series = input.metrics.series;
  series["cluster_step_ms"] = {{1, 500}, {2, 250}, {3, 250}, {4, 1000}};
  series.erase("predicted_step_ms");
  const std::string page = write_report(input);
  EXPECT_NE(page.find("On the rehearsed cluster, balancing makes"), std::string::npos);
  EXPECT_NE(page.find("<td>500.0 ms</td>"), std::string::npos);
  // Losses 5, 3.5, 3 and 2.75, over the seconds since the beginning.
  for (const char* point : {",0.5,5.0]", ",0.75,3.5]", ",1.0,3.0]", ",2.0,2.75]"})
    EXPECT_NE(page.find(point), std::string::npos) << point;
  EXPECT_EQ(page.find("prediction error of the step time"), std::string::npos);
}

TEST(Report, ReadsARunsDirectory) {
  TemporaryFolder folder;
  EXPECT_THROW(read_run(folder.path("")), UserError);
  write_bytes(folder.path("metrics.jsonl"), "{\"step\":1,\"loss\":2.5}\n");
  write_bytes(folder.path("plan.jsonl"), "half a li");
  const ReportInput input = read_run(folder.path(""));
  EXPECT_EQ(input.metrics.series.at("loss").size(), 1u);
  EXPECT_NE(input.plans.damage.find("not finished"), std::string::npos);
  EXPECT_NE(write_report(input).find("nothing after it is shown"), std::string::npos);
}

}  // namespace
}  // namespace sb
