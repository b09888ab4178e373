#include "eval/generation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>

#include "attention/cpu/dense_attention.h"
#include "attention/cpu/sparse_attention.h"
#include "core/errors.h"
#include "tests/eval/small_model.h"

namespace sb {
namespace {

StageOptions evaluation_options() {
  StageOptions options;
  options.last_layer = 2;
  options.max_micro_batch_tokens = 1024;
  options.max_sequence_length = 1024;
  options.training = false;
  return options;
}

// A model for generation, and the same model without a cache.
struct Pair {
  ModelConfig config = small_model(16);
  std::unique_ptr<Attention> prefill, plain;
  std::unique_ptr<CachedAttention> cached;
  std::unique_ptr<Stage> generating, whole;
  ThreadPool pool{2};
  Exec exec;

  LearnedSelection learned;

  explicit Pair(const SparseAttention::Options* sparse, int batch = 3, LearnedSelection known = {})
      : learned(std::move(known)) {
    exec.pool = &pool;
    if (sparse) {
      prefill = std::make_unique<SparseAttention>(*sparse);
      plain = std::make_unique<SparseAttention>(*sparse);
    } else {
      prefill = std::make_unique<DenseAttention>();
      plain = std::make_unique<DenseAttention>();
    }
    CachedAttention::Options options;
    options.prefill = prefill.get();
    if (sparse) {
      options.selecting = static_cast<SparseAttention*>(prefill.get());
      options.selection = sparse->selection;
      options.learned = learned;
    }
    options.layers = 2;
    options.sequences = batch;
    options.capacity = 1024;
    options.shape = {4, 2, 16, 0.25f};
    cached = std::make_unique<CachedAttention>(options);
    generating = std::make_unique<Stage>(config, evaluation_options(), *cached, 2);
    whole = std::make_unique<Stage>(config, evaluation_options(), *plain, 2);
    generating->initialize(5);
    whole->initialize(5);
  }

