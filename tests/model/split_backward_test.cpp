// Backward in two halves: the gradient of a stage's input first, then those of its weights.
#include <gtest/gtest.h>

#include <tuple>

#include "tests/model/whole_stage.h"

namespace sb::test {
namespace {

constexpr int64_t kTokens = 37;

ModelConfig three_layers(ModelConfig::Family family) {
  ModelConfig config = tiny_config(family);
  config.hidden_size = 32;
  config.intermediate_size = 48;
  config.heads = 2;
  config.kv_heads = 1;
  config.head_dim = 16;
  config.layers = 3;
  return config;
}

std::vector<float> random_values(int64_t count, uint64_t seed) {
  Random random(seed);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = static_cast<float>(random.normal());
  return values;
}

StageOptions later_stage(const ModelConfig& config, Recompute recompute, int last_layer) {
  StageOptions options = whole_model(config, kTokens, recompute);
  options.first_layer = 1;
  options.last_layer = last_layer;
  options.slots = 2;
  options.split_backward_tokens = kTokens;
  return options;
}

// What a pipeline gives the stage, and what it takes from it.
class Later {
 public:
  Later(const ModelConfig& config, const StageOptions& options)
      : stage(config, options, attention_, 2),
        hidden_(config.hidden_size),
        input_(random_values(kTokens * hidden_, 7)),
        gradient_(random_values(kTokens * hidden_, 8)) {
    randomize(stage.parameters(), 5);
  }

  void evaluate() {
    const MicroBatch batch = random_batch({kTokens}, 13, 3);
    stage.evaluate(run_.exec, batch, 0, rows(input_, batch));
  }

  // Two micro-batches, whose gradients add up.
  void step(bool split) {
    const MicroBatch batches[] = {random_batch({20, 1, 16}, 13, 1), random_batch({kTokens}, 13, 2)};
    stage.parameters().begin_gradients(run_.exec);
    for (int i = 0; i < 2; ++i) stage.forward(run_.exec, batches[i], i, rows(input_, batches[i]));
    for (int i = 0; i < 2; ++i) {
      const MicroBatch& batch = batches[i];
      const TensorView above = stage.last() ? TensorView() : rows(gradient_, batch);
      const GradientsFinal tell = [&](int group) { final_groups.push_back(group); };
      const TensorView below = split ? stage.backward_input(run_.exec, batch, i, above, tell)
                                     : stage.backward(run_.exec, batch, i, above, tell);
      for (const float value : host_values(below)) input_gradients.push_back(value);
      told_of_first_halves.push_back(final_groups.size());
      if (split) stage.backward_weights(run_.exec, batch, i, tell);
    }
  }

 private:
  TensorView rows(std::vector<float>& of, const MicroBatch& batch) const {
    return {of.data(), {batch.size(), hidden_}};
  }

  NaiveAttention attention_;
  TestExec run_;

 public:
  Stage stage;
  std::vector<float> input_gradients;
  std::vector<int> final_groups;
  std::vector<size_t> told_of_first_halves;

 private:
  int64_t hidden_;
  std::vector<float> input_, gradient_;
};

class SplitBackward : public testing::TestWithParam<Recompute> {};
INSTANTIATE_TEST_SUITE_P(Levels, SplitBackward, testing::ValuesIn(kLevels));

TEST_P(SplitBackward, HasTheBitsOfBackwardInOne) {
  for (const ModelConfig::Family family : kFamilies)
    for (const auto& [last_layer, chunk, fp8] :
         {std::tuple{3, 1000, false}, {2, 1000, false}, {3, 7, false}, {3, 1000, true}, {2, 7, true}}) {
      const ModelConfig config = three_layers(family);
      StageOptions options = later_stage(config, GetParam(), last_layer);
      options.layer_chunk = chunk;
      options.fp8 = fp8;
      if (fp8) options.fp8_skip = {1};
      Later one(config, options), two(config, options);
      one.step(false);
      two.step(true);
      EXPECT_EQ(one.input_gradients, two.input_gradients);
      EXPECT_EQ(hf_gradients(one.stage.parameters()), hf_gradients(two.stage.parameters()));
      EXPECT_EQ(one.final_groups, two.final_groups);
    }
}

// The reduction over the ranks must not begin before the second half.
TEST_P(SplitBackward, LayersAreFinalInTheSecondHalf) {
  const ModelConfig config = three_layers(ModelConfig::Family::qwen2);
  Later later(config, later_stage(config, GetParam(), 2));
  later.step(true);
  EXPECT_EQ(later.told_of_first_halves, (std::vector<size_t>{0, 1}));
  EXPECT_EQ(later.final_groups, (std::vector<int>{0, 0}));
}

TEST_P(SplitBackward, TakesWhatWasPlanned) {
  for (const ModelConfig::Family family : kFamilies)
    for (const auto& [intermediate, chunk] : {std::tuple{3, 1000}, {48, 1000}, {200, 7}}) {
      ModelConfig config = three_layers(family);
      config.intermediate_size = intermediate;
      StageOptions options = later_stage(config, GetParam(), 3);
      options.layer_chunk = chunk;
      NaiveAttention attention;
      const MemoryPlan plan = Stage::memory_plan(config, options, attention, 2);
      Later later(config, options);
      later.evaluate();
      later.step(false);
      later.step(true);
      const MemoryPlan used = later.stage.memory_used();
      ASSERT_EQ(plan.items().size(), used.items().size());
      int waiting = 0;
      for (size_t i = 0; i < plan.items().size(); ++i) {
        EXPECT_EQ(plan.items()[i].bytes, used.items()[i].bytes) << plan.items()[i].name;
        waiting += plan.items()[i].name == "waiting gradients" ? 1 : 0;
      }
      EXPECT_EQ(waiting, 1);
    }
}

TEST(SplitBackward, NothingRunsBetweenTheHalves) {
  const ModelConfig config = three_layers(ModelConfig::Family::qwen2);
  NaiveAttention attention;
  TestExec run;
  Stage stage(config, later_stage(config, Recompute::attention, 3), attention, 2);
  randomize(stage.parameters(), 5);
  const MicroBatch batch = random_batch({9}, 13, 1);
  std::vector<float> input = random_values(9 * config.hidden_size, 7);
  const TensorView rows(input.data(), {9, config.hidden_size});
  for (int i = 0; i < 2; ++i) stage.forward(run.exec, batch, i, rows);
  EXPECT_THROW(stage.backward_weights(run.exec, batch, 0), InternalError);
  stage.backward_input(run.exec, batch, 0, {});
  EXPECT_THROW(stage.backward_input(run.exec, batch, 1, {}), InternalError);
  EXPECT_THROW(stage.backward(run.exec, batch, 1, {}), InternalError);
  EXPECT_THROW(stage.forward(run.exec, batch, 0, rows), InternalError);
  stage.backward_weights(run.exec, batch, 0);
  stage.backward(run.exec, batch, 1, {});
}

}  // namespace
}  // namespace sb::test
