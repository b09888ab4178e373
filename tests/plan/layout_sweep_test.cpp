#include "plan/simulate/layout_sweep.h"

#include <gtest/gtest.h>

#include <set>
#include <tuple>
#include <vector>

#include "plan/simulate/length_pool.h"
#include "tests/core/message_of.h"

namespace sb {
namespace {

ModelShape small_shape() {
  // name, layers, hidden, heads, kv heads, head dim, intermediate, vocabulary, tied
  return {"small", 2, 64, 4, 2, 16, 128, 1000, false};
}
constexpr int64_t kLayer = 64 * (4 + 2 * 2) * 16 + 4 * 16 * 64 + 3 * 64 * 128;

// All fourfold products, tried one by one.
TEST(LayoutSweep, EveryLayoutThatWorksIsThereOnce) {
  const struct {
    const char* model;
    int workers;
    int64_t batch;
    SweepLimits most;
  } cases[] = {{"qwen2.5-7b", 16, 8, {}},         {"qwen2.5-7b", 12, 100, {.tp = 4, .cp = 3}},
               {"qwen2.5-0.5b", 1, 1, {}},        {"qwen2.5-0.5b", 7, 7, {}},
               {"qwen2.5-72b", 64, 16, {8, 2}},   {"qwen2-25m", 24, 4, {.tp = 3, .cp = 24}},
               {"qwen2.5-3b", 60, 1, {.tp = 60}}, {"llama-3-8b", 32, 2, {.tp = 8, .cp = 1}}};
  for (const auto& [model, workers, batch, most] : cases) {
    const ModelShape shape = find_model_shape(model);
    std::set<std::tuple<int, int, int, int>> expected, found;
    for (int dp = 1; dp <= workers; ++dp)
      for (int pp = 1; pp <= workers; ++pp)
        for (int tp = 1; tp <= most.tp; ++tp)
          for (int cp = 1; cp <= most.cp; ++cp) {
            if (dp * pp * tp * cp != workers || dp > batch || pp > shape.layers) continue;
            if (shape.heads % tp != 0 || shape.kv_heads % tp != 0 || shape.intermediate % tp != 0) continue;
            expected.insert({dp, pp, tp, cp});
          }
    Layout like;
    like.warmup_depth = 2;
    like.head = false;
    const std::vector<Layout> layouts = possible_layouts(like, workers, shape, batch, most);
    for (const Layout& layout : layouts) {
      found.insert({layout.dp, layout.pp, layout.tp, layout.cp});
      EXPECT_EQ(layout.warmup_depth, 2);
      EXPECT_FALSE(layout.head);
      const LatencyModel latency(analytic_profile("h200-analytic", shape));
      EXPECT_NO_THROW(CostModel(latency, {}, layout));
    }
    EXPECT_EQ(found, expected) << model;
    EXPECT_EQ(layouts.size(), expected.size()) << model;
  }
}

TEST(LayoutSweep, WhyRanksCannotShareALayer) {
  ModelShape shape = small_shape();
  const auto says = [&](int tp, const char* all, const char* sparse) {
    EXPECT_EQ(tensor_parallel_problem(shape, tp), all) << tp;
    EXPECT_EQ(sparse_tensor_parallel_problem(shape, tp).find(sparse), 0u) << tp;
  };
  says(1, "", "");
  says(2, "", "");
  says(3, "it does not divide the 4 heads of small", "small has 2 key/value heads, and sparse attention");
  says(4, "", "small has 2 key/value heads, and sparse attention");
  shape.intermediate = 129;
  says(2, "it does not divide the MLP of small, which has 129 channels",
       "it does not divide the MLP of small, which has 129 channels");
  shape.heads = 12;
  shape.kv_heads = 3;
  says(2, "it neither divides the 3 key/value heads of small nor is a multiple of them",
       "it neither divides the 3 key/value");
  EXPECT_EQ(tensor_parallel_problem(shape, 3), "");
}

TEST(LayoutSweep, ARankOfAnOddVocabularyHasTheRoundedUpShare) {
  ModelShape shape = small_shape();
  shape.vocabulary = 1001;
  const ModelShape own = shape.of_rank(4);
  EXPECT_EQ(own.heads, 1);
  EXPECT_EQ(own.kv_heads, 1);  // held twice
  EXPECT_EQ(own.intermediate, 32);
  EXPECT_EQ(own.vocabulary, 251);
  EXPECT_EQ(own.layers, 2);
  EXPECT_EQ(own.hidden, 64);
}

TEST(LayoutSweep, MemoryOfOneWorkerByHand) {
  Profile profile = analytic_profile("h200-analytic", small_shape());
  const LatencyModel latency(profile);
  constexpr int64_t kParameters = 2 * kLayer + 2 * 64 * 1000, kTokens = 1000;
  const MemoryEstimate one = estimate_memory(CostModel(latency, {}, {}), kTokens);
  EXPECT_EQ(one.weights, 2 * kParameters);
  EXPECT_EQ(one.gradients, 4 * kParameters);
  EXPECT_EQ(one.optimizer, 12 * kParameters);
  // Of a token and layer: its input, attention's output (bf16), a log-sum-exp of each of four heads; and the last
  // layer's output.
  EXPECT_EQ(one.activations, kTokens * (2 * (2 * 64 + 2 * 64 + 4 * 4) + 2 * 64));
  EXPECT_EQ(one.total(), one.weights + one.gradients + one.optimizer + one.activations + one.workspace);
  // Copies share the optimizer and nothing else.
  const MemoryEstimate four = estimate_memory(CostModel(latency, {}, {.dp = 4}), kTokens);
  EXPECT_EQ(four.optimizer, 3 * kParameters);
  EXPECT_EQ(four.weights + four.gradients + four.activations + four.workspace,
            one.weights + one.gradients + one.activations + one.workspace);
  // A ring halves the tokens, an odd one up.
  const MemoryEstimate ring = estimate_memory(CostModel(latency, {}, {.cp = 2}), kTokens - 1);
  EXPECT_EQ(ring.activations, one.activations / 2);
  EXPECT_EQ(ring.optimizer, 6 * kParameters);
  // In five pieces of a fifth: all of them are in flight, with keys and values of two heads of 16, and sums of their
  // gradients, fp32, of the whole sequence in both layers.
  const MemoryEstimate cut = estimate_memory(CostModel(latency, {}, {}), kTokens / 5, kTokens);
  EXPECT_EQ(cut.activations, one.activations + kTokens * 2 * (2 * 2 * 32 + 4 * 2 * 32));
  EXPECT_LT(cut.workspace, one.workspace);
  // The second of two stages, which the loss makes the fuller one, keeps what its weights' gradients are computed from
  // while they wait: of a token two gradients of the stream, two norms, the gradient of qkv, and the MLP's inside.
  ModelShape wide = small_shape();
  wide.hidden = 512;
  const LatencyModel of_wide(analytic_profile("h200-analytic", wide));
  const CostModel stages(of_wide, {}, {.pp = 2});
  EXPECT_EQ(estimate_memory(stages, kTokens / 5, kTokens).workspace,
            estimate_memory(stages, kTokens / 5).workspace + 2 * kTokens / 5 * (4 * 512 + 128 + 3 * 128));
  // One matrix in place of two.
  ModelShape tied = small_shape();
  tied.tied = true;
  const LatencyModel shared(analytic_profile("h200-analytic", tied));
  EXPECT_EQ(estimate_memory(CostModel(shared, {}, {}), kTokens).weights, one.weights - 2 * 64 * 1000);
}

TEST(LayoutSweep, MemoryOfAdaptersByHand) {
  Profile profile = analytic_profile("h200-analytic", small_shape());
  profile.lora_rank = 4;
  const LatencyModel latency(profile);
  // Inputs plus outputs: query, key, value, output, and three of the MLP.
  constexpr int64_t kAdapters = 2 * 4 * ((64 + 64) + 2 * (64 + 32) + (64 + 64) + 3 * (64 + 128));
  const MemoryEstimate memory = estimate_memory(CostModel(latency, {}, {}), 100);
  EXPECT_EQ(memory.weights, 2 * (2 * kLayer + 2 * 64 * 1000) + 2 * kAdapters);
  EXPECT_EQ(memory.gradients, 4 * kAdapters);
  EXPECT_EQ(memory.optimizer, 12 * kAdapters);
}

// Of two stages the first holds one micro-batch more for every step of depth.
TEST(LayoutSweep, MemoryOfAPipelineIsThatOfItsFullestStage) {
  ModelShape shape = small_shape();
  shape.tied = true;
  const LatencyModel latency(analytic_profile("h200-analytic", shape));
  constexpr int64_t kTokens = 1 << 20;  // activations decide
  for (const int depth : {1, 2, 5}) {
    Layout layout{.pp = 2};
    layout.warmup_depth = depth;
    const MemoryEstimate memory = estimate_memory(CostModel(latency, {}, layout, {0, 1, 2}), kTokens);
    EXPECT_EQ(memory.activations, (depth + 1) * kTokens * ((2 * 64 + 2 * 64 + 4 * 4) + 2 * 64)) << depth;
    EXPECT_EQ(memory.weights, 2 * (kLayer + 64 * 1000)) << depth;
  }
}

TEST(LayoutSweep, ALayoutFitsWhereItsMemoryDoes) {
  Profile profile = analytic_profile("h200-analytic", find_model_shape("qwen2.5-0.5b"));
  const std::vector<int64_t> pool{3000, 20000, 9000, 500};
  const auto coverage = power_coverage(0.22);
  const Layout layout{.dp = 2, .pp = 2};
  SimulatedPolicy policy{"in_order", {}};
  policy.options.batching.policy = BatchingPolicy::in_order;
  policy.options.batching.micro_batch_sequences = 1;
  policy.options.ordering = false;
  policy.options.tuning.policy = TuningPolicy::none;
  const auto row_with = [&](int64_t memory) {
    profile.memory_bytes = memory;
    const LatencyModel latency(profile);
    const CostModel cost(latency, {}, {});
    const SimulateInput input{cost, *coverage, pool, 4, 3, 1, [] { return 0.0; }, nullptr};
    return simulate_layout(latency, input, policy, layout);
  };
  const SweepRow unknown = row_with(0);
  EXPECT_FALSE(unknown.fits.has_value());
  const LatencyModel latency(profile);
  EXPECT_EQ(unknown.memory_bytes, estimate_memory(CostModel(latency, {}, layout), 20000).total());
  EXPECT_EQ(row_with(unknown.memory_bytes).fits, true);
  EXPECT_EQ(row_with(unknown.memory_bytes - 1).fits, false);
  // Every step draws all four lengths.
  EXPECT_EQ(unknown.simulated.tokens, 32500);
  EXPECT_EQ(unknown.simulated.largest_micro_batch, 20000);
  EXPECT_EQ(unknown.simulated.longest_cut, 0);
  EXPECT_NEAR(unknown.tokens_per_second, 32500 / unknown.simulated.makespan_ms * 1e3, 1e-6);
  EXPECT_EQ(unknown.layout.workers(), 4);
}

TEST(LayoutSweep, PoliciesHaveNamesOfTheirOwnAndWhatTheySay) {
  BatchingOptions batching;
  batching.micro_batch_sequences = 2;
  std::set<std::string> names;
  const auto policies = standard_policies(batching, 0.2, 4096);
  for (const SimulatedPolicy& policy : policies) {
    const auto has = [&](const char* word) { return policy.name.find(word) != std::string::npos; };
    EXPECT_TRUE(names.insert(policy.name).second) << policy.name;
    EXPECT_EQ(policy.options.batching.micro_batch_sequences, 2);
    EXPECT_EQ(policy.options.tuning.p, 0.2);
    EXPECT_EQ(policy.options.ordering, has("+order")) << policy.name;
    EXPECT_EQ(policy.options.chunk.tokens, has("+chunk") ? 4096 : 0) << policy.name;
    EXPECT_EQ(policy.options.tuning.policy == TuningPolicy::optimal, has("+optimal")) << policy.name;
    EXPECT_EQ(policy.options.tuning.policy == TuningPolicy::anchor, has("+anchor:")) << policy.name;
    EXPECT_EQ(policy.options.batching.policy == BatchingPolicy::sab, policy.name.starts_with("sab")) << policy.name;
  }
  double before = -1;
  for (const SimulatedPolicy& policy : frontier_policies(batching, 0.3)) {
    EXPECT_TRUE(names.insert(policy.name).second) << policy.name;
    EXPECT_GT(policy.options.tuning.target, before);
    EXPECT_EQ(policy.options.tuning.p, 0.3);
    before = policy.options.tuning.target;
  }
  EXPECT_EQ(before, 1.0);
  double loss = -1;
  for (const SimulatedPolicy& policy : loss_policies(batching)) {
    EXPECT_TRUE(names.insert(policy.name).second) << policy.name;
    EXPECT_GT(policy.options.tuning.p, loss);
    EXPECT_EQ(policy.options.tuning.target, kEqualCoverage);
    loss = policy.options.tuning.p;
  }
}

TEST(LengthPool, OddFiles) {
  for (const auto& [text, lengths] : std::vector<std::pair<std::string, std::vector<int64_t>>>{
           {"1", {1}}, {"\n\n2147483647\n", {2147483647}}, {"\t7\t\r\n#8\n  # 9\n10", {7, 10}}, {"5\n5\n5", {5, 5, 5}}})
    EXPECT_EQ(parse_lengths(text, "f.txt"), lengths);
  for (const auto& [text, said] : std::vector<std::pair<std::string, std::string>>{
           {"#\n", "f.txt: has no lengths"},
           {"1 2", "f.txt:1: `1 2` is not a length"},
           {"1\n\n+3", "f.txt:3: `+3` is not a length"},
           {"1\n2.0", "f.txt:2: `2.0` is not a length"},
           {"0x10", "f.txt:1: `0x10` is not a length"},
           {"2147483648", "f.txt:1: a length of 2147483648 tokens exceeds the largest budget"},
           {"-1", "f.txt:1: a length must be positive, got -1"},
           {std::string(100, 'y'), "`" + std::string(40, 'y') + "` is not a length"}}) {
    const std::string message = message_of([text = text] { parse_lengths(text, "f.txt"); });
    EXPECT_NE(message.find(said), std::string::npos) << message;
  }
}

}  // namespace
}  // namespace sb
