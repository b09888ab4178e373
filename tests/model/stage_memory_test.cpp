// What a stage plans, and what it takes.
#include <gtest/gtest.h>

#include <cstring>
#include <tuple>

#include "device/memory.h"
#include "tests/model/whole_stage.h"

namespace sb::test {
namespace {

TEST(StageMemoryPlan, AsFewLayerInputsAsNeededGoToHostMemory) {
  ModelConfig config = tiny_config(ModelConfig::Family::qwen2);
  config.layers = 6;
  StageOptions options = whole_model(config, 50, Recompute::layer);
  NaiveAttention attention;
  const auto plan = [&](int offload) {
    StageOptions own = options;
    own.offload = offload;
    // As on a device with memory of its own.
    MemoryPlan apart;
    const MemoryPlan together = Stage::memory_plan(config, own, attention, 2);
    for (const MemoryPlan::Item& item : together.items())
      item.name == "layer inputs, offloaded" ? apart.add_on_host(item.name, item.bytes)
                                             : apart.add(item.name, item.bytes);
    return apart;
  };
  const int64_t input = Arena::rounded(50 * config.hidden_size * 4), all = plan(0).total();
  EXPECT_EQ(plan(3).total(), all - 3 * input);
  EXPECT_EQ(plan(3).host_total(), 3 * input);
  for (const auto& [limit, expected] : {std::pair<int64_t, int>{0, 0},
                                        {all, 0},
                                        {all - 1, 1},
                                        {all - input, 1},
                                        {all - 2 * input + 1, 2},
                                        {all - 4 * input, 4},
                                        {1, 4}})
    EXPECT_EQ(Stage::least_offload(options, limit, plan), expected) << limit;
}

class StageMemory : public testing::TestWithParam<Recompute> {};

TEST_P(StageMemory, WhatIsUsedIsWhatWasPlanned) {
  for (const ModelConfig::Family family : kFamilies) {
    for (const int64_t intermediate : {3, 200}) {  // attention's or the MLP's temporaries are the larger ones
      for (const auto& [first, last, chunk, offload] :
           {std::tuple{0, 5, 1000, 0}, {0, 1, 1000, 0}, {1, 5, 1000, 1}, {0, 5, 7, 3}, {3, 5, 49, 0}}) {
        ModelConfig config = tiny_config(family);
        config.layers = 5;
        config.intermediate_size = intermediate;
        StageOptions options = whole_model(config, 50, GetParam());
        options.layer_chunk = chunk;
        options.offload = offload;
        options.first_layer = first;
        options.last_layer = last;
        options.slots = 2;
        NaiveAttention attention;
        Stage stage(config, options, attention, 2);
        stage.initialize(1);
        TestExec run;
        const MicroBatch batch = random_batch({50}, config.vocab_size, 1);
        std::vector<float> storage(static_cast<size_t>(50 * config.hidden_size), 0.1f);
        const TensorView between(storage.data(), {50, config.hidden_size});
        stage.evaluate(run.exec, batch, 0, between);
        stage.forward(run.exec, batch, 0, between);
        stage.backward(run.exec, batch, 0, between);

        const MemoryPlan plan = Stage::memory_plan(config, options, attention, 2), used = stage.memory_used();
        ASSERT_EQ(plan.items().size(), used.items().size());
        for (size_t i = 0; i < plan.items().size(); ++i) {
          EXPECT_EQ(plan.items()[i].name, used.items()[i].name);
          EXPECT_EQ(plan.items()[i].bytes, used.items()[i].bytes) << plan.items()[i].name << " layers " << first;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Levels, StageMemory, testing::ValuesIn(kLevels));

// One of several ranks that share products, without the others: what it computes is nothing, what it takes is right.
class LoneRank final : public TensorGroup {
 public:
  explicit LoneRank(TensorShare share) : share_(share) {}
  TensorShare share() const override { return share_; }
  CommRequest gather(TensorView all) override { return zero(all); }
  CommRequest reduce_scatter(TensorView all) override { return zero(all); }

 private:
  static CommRequest zero(TensorView all) {
    std::memset(all.raw(), 0, static_cast<size_t>(all.bytes()));
    return {};
  }

  TensorShare share_;
};

TEST_P(StageMemory, OfARankThatSharesProductsIsWhatWasPlanned) {
  for (const ModelConfig::Family family : kFamilies) {
    for (const auto& [first, last, chunk, ranks] :
         {std::tuple{0, 3, 1000, 2}, {0, 1, 1000, 4}, {1, 3, 7, 2}, {0, 3, 8, 4}}) {
      ModelConfig config = tiny_config(family);
      config.layers = 3;
      config.intermediate_size = 40;
      StageOptions options = whole_model(config, 50, GetParam());
      options.layer_chunk = chunk;
      options.first_layer = first;
      options.last_layer = last;
      options.tensor = {ranks, 0};
      LoneRank group(options.tensor);
      NaiveAttention attention;
      Stage stage(config, options, attention, 2, &group);
      stage.initialize(1);
      TestExec run;
      const MicroBatch batch = random_batch({50}, config.vocab_size, 1);
      const int64_t rows = stage.rows(batch);
      EXPECT_LE(rows, 50 / ranks + 1);
      std::vector<float> storage(static_cast<size_t>(rows * config.hidden_size), 0.1f);
      const TensorView between(storage.data(), {rows, config.hidden_size});
      stage.evaluate(run.exec, batch, 0, between);
      stage.forward(run.exec, batch, 0, between);
      stage.backward(run.exec, batch, 0, between);
      const MemoryPlan plan = Stage::memory_plan(config, options, attention, 2), used = stage.memory_used();
      for (size_t i = 0; i < plan.items().size(); ++i)
        EXPECT_EQ(plan.items()[i].bytes, used.items()[i].bytes)
            << plan.items()[i].name << " layers " << first << " ranks " << ranks;
    }
  }
}

// Qwen2.5-3B on two ranks: what a rank takes but for the rope table is half, and the rows that products gather.
TEST(StageMemoryPlan, FallsWithTheRanksThatShareProducts) {
  ModelConfig config;
  config.vocab_size = 151936;
  config.hidden_size = 2048;
  config.intermediate_size = 11008;
  config.layers = 36;
  config.heads = 16;
  config.kv_heads = 2;
  config.head_dim = 128;
  config.max_position_embeddings = 32768;
  config.tie_word_embeddings = config.qkv_bias = true;
  const NaiveAttention attention;
  for (const Recompute level : kLevels) {
    StageOptions options = whole_model(config, 32768, level);
    options.loss_chunk = 1024;
    const auto total = [&](int ranks) {
      options.tensor = {ranks, 0};
      return static_cast<double>(Stage::memory_plan(config, options, attention, 1).total());
    };
    EXPECT_LE(total(2), 0.55 * total(1)) << static_cast<int>(level);
  }
}

TEST(StageMemoryPlan, EvaluationPlansLessThanTraining) {
  const ModelConfig config = tiny_config(ModelConfig::Family::qwen2);
  NaiveAttention attention;
  StageOptions options = whole_model(config, 64);
  int64_t previous = INT64_MAX;
  for (const Recompute level : kLevels) {
    options.recompute = level;
    options.slots = 8;
    const int64_t total = Stage::memory_plan(config, options, attention, 1).total();
    EXPECT_LT(total, previous);
    previous = total;
  }
  options.training = false;
  EXPECT_LT(Stage::memory_plan(config, options, attention, 1).total(), previous);
}

}  // namespace
}  // namespace sb::test
