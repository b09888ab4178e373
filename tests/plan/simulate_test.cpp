#include "plan/simulate/simulate.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "plan/simulate/layout_sweep.h"
#include "plan/simulate/length_pool.h"

namespace sb {
namespace {

SimulatedRow run(const char* model, const char* pool_name, int dp, int pp, int64_t per_micro_batch,
                 const std::string& policy, int64_t steps = 100) {
  const LatencyModel latency(analytic_profile("h200-analytic", find_model_shape(model)));
  AttentionSpec spec;
  spec.block = 256;
  Layout layout;
  layout.dp = dp;
  layout.pp = pp;
  layout.comm = layout.head = false;
  const CostModel cost(latency, spec, layout);
  const auto coverage = find_coverage("power:0.22", cost.layers());
  const auto pool = find_lengths(pool_name);
  const SimulateInput input{cost, *coverage, pool, 16, steps, 1, [] { return 0.0; }, nullptr};
  BatchingOptions batching;
  batching.micro_batch_sequences = per_micro_batch;
  for (const SimulatedPolicy& candidate : standard_policies(batching, 0.1))
    if (candidate.name == policy) return simulate_policy(input, candidate);
  ADD_FAILURE() << policy;
  return {};
}

TEST(Simulate, OneNodeOfThePaper) {
  const auto row = [](const std::string& policy) { return run("qwen2.5-3b", "chatqa2-like", 2, 4, 2, policy); };
  const SimulatedRow base = row("in_order"), sab = row("sab"), order = row("sab+order"),
                     tuned = row("sab+order+optimal");
  EXPECT_DOUBLE_EQ(base.speedup, 1.0);
  EXPECT_GE(base.imbalance, 1.7);
  EXPECT_LE(base.imbalance, 2.1);
  EXPECT_LE(sab.imbalance, 1.41);
  EXPECT_GE(order.speedup, 1.38);
  EXPECT_EQ(order.worst_loss, 0.0);
  EXPECT_GE(tuned.speedup, 1.45);
  EXPECT_GE(tuned.worst_mean_difference, -1e-12);
  EXPECT_LE(tuned.worst_loss, 0.1 + 1e-9);
  // Of the mean coverage that continuous budgets would reach in the same time.
  EXPECT_GE(tuned.mean_coverage, 0.97 * tuned.relaxed_bound);
}

TEST(Simulate, OneNodeWithTheSmallModel) {
  const SimulatedRow tuned = run("qwen2.5-0.5b", "chatqa2-like", 2, 4, 2, "sab+order+optimal");
  EXPECT_GE(tuned.speedup, 1.45);
  EXPECT_GE(tuned.worst_mean_difference, -1e-12);
  EXPECT_GE(tuned.mean_coverage, 0.97 * tuned.relaxed_bound);
}

TEST(Simulate, FourByFourOfThePaper) {
  for (const char* pool : {"chatqa2-like", "longalign-like"}) {
    const SimulatedRow small = run("qwen2.5-0.5b", pool, 4, 4, 1, "sab+order+optimal");
    const SimulatedRow large = run("qwen2.5-3b", pool, 4, 4, 1, "sab+order+optimal");
    EXPECT_GE(small.speedup, 1.39) << pool;
    EXPECT_GE(large.speedup, 1.33) << pool;
    for (const SimulatedRow& row : {small, large}) {
      EXPECT_GE(row.worst_mean_difference, -1e-12) << pool;
      EXPECT_LE(row.worst_loss, 0.1 + 1e-9) << pool;
      EXPECT_GE(row.worst_step_speedup, 1.0) << pool;
      EXPECT_GE(row.mean_coverage, 0.97 * row.relaxed_bound) << pool;
    }
  }
}

// One sequence a micro-batch: what the rows count is what the steps hold, the last ones too.
TEST(Simulate, CountsWhatAllStepsHold) {
  constexpr int64_t kSteps = 50;
  const SimulatedRow row = run("qwen2.5-0.5b", "chatqa2-like", 2, 1, 1, "in_order", kSteps);
  const auto pool = find_lengths("chatqa2-like");
  LengthSampler sampler(pool, 1);
  int64_t tokens = 0, longest = 0;
  for (int64_t step = 0; step < kSteps; ++step)
    for (const Sequence& sequence : sampler.next(16)) {
      tokens += sequence.tokens;
      longest = std::max(longest, sequence.tokens);
    }
  EXPECT_DOUBLE_EQ(row.tokens, static_cast<double>(tokens) / kSteps);
  EXPECT_EQ(row.largest_micro_batch, longest);
}

TEST(Simulate, LayoutsOfASweep) {
  Layout like;
  const ModelShape shape = find_model_shape("qwen2.5-0.5b");
  const auto layouts = possible_layouts(like, 8, shape, 4, {.tp = 1, .cp = 2});
  for (const Layout& layout : layouts) {
    EXPECT_EQ(layout.workers(), 8);
    EXPECT_LE(layout.dp, 4);
    EXPECT_LE(layout.cp, 2);
  }
  EXPECT_EQ(layouts.size(), 6u);  // cp 1: pp 2, 4, 8; cp 2: pp 1, 2, 4
  // tp 2 as well: cp 1: pp 1, 2, 4; cp 2: pp 1, 2. It has two key/value heads, so that there is no tp 4.
  EXPECT_EQ(possible_layouts(like, 8, shape, 4, {.tp = 8, .cp = 2}).size(), 6u + 5u);
}

// Every part that tensor-parallel ranks share, by hand.
TEST(Simulate, MemoryFallsWithTensorParallelRanks) {
  const ModelShape shape = find_model_shape("qwen2.5-3b");
  const LatencyModel latency(analytic_profile("h200-analytic", shape));
  Layout layout;
  const CostModel one(latency, {}, layout);
  layout.tp = 2;
  const CostModel two(latency, {}, layout);
  constexpr int64_t kTokens = 32768;
  const MemoryEstimate whole = estimate_memory(one, kTokens), half = estimate_memory(two, kTokens);
  EXPECT_EQ(2 * half.weights, whole.weights);
  EXPECT_EQ(2 * half.gradients, whole.gradients);
  EXPECT_EQ(2 * half.optimizer, whole.optimizer);
  EXPECT_EQ(2 * half.activations, whole.activations);
  // Temporaries of a quarter of the tokens at a time, and half as wide but for the gathered hidden states, of which two
  // pieces are there: less than half, more than an eighth.
  EXPECT_LT(half.workspace, whole.workspace / 2);
  EXPECT_GT(half.workspace, whole.workspace / 8);
  EXPECT_LT(static_cast<double>(half.total()), 0.55 * static_cast<double>(whole.total()));
  // Sixteen ranks hold the two key/value heads eight times: 2·h·(128 + 2·128) and 3·h·688 numbers a layer.
  EXPECT_EQ(shape.of_rank(16).layer_parameters(), 2048 * (128 + 2 * 128 + 128 + 3 * 688));
}

TEST(Simulate, MemoryGrowsWithMicroBatchesInFlight) {
  const LatencyModel latency(analytic_profile("h200-analytic", find_model_shape("qwen2.5-7b")));
  Layout layout;
  layout.pp = 4;
  const CostModel cost(latency, {}, layout);
  layout.warmup_depth = 2;
  const CostModel deeper(latency, {}, layout);
  EXPECT_GT(estimate_memory(deeper, 32768).activations, estimate_memory(cost, 32768).activations);
  // Two bytes of weights for each of its 7.6 billion parameters, on one worker.
  const CostModel one(latency, {}, {});
  EXPECT_NEAR(static_cast<double>(estimate_memory(one, 4096).weights), 2 * 7.6e9, 0.05 * 2 * 7.6e9);
}

}  // namespace
}  // namespace sb