  // Greedy continuation by running the whole sequence again for every token.
  std::vector<int32_t> without_cache(std::vector<int32_t> tokens, int count) {
    std::vector<int32_t> result;
    std::vector<float> logits(61);
    for (int i = 0; i < count; ++i) {
      MicroBatch batch;
      batch.tokens = tokens;
      batch.positions.resize(tokens.size());
      std::iota(batch.positions.begin(), batch.positions.end(), 0);
      batch.labels.assign(tokens.size(), kIgnoredLabel);
      batch.weights.assign(tokens.size(), 0.0f);
      batch.cu_seqlens = {0, static_cast<int32_t>(tokens.size())};
      batch.sequence_ids = {0};
      if (auto* steering = dynamic_cast<SparseAttention*>(plain.get())) steering->use(learned);
      whole->forward(exec, batch, 0, {});
      const int64_t last = batch.size() - 1;
      whole->logits(exec, 0, last, last + 1, {logits.data(), {1, 61}});
      result.push_back(static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin()));
      tokens.push_back(result.back());
    }
    return result;
  }
};

SparseAttention::Options sparse_options(SelectionPattern pattern, int query_block) {
  SparseAttention::Options options;
  options.layers = 2;
  options.selection.pattern = pattern;
  options.selection.block = 64;
  options.selection.query_block = query_block;
  options.selection.budget = 320;
  options.selection.coverage = 0.5;
  return options;
}

TEST(Generation, DenseCacheEqualsRunningTheWholeSequence) {
  Pair pair(nullptr);
  const std::vector<std::vector<int32_t>> prompts = {random_tokens(1, 1), random_tokens(70, 2), random_tokens(33, 3),
                                                     random_tokens(200, 4)};
  Generator generator(*pair.generating, *pair.cached, 3, 1024);
  GenerationOptions options;
  options.max_new_tokens = 20;
  const auto results = generator.generate(pair.exec, prompts, options);
  for (size_t i = 0; i < prompts.size(); ++i) EXPECT_EQ(results[i], pair.without_cache(prompts[i], 20)) << i;
}

TEST(Generation, SparseCacheSelectsAsTrainingWould) {
  // Of about 362 to 724 tokens and of more; far from where `mass` begins, and from each other.
  LearnedSelection learned;
  PlaneSums sums;
  sums.tokens = 10;
  learned.thresholds = {{{0, 9, 1}, {1.2f}}, {{0, 10, 3}, {-0.8f}}, {{1, 9, 1}, {0.3f}}, {{1, 10, 3}, {1.6f}}};
  for (int i = 0; i < 32; ++i)  // 2 kv heads of 16 channels: planes that differ by head
    for (std::vector<double>* values : {&sums.query_squares, &sums.key_sums, &sums.key_squares})
      values->push_back(values == &sums.key_sums ? 0.0 : 1 + i * 7 % 32);
  learned.planes = {sums, sums};
  for (const SelectionPattern pattern :
       {SelectionPattern::topk, SelectionPattern::topp, SelectionPattern::window, SelectionPattern::mass}) {
    for (const auto& [query_block, by_planes] : {std::pair(1, false), std::pair(16, false), std::pair(16, true)}) {
      SparseAttention::Options sparse = sparse_options(pattern, query_block);
      sparse.selection.score_tokens = query_block == 1 ? 4 : 0;
      if (by_planes) {
        sparse.selection.score_tokens = 0;
        sparse.selection.score = BlockScore::planes;
        sparse.selection.score_channels = 6;
      }
      Pair pair(&sparse, 3, learned);
      const std::vector<std::vector<int32_t>> prompts = {random_tokens(700, 2), random_tokens(350, 3)};
      Generator generator(*pair.generating, *pair.cached, 2, 1024);
      GenerationOptions options;
      options.max_new_tokens = 24;  // crosses a tile and a block
      const auto results = generator.generate(pair.exec, prompts, options);
      for (size_t i = 0; i < prompts.size(); ++i) EXPECT_EQ(results[i], pair.without_cache(prompts[i], 24)) << i;
    }
  }
}

TEST(Generation, DoesNotDependOnTheBatch) {
  Pair together(nullptr, 3), alone(nullptr, 1);
  const std::vector<std::vector<int32_t>> prompts = {random_tokens(5, 1), random_tokens(50, 2), random_tokens(9, 3)};
  GenerationOptions options;
  options.sampling.temperature = 1.0;
  options.sampling.top_p = 0.9;
  Generator batch(*together.generating, *together.cached, 3, 1024), single(*alone.generating, *alone.cached, 1, 1024);
  size_t finished = 0;
  const auto a = batch.generate(together.exec, prompts, options, [&](size_t done, size_t) { finished = done; });
  EXPECT_EQ(a, single.generate(alone.exec, prompts, options));
  EXPECT_EQ(finished, 3u);
}

TEST(Generation, StopsAtEndTokens) {
  Pair pair(nullptr);
  Generator generator(*pair.generating, *pair.cached, 3, 1024);
  GenerationOptions options;
  options.max_new_tokens = 10;
  const std::vector<int32_t> prompt = random_tokens(40, 8);
  const std::vector<int32_t> all = generator.generate(pair.exec, {prompt}, options)[0];
  ASSERT_EQ(all.size(), 10u);
  options.stop_tokens = {all[4]};
  const auto first = std::find(all.begin(), all.end(), all[4]);
  EXPECT_EQ(generator.generate(pair.exec, {prompt}, options)[0], std::vector<int32_t>(all.begin(), first));
  options.max_new_tokens = 0;
  EXPECT_TRUE(generator.generate(pair.exec, {prompt}, options)[0].empty());
}

TEST(Generation, EndsWhereItIsToldTo) {
  Pair pair(nullptr, 2);
  Generator generator(*pair.generating, *pair.cached, 2, 1024);
  GenerationOptions options;
  options.max_new_tokens = 6;
  const std::vector<std::vector<int32_t>> prompts = {random_tokens(5, 1), random_tokens(9, 2)};
  const auto whole = generator.generate(pair.exec, prompts, options);
  std::vector<std::vector<int32_t>> seen(2);
  options.goes_on = [&](size_t prompt, int32_t token) {
    seen[prompt].push_back(token);
    return prompt == 1 || seen[prompt].size() < 3;
  };
  const auto ended = generator.generate(pair.exec, prompts, options);
  EXPECT_EQ(ended[0], std::vector<int32_t>(whole[0].begin(), whole[0].begin() + 3));
  EXPECT_EQ(ended[1], whole[1]);
  EXPECT_EQ(seen[0], ended[0]);
  EXPECT_EQ(seen[1], std::vector<int32_t>(whole[1].begin(), whole[1].end() - 1)) << "the last one ends anyway";
}

TEST(Generation, RefusesBadPrompts) {
  Pair pair(nullptr);
  Generator generator(*pair.generating, *pair.cached, 3, 1024);
  const GenerationOptions options;
  EXPECT_THROW(generator.generate(pair.exec, {{}}, options), UserError);
  EXPECT_THROW(generator.generate(pair.exec, {{61}}, options), UserError);
  EXPECT_THROW(generator.generate(pair.exec, {{-1}}, options), UserError);
  EXPECT_THROW(generator.generate(pair.exec, {random_tokens(1000, 1)}, options), UserError);
  GenerationOptions endless;
  endless.max_new_tokens = std::numeric_limits<int64_t>::max();
  EXPECT_THROW(generator.generate(pair.exec, {{1}}, endless), UserError);
  EXPECT_TRUE(generator.generate(pair.exec, {}, options).empty());
}

TEST(Sampling, GreedyTakesTheLargestAndTheLowerIdOnTies) {
  const std::vector<float> logits = {0.0f, 3.0f, 3.0f, -1.0f};
  EXPECT_EQ(sample_token(logits, {}, 0, 0), 1);
}

TEST(Sampling, FollowsTheDistribution) {
  const std::vector<float> logits = {std::log(0.5f), std::log(0.3f), std::log(0.2f)};
  SamplingOptions options;
  options.temperature = 1;
  std::vector<int> seen(3);
  for (uint64_t i = 0; i < 20000; ++i) ++seen[sample_token(logits, options, 3, i)];
  EXPECT_NEAR(seen[0], 10000, 300);
  EXPECT_NEAR(seen[1], 6000, 300);
  EXPECT_NEAR(seen[2], 4000, 300);
  // 0.5 + 0.3 reach 0.7: the third is out, and the two share 5 : 3.
  options.top_p = 0.7;
  std::fill(seen.begin(), seen.end(), 0);
  for (uint64_t i = 0; i < 20000; ++i) ++seen[sample_token(logits, options, 3, i)];
  EXPECT_NEAR(seen[0], 12500, 300);
  EXPECT_EQ(seen[2], 0);
  // Half the temperature squares the odds: 0.25 : 0.09 : 0.04.
  options.top_p = 1;
  options.temperature = 0.5;
  std::fill(seen.begin(), seen.end(), 0);
  for (uint64_t i = 0; i < 20000; ++i) ++seen[sample_token(logits, options, 3, i)];
  EXPECT_NEAR(seen[0], 20000 * 0.25 / 0.38, 300);
}

TEST(Sampling, TopPKeepsAtLeastTheLikeliest) {
  const std::vector<float> logits = {1.0f, 0.5f, 4.0f, 3.9f};
  SamplingOptions options;
  options.temperature = 1.0;
  for (const double top_p : {0.0, 1e-9, 0.3}) {
    options.top_p = top_p;
    for (uint64_t i = 0; i < 50; ++i) EXPECT_EQ(sample_token(logits, options, 3, i), 2) << top_p;
  }
}

TEST(Sampling, LogitsThatAreNoNumbersAreRefused) {
  SamplingOptions options;
  for (const double temperature : {0.0, 1.0}) {
    options.temperature = temperature;
    EXPECT_THROW(sample_token(std::vector<float>{1.0f, NAN, 2.0f}, options, 0, 0), UserError);
  }
}

TEST(Sampling, HugeLogitsDoNotOverflow) {
  const std::vector<float> logits = {1e30f, -1e30f, 3e38f};
  SamplingOptions options;
  options.temperature = 1;
  for (uint64_t i = 0; i < 10; ++i) EXPECT_EQ(sample_token(logits, options, 0, i), 2);
}

}  // namespace
}  // namespace sb
