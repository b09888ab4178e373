#include "plan/latency/cost_model.h"

#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "core/errors.h"
#include "tests/core/message_of.h"

namespace sb {
namespace {

Profile profile_of(const char* model = "qwen2.5-3b") {
  return analytic_profile("h200-analytic", find_model_shape(model));
}

TEST(LatencyModel, APassCorrectsItsOperationsAndNoOthers) {
  for (const bool backward : {false, true}) {
    LatencyModel model(profile_of());
    model.observe_pass(backward, 10, 20);
    // A tenth of the way from 1 to 2.
    const int64_t moved = 1'100'000, same = 1'000'000;
    const int64_t forward = backward ? same : moved, back = backward ? moved : same;
    // linear, linear, attention, attention, selection, head, head
    const std::array<int64_t, kOperations> expected{forward, back, forward, back, forward, forward, back};
    EXPECT_EQ(model.corrections_ppm(), expected);
  }
}

TEST(LatencyModel, OneAccidentMovesLittle) {
  const auto after = [](double measured) {
    LatencyModel model(profile_of());
    model.observe(Operation::selection, 1.0, measured);
    return model.corrections_ppm()[static_cast<size_t>(Operation::selection)];
  };
  // A tenth of the way, to four times or a quarter at most.
  EXPECT_EQ(after(4), 1'300'000);
  EXPECT_EQ(after(1e9), 1'300'000);
  EXPECT_EQ(after(0.25), 925'000);
  EXPECT_EQ(after(1e-9), 925'000);
  EXPECT_EQ(after(1), 1'000'000);
  // However long it goes on, a correction stays above nothing.
  LatencyModel model(profile_of());
  for (int i = 0; i < 1000; ++i) model.observe(Operation::selection, 1.0, 1e-9);
  EXPECT_GE(model.corrections_ppm()[static_cast<size_t>(Operation::selection)], 1);
}

TEST(LatencyModel, RefusesTimesThatAreNone) {
  LatencyModel model(profile_of());
  EXPECT_THROW(model.observe(Operation::selection, 0, 1), Error);
  EXPECT_THROW(model.observe(Operation::selection, 1, 0), Error);
  EXPECT_THROW(model.observe_pass(true, -1, 1), Error);
  std::array<int64_t, kOperations> corrections = model.corrections_ppm();
  corrections[3] = 0;
  EXPECT_NE(message_of<Error>([&] { model.set_corrections_ppm(corrections); }).find("attention_backward is 0 ppm"),
            std::string::npos);
  Profile empty = profile_of();
  empty.tables[5].curve = {};
  EXPECT_NE(message_of<Error>([&] { LatencyModel lacking(empty); }).find("lacks head_forward"), std::string::npos);
}

TEST(LatencyModel, ErrorsAreOfTheLast1024) {
  LatencyModel model(profile_of());
  for (int i = 0; i < 500; ++i) model.observe(Operation::selection, 2, 1);  // off by 100 %
  for (int i = 0; i < 600; ++i) model.observe(Operation::selection, 1, 1);
  EXPECT_EQ(model.error().count, 1024);  // 424 of the former are left
  EXPECT_EQ(model.error().median, 0);
  EXPECT_EQ(model.error().p95, 1);
  for (int i = 0; i < 424; ++i) model.observe(Operation::selection, 1, 1);
  EXPECT_EQ(model.error().p95, 0);
  // Of one, of two: the smallest value that half, or 95 of 100, do not exceed.
  EXPECT_EQ(summarize_errors({0.3}).median, 0.3);
  EXPECT_EQ(summarize_errors({0.3}).p95, 0.3);
  EXPECT_EQ(summarize_errors({0.4, 0.2}).median, 0.2);
  EXPECT_EQ(summarize_errors({0.4, 0.2}).p95, 0.4);
}

TEST(CostModel, LayoutsAndBudgetsThatDoNotWorkAreNamed) {
  const LatencyModel latency(profile_of());
  struct Case {
    Layout layout;
    AttentionSpec spec;
    const char* said;
  };
  const AttentionSpec spec;
  AttentionSpec no_block = spec, no_queries = spec, small = spec, negative = spec, after = spec, less = spec;
  no_block.block = 0;
  no_queries.query_block = -1;
  small.budget = 639;
  negative.dense_layers = {-1};
  after.dense_layers = {0, 36};
  less.max_budget = 8191;
  const std::vector<Case> cases = {
      {{.dp = 0}, spec, "dp 0, pp 1, cp 1 and tp 1 must be positive"},
      {{.pp = -1}, spec, "dp 1, pp -1, cp 1 and tp 1 must be positive"},
      {{.cp = 0}, spec, "cp 0"},
      {{.tp = 3}, spec, "tp 3: it does not divide the 16 heads of qwen2.5-3b; lower tp"},
      {{.pp = 37}, spec, "pp 37 exceeds the 36 layers of qwen2.5-3b: a stage would be empty; lower pp"},
      {{.warmup_depth = 0}, spec, "warmup depth must be at least 1, got 0"},
      {{}, no_block, "block and query block must be positive"},
      {{}, no_queries, "block and query block must be positive"},
      {{}, small, "budget 639 is below 1 sink + 2 local + 2 blocks of 128 tokens = 640; raise it or shrink the block"},
      {{}, negative, "attention.dense_layers: there is no layer -1; the model has layers 0 to 35"},
      {{}, after, "attention.dense_layers: there is no layer 36; the model has layers 0 to 35"},
      {{}, less, "the largest budget 8191 is below the base budget 8192"},
  };
  for (const Case& one : cases)
    EXPECT_NE(message_of([&] { CostModel(latency, one.spec, one.layout); }).find(one.said), std::string::npos)
        << one.said;
  AttentionSpec least = spec;
  least.budget = 640;
  EXPECT_NO_THROW(CostModel(latency, least, {.pp = 36}));
}

TEST(CostModel, AGivenSplitMustBeOne) {
  const LatencyModel latency(profile_of());
  const Layout three{.pp = 3};
  const CostModel cost(latency, {}, three, {0, 1, 30, 36});
  EXPECT_EQ(cost.stage_layers(0), 1);
  EXPECT_EQ(cost.stage_layers(1), 29);
  EXPECT_EQ(cost.stage_layers(2), 6);
  for (const std::vector<int>& wrong : std::vector<std::vector<int>>{
           {0, 36}, {0, 10, 36}, {1, 10, 20, 36}, {0, 10, 20, 35}, {0, 10, 10, 36}, {0, 20, 10, 36}, {0, 1, 2, 3, 36}})
    EXPECT_THROW(CostModel(latency, {}, three, wrong), Error);
}

// Microseconds to sum (or gather) so many bytes among ranks of a node at 300 GB/s.
double inside(double bytes, int ranks) {
  return 20 + bytes * (ranks - 1) / ranks / 300e3;
}

void expect_exposed(const Exposed& got, double least, double all, double hidden, const char* what) {
  EXPECT_NEAR(got.least, least, 1e-6 * all) << what;
  EXPECT_NEAR(got.all, all, 1e-6 * all) << what;
  EXPECT_NEAR(got.hidden, hidden, 1e-12) << what;
}

// Gradients are summed as fp32 and parameters gathered as bf16, of every rank the share that is not its own; every
// layer and every matrix of the vocabulary by itself. What the backward makes last is summed behind it and gathered
// before the next forward: nothing hides it.
TEST(CostModel, SumsAndGathersByHand) {
  ModelShape tied = find_model_shape("qwen2.5-3b"), untied = tied;
  tied.layers = untied.layers = 4;
  untied.tied = false;
  const auto layer = static_cast<double>(tied.layer_parameters()), embedding = 2048.0 * 151936;
  const LatencyModel latency(analytic_profile("h200-analytic", tied)),
      of_untied(analytic_profile("h200-analytic", untied));
  const auto sum = [](double parameters, int ranks = 2) { return inside(4 * parameters, ranks); };
  const auto gather = [](double parameters, int ranks = 2) { return inside(2 * parameters, ranks); };
  // The first of four layers is ready after a quarter of the backward, the embedding with the last. Forward the last
  // layer is needed after three quarters.
  const CostModel alone(latency, {}, {.dp = 2});
  expect_exposed(alone.tail(0), sum(layer) + sum(embedding), 4 * sum(layer) + sum(embedding), 0.75, "tied");
  expect_exposed(alone.gather(0), gather(layer) + gather(embedding), 4 * gather(layer) + gather(embedding), 0.75,
                 "tied");
  const CostModel headless(latency, {}, {.dp = 2, .head = false});
  expect_exposed(headless.tail(0), sum(layer), 4 * sum(layer), 0.75, "no head");
  expect_exposed(headless.gather(0), gather(layer), 4 * gather(layer), 0.75, "no head");
  // A head of its own is summed first and needed last.
  const CostModel own_head(of_untied, {}, {.dp = 2});
  expect_exposed(own_head.tail(0), sum(layer) + sum(embedding), 4 * sum(layer) + 2 * sum(embedding), 1, "untied");
  expect_exposed(own_head.gather(0), gather(layer) + gather(embedding), 4 * gather(layer) + 2 * gather(embedding), 1,
                 "untied");
  // Context-parallel ranks hold the same weights.
  const CostModel shared(of_untied, {}, {.dp = 2, .cp = 3, .head = false});
  expect_exposed(shared.tail(0), sum(layer, 6), 4 * sum(layer, 6), 0.75, "dp and cp");
  expect_exposed(shared.gather(0), gather(layer, 6), 4 * gather(layer, 6), 0.75, "dp and cp");
  // Both ends of a pipeline have the tied matrix, and add their pieces of its gradients up.
  const CostModel four(latency, {}, {.dp = 2, .pp = 4}, {0, 1, 2, 3, 4});
  const double ends = 2 * inside(4 * embedding / 2, 2);
  expect_exposed(four.tail(0), ends + sum(layer) + sum(embedding), ends + sum(layer) + sum(embedding), 0, "first");
  expect_exposed(four.gather(0), gather(layer) + gather(embedding), gather(layer) + gather(embedding), 0, "first");
  expect_exposed(four.tail(3), ends + sum(layer), ends + sum(layer) + sum(embedding), 1, "last");
  expect_exposed(four.gather(3), gather(layer), gather(layer) + gather(embedding), 1, "last");
  for (const int stage : {1, 2}) {
    expect_exposed(four.tail(stage), sum(layer), sum(layer), 0, "between");
    expect_exposed(four.gather(stage), gather(layer), gather(layer), 0, "between");
  }
  // Nobody to share with, or nothing counted.
  EXPECT_EQ(CostModel(of_untied, {}, {.pp = 4}).tail(0).all, 0);
  EXPECT_EQ(CostModel(latency, {}, {.pp = 4}).tail(1).all, 0);
  EXPECT_NEAR(CostModel(latency, {}, {.pp = 4}).tail(0).all, 2 * inside(4 * embedding, 2), 1e-3);
  EXPECT_EQ(CostModel(latency, {}, {.pp = 4}).gather(0).all, 0);
  for (const Exposed& nothing : {CostModel(latency, {}, {.dp = 8, .comm = false}).tail(0),
                                 CostModel(latency, {}, {.dp = 8, .comm = false}).gather(0)})
    EXPECT_EQ(nothing.all, 0);
}

// Layers too small for a bucket of four million parameters share one.
TEST(CostModel, SmallLayersAreReducedTogether) {
  ModelShape shape = find_model_shape("qwen2.5-3b");
  shape.layers = 5;
  shape.hidden = 512;
  shape.intermediate = 512;  // 3.1 million parameters a layer
  shape.tied = false;
  const LatencyModel latency(analytic_profile("h200-analytic", shape));
  const auto layer = static_cast<double>(shape.layer_parameters());
  ASSERT_LT(layer, 4 << 20);
  ASSERT_GT(2 * layer, 4 << 20);
  const CostModel cost(latency, {}, {.dp = 2, .head = false});
  expect_exposed(cost.tail(0), inside(4 * layer, 2), 2 * inside(8 * layer, 2) + inside(4 * layer, 2), 0.6, "sums");
  expect_exposed(cost.gather(0), inside(2 * layer, 2), 2 * inside(4 * layer, 2) + inside(2 * layer, 2), 0.6, "gathers");
}

TEST(CostModel, TransfersCrossNodesWhereStagesDo) {
  Profile profile = profile_of();
  profile.links.node_ranks = 4;
  profile.links.transfer_inside = {1, 0};
  profile.links.transfer_between = {100, 0};
  const LatencyModel latency(profile);
  const struct {
    Layout layout;
    std::vector<double> into;  // every stage
  } cases[] = {
      {{.pp = 6}, {0, 1, 1, 1, 100, 1}},
      {{.pp = 5, .cp = 2}, {0, 1, 100, 1, 100}},
      {{.pp = 3, .cp = 4}, {0, 100, 100}},
      {{.pp = 4, .cp = 3}, {0, 1, 100, 100}},  // ranks 0, 3, 6, 9: a stage that lies on two nodes counts by its first
      {{.pp = 3, .comm = false}, {0, 0, 0}},
  };
  for (const auto& [layout, into] : cases) {
    const CostModel cost(latency, {}, layout);
    for (int stage = 0; stage < layout.pp; ++stage)
      EXPECT_EQ(cost.transfer(stage, 1000), into[static_cast<size_t>(stage)]) << layout.pp << " stages, " << stage;
  }
}

TEST(CostModel, AGradientLeavesBeforeThoseOfTheWeights) {
  Profile profile = profile_of();
  profile.links.transfer_inside = {5, 0};
  const LatencyModel latency(profile);
  const CostModel cost(latency, {}, {.pp = 4});
  const StageTime linear = cost.linear(1000);
  const double weights = cost.after_input_gradient(linear);
  EXPECT_GT(weights, 0);
  EXPECT_LE(weights, linear.forward);
  EXPECT_LE(weights, linear.backward / 2);
  for (int stage = 0; stage < 3; ++stage) {
    EXPECT_EQ(cost.gradient_transfer(stage, 1000, linear, false), 5);
    EXPECT_EQ(cost.gradient_transfer(stage, 1000, linear, true), 5 - cost.stage_layers(stage + 1) * weights);
  }
  EXPECT_EQ(cost.gradient_transfer(3, 1000, linear, true), 0);
  // Not beside the transfers of ranks that share the products, nor where next to nothing is trained or layers are
  // narrow.
  Profile narrow = profile_of();
  narrow.shape.hidden = 448;
  const LatencyModel of_narrow(narrow);
  EXPECT_EQ(CostModel(of_narrow, {}, {.pp = 4}).after_input_gradient(linear), 0);
  EXPECT_EQ(CostModel(latency, {}, {.pp = 4, .tp = 2}).after_input_gradient(linear), 0);
  profile.lora_rank = 8;
  const LatencyModel adapters(profile);
  EXPECT_EQ(CostModel(adapters, {}, {.pp = 4}).after_input_gradient(linear), 0);
}

// The ring hides behind attention: the longer of both counts, and its selection on top.
TEST(CostModel, ARingTakesWhatIsLonger) {
  Profile profile = profile_of();
  const Layout layout{.cp = 4};
  Work work;
  work.tokens = 40000;
  work.pairs = 4e8;
  work.scores = 8e8;
  const auto times = [&](double us_per_byte) {
    profile.links.transfer_inside = {5, us_per_byte};
    const LatencyModel latency(profile);
    return CostModel(latency, {}, layout).attention(work);
  };
  // A quarter of everything; 4·128·16 FLOPs a pair at 480 TFLOP/s, 2.5 times as many back at 400.
  const double forward = 1e8 * 4 * 128 * 16 / 480e12 * 1e6, backward = 2.5 * 1e8 * 4 * 128 * 16 / 400e12 * 1e6;
  const double selection = 2e8 * 2.0 * 32 * 2 / 300e12 * 1e6;
  EXPECT_NEAR(times(0).forward, forward + selection, 1e-6 * forward);
  EXPECT_NEAR(times(0).backward, backward, 1e-6 * backward);
  // Three sendings of 10,000 tokens' keys and values: two heads of 128, bf16; backward their gradients as well.
  const double bytes = 10000 * 2.0 * 256 * 2;
  EXPECT_NEAR(times(1).forward, 3 * (5 + bytes) + selection, 1e-3);
  EXPECT_NEAR(times(1).backward, 3 * (5 + 2 * bytes), 1e-3);
}

TEST(CostModel, AHeadThatIsLeftOutTakesNothing) {
  const LatencyModel latency(profile_of());
  const CostModel without(latency, {}, {.head = false}), with(latency, {}, {});
  EXPECT_EQ(without.head(1e6).forward, 0);
  EXPECT_EQ(without.head(1e6).backward, 0);
  // 2·2048·151936 FLOPs a token at 600 TFLOP/s, twice as many back.
  EXPECT_NEAR(with.head(1000).forward, 1000 * 2.0 * 2048 * 151936 / 600e12 * 1e6, 1e-6);
  EXPECT_NEAR(with.head(1000).backward, 2 * with.head(1000).forward, 1e-9);
}

// Sums over the queries and their keys, one by one.
TEST(Workload, PairsAndScoresOfPiecesAreCounted) {
  AttentionSpec spec;
  spec.block = 8;
  spec.query_block = 4;
  spec.score_channels = 0;
  for (const int64_t length : {1, 5, 40, 97})
    for (const int64_t budget : {1, 8, 33, 96, 97, 500})
      for (int64_t begin = 0; begin < length; begin += 8) {
        const int64_t end = std::min(length, begin + 16);
        double pairs = 0;
        for (int64_t query = begin; query < end; ++query) {
          // A query sees half of itself: a causal half square has n²/2 of its n² pairs.
          const auto seen = static_cast<double>(query) + 0.5;
          pairs += std::min(seen, static_cast<double>(budget));
        }
        const Work work = work_of(spec, length, {begin, end}, budget);
        EXPECT_EQ(work.tokens, static_cast<double>(end - begin));
        EXPECT_EQ(work.tiles, static_cast<double>((end - begin + 3) / 4));
        EXPECT_EQ(work.prefix, static_cast<double>(end));
        EXPECT_NEAR(work.pairs, pairs, 1e-9) << length << " " << budget << " " << begin;
        EXPECT_EQ(work.scores, budget >= length ? 0.0 : static_cast<double>(end * end - begin * begin) / 16);
      }
}

TEST(Workload, WhatRunsDense) {
  AttentionSpec spec;
  spec.budget = 1000;
  spec.dense_layers = {2};
  const struct {
    int64_t dense_below, tokens, budget;
  } cases[] = {{-1, 1000, 1000}, {-1, 1001, 1000},   {0, 999, 999},      {0, 1001, 1000},
               {5000, 1, 1},     {5000, 5000, 5000}, {5000, 5001, 1000}, {500, 1000, 1000}};
  for (const auto& [dense_below, tokens, budget] : cases) {
    spec.dense_below = dense_below;
    EXPECT_EQ(spec.base_budget(tokens), budget) << dense_below << " " << tokens;
    EXPECT_EQ(spec.base_budget(tokens, 1), budget);
    EXPECT_EQ(spec.base_budget(tokens, 2), tokens);
  }
}

}  // namespace
}  // namespace sb
