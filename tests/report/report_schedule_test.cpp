#include "report/report_schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "core/errors.h"
#include "report/schedule_picture.h"
#include "tests/report/picture_parts.h"
#include "tests/report/report_fixture.h"

namespace sb {
namespace {

// Ranks of micro-batches whose forward takes so many milliseconds on every stage, and backward twice as many.
Plan plan_of(const std::vector<std::vector<double>>& ranks, int stages = 1) {
  Plan plan;
  plan.step = 1;
  plan.layers = 4;
  for (const std::vector<double>& times : ranks) {
    PlannedRank& rank = plan.ranks.emplace_back();
    for (const double ms : times) {
      PlannedMicroBatch& micro_batch = rank.micro_batches.emplace_back();
      micro_batch.sequences = {std::ssize(rank.micro_batches)};
      micro_batch.tokens = 100;
      micro_batch.forward_us.assign(static_cast<size_t>(stages), 1000 * ms);
      micro_batch.backward_us.assign(static_cast<size_t>(stages), 2000 * ms);
    }
    rank.makespan_us = 3000 * std::accumulate(times.begin(), times.end(), 0.0);
    plan.makespan_us = std::max(plan.makespan_us, rank.makespan_us);
  }
  return plan;
}

std::string figure_of(const Plan& plan) {
  LoggedStep step;
  step.plan = plan;
  return schedule_figure(step);
}

LoggedStep step_with(double before, double after) {
  LoggedStep step;
  step.plan.baseline_us = before;
  step.plan.makespan_us = after;
  return step;
}

TEST(ReportSchedule, SpeedUpsThatAreKnown) {
  EXPECT_EQ(planned_speedup(step_with(300, 200)), 1.5);
  EXPECT_EQ(planned_speedup(step_with(100, 200)), 0.5);
  EXPECT_EQ(planned_speedup(step_with(1e13, 1)), 1e13);
  const double bad[] = {0, -1, 1.1e13, std::numeric_limits<double>::quiet_NaN(),
                        std::numeric_limits<double>::infinity()};
  for (const double value : bad) {
    EXPECT_EQ(planned_speedup(step_with(value, 200)), std::nullopt) << value;
    EXPECT_EQ(planned_speedup(step_with(300, value)), std::nullopt) << value;
  }
}

TEST(ReportSchedule, StepsWorthALook) {
  PlanRecord plans;
  EXPECT_EQ(shown_steps(plans, 0), std::vector<int64_t>());
  plans.steps[7] = step_with(0, 0);
  EXPECT_EQ(shown_steps(plans, 0), std::vector<int64_t>()) << "nothing is known of it";
  EXPECT_EQ(shown_steps(plans, 7), std::vector<int64_t>{7}) << "unless it is asked for";
  plans.steps[1] = step_with(110, 100);
  EXPECT_EQ(shown_steps(plans, 0), std::vector<int64_t>{1}) << "once, though it is typical, best and worst";
  plans.steps[2] = step_with(150, 100);
  plans.steps[3] = step_with(120, 100);
  // Typical, gained most, gained least.
  EXPECT_EQ(shown_steps(plans, 0), (std::vector<int64_t>{3, 2, 1}));
  EXPECT_EQ(shown_steps(plans, 2), (std::vector<int64_t>{2, 3, 1}));
  EXPECT_EQ(shown_steps(plans, 99), (std::vector<int64_t>{3, 2, 1})) << "there is no such step";
}

// Forward and backward of one micro-batch after the other fill 1,000 points from 110 on.
TEST(ReportSchedule, OperationsAreDrawnToScale) {
  const std::string figure = figure_of(plan_of({{1, 3, 6}}));
  EXPECT_NE(figure.find("balanced, predicted: 30.0 ms, bubbles 0%"), std::string::npos) << figure;
  const auto near = [](const std::vector<double>& got, const std::vector<double>& expected) {
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 0.011) << i;
  };
  // F0 B0 F1 B1 F2 B2 of 1, 2, 3, 6, 6 and 12 of 30 ms; the first rectangle is the background.
  near(numbers_of(figure, "<rect x=\"", "\""), {110, 110 + 1000 / 30.0, 210, 310, 510, 710});
  std::vector<double> widths;
  for (const std::string& rectangle : parts_of(figure, "<rect x=", ">"))
    widths.push_back(numbers_of(rectangle, " width=\"", "\"").at(0));
  near(widths, {1000 / 30.0, 2000 / 30.0, 100, 200, 200, 400});
  EXPECT_NE(figure.find("forward of micro-batch 2 (1 sequence, 100 tokens): 6.00 ms, slack 0.00 ms"),
            std::string::npos);
}

TEST(ReportSchedule, WhatIsShortIsStillThere) {
  const std::string figure = figure_of(plan_of({{1000, 1e-6, 0}}));
  for (const std::string& rectangle : parts_of(figure, "<rect x=", ">"))
    EXPECT_GE(numbers_of(rectangle, " width=\"", "\"").at(0), 0.5);
  EXPECT_EQ(parts_of(figure, "<rect x=", ">").size(), 6u);
  // A step of no time at all, as a log may have it.
  Plan nothing = plan_of({{0, 0}});
  nothing.makespan_us = 1;
  for (const char* bad : {"nan", "inf"}) EXPECT_EQ(figure_of(nothing).find(bad), std::string::npos);
}

// With two stages the last one waits for the first: 1F1B of two micro-batches of 1 ms and 2 ms backward.
TEST(ReportSchedule, BubblesOfAPipeline) {
  const std::string figure = figure_of(plan_of({{1, 1}}, 2));
  // Stage 1 begins after 1 ms and works 6; stage 0 ends with the backward after that: 9 ms, of 18 12 busy.
  EXPECT_NE(figure.find("balanced, predicted: 9.0 ms, bubbles 33%"), std::string::npos) << figure;
  EXPECT_EQ(parts_of(figure, ">rank 0 stage ", "<"), (std::vector<std::string>{"0", "1"}));
  EXPECT_EQ(parts_of(figure, "<title>", "<").size(), 8u);
}

TEST(ReportSchedule, OfManyReplicasTheSlowestAreShown) {
  const std::string figure = figure_of(plan_of({{1}, {9}, {2}, {8}, {3}, {7}, {6}}));
  EXPECT_EQ(parts_of(figure, ">rank ", " stage"), (std::vector<std::string>{"1", "3", "5", "6"}));
  EXPECT_NE(figure.find("(showing the 4 slowest of 7 replicas)"), std::string::npos);
  EXPECT_EQ(figure_of(plan_of({{1}, {9}, {2}, {8}})).find("slowest of"), std::string::npos);
}

TEST(ReportSchedule, ColoursTellNeighboursApart) {
  const std::string figure = figure_of(plan_of({std::vector<double>(9, 1.0)}));
  const std::vector<std::string> fills = parts_of(figure, " fill=\"#", "\"");
  ASSERT_EQ(fills.size(), 18u);
  EXPECT_EQ(std::set<std::string>(fills.begin(), fills.begin() + 16).size(), 16u) << "eight pairs";
  EXPECT_EQ(fills[16], fills[0]) << "and from the first again";
  EXPECT_EQ(fills[17], fills[1]);
  for (const double opacity : numbers_of(figure, "fill-opacity=\"", "\"")) EXPECT_EQ(opacity, 1);
}

TEST(ReportSchedule, PiecesAreShadesOfOneColour) {
  Plan plan = plan_of({{1, 1, 1, 1}});
  for (size_t i = 0; i < 3; ++i) {
    PlannedMicroBatch& piece = plan.ranks[0].micro_batches[i];
    piece.sequences = {5};
    piece.begin = static_cast<int64_t>(i) * 100;
    piece.end = piece.begin + 100;
  }
  const std::string figure = figure_of(plan);
  const std::vector<std::string> fills = parts_of(figure, " fill=\"#", "\"");
  EXPECT_EQ(std::set<std::string>(fills.begin(), fills.end()).size(), 4u) << "two groups, forward and backward";
  const std::vector<double> opacities = numbers_of(figure, "fill-opacity=\"", "\"");
  EXPECT_EQ(std::set<double>(opacities.begin(), opacities.end()), (std::set<double>{0.45, 0.73, 1.0}));
}

TEST(ReportSchedule, MeasuredTimesThatAreNoTimesAreLeftOut) {
  const LoggedStep good = example_run(1, 1).plans.steps.at(1);
  EXPECT_NE(schedule_figure(good).find("balanced, measured"), std::string::npos);
  for (const int64_t bad : {int64_t{-1000}, std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()}) {
    LoggedStep step = good;
    step.measured->ranks[1][2].backward[0] = bad;
    EXPECT_EQ(schedule_figure(step).find("balanced, measured"), std::string::npos) << bad;
    EXPECT_NE(schedule_figure(step).find("balanced, predicted"), std::string::npos);
  }
  LoggedStep step = good;
  step.in_order.ranks[0].micro_batches[0].forward_us[0] = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(schedule_figure(step).find("in order"), std::string::npos);
}

// Every operation once, with its time, none at the same time as another of its stage.
TEST(ReportSchedule, TheTraceHoldsEveryOperationOnce) {
  const Plan plan = plan_of({{1, 2, 3}, {2, 2}}, 2);
  ModelShape shape;
  shape.layers = plan.layers;
  shape.hidden = shape.head_dim = shape.intermediate = 64;
  shape.heads = shape.kv_heads = 1;
  shape.vocabulary = 2;
  const LatencyModel latency(analytic_profile("h200-analytic", shape));
  Layout layout;
  layout.dp = 2;
  layout.pp = 2;
  layout.comm = false;
  const CostModel cost(latency, AttentionSpec{}, layout);
  const auto trace = nlohmann::json::parse(schedule_trace(plan, cost));
  EXPECT_EQ(trace["displayTimeUnit"], "ms");
  std::map<std::pair<int, int>, std::vector<std::pair<double, double>>> tracks;
  std::set<std::string> names;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] == "M") {
      names.insert(event["args"]["name"]);
      continue;
    }
    const int rank = event["pid"], stage = event["tid"];
    const std::string name = event["name"];
    const bool backward = name[0] == 'B';
    EXPECT_EQ(event["cat"], backward ? "backward" : "forward");
    const PlannedMicroBatch& micro_batch =
        plan.ranks[static_cast<size_t>(rank)].micro_batches.at(static_cast<size_t>(std::stoi(name.substr(1))));
    EXPECT_NEAR(event["dur"].get<double>(), (backward ? micro_batch.backward_us : micro_batch.forward_us)[0], 1e-6);
    EXPECT_EQ(event["args"]["tokens"], 100);
    tracks[{rank, stage}].emplace_back(event["ts"], event["dur"]);
  }
  EXPECT_EQ(names, (std::set<std::string>{"data-parallel rank 0", "data-parallel rank 1", "stage 0", "stage 1"}));
  ASSERT_EQ(tracks.size(), 4u);
  for (auto& [track, operations] : tracks) {
    EXPECT_EQ(operations.size(), 2 * plan.ranks[static_cast<size_t>(track.first)].micro_batches.size());
    std::sort(operations.begin(), operations.end());
    for (size_t i = 1; i < operations.size(); ++i)
      EXPECT_GE(operations[i].first + 1e-6, operations[i - 1].first + operations[i - 1].second);
  }
}

}  // namespace
}  // namespace sb
