// Products of e4m3 codes in a stage: how far gradients are from those without, and what must not change them.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <map>
#include <tuple>

#include "device/memory.h"
#include "tests/model/whole_stage.h"

namespace sb::test {
namespace {

ModelConfig wide_config(ModelConfig::Family family) {
  ModelConfig config = tiny_config(family);
  config.hidden_size = 64;
  config.intermediate_size = 96;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_dim = 16;
  config.layers = 3;
  return config;
}

StageOptions fp8_model(const ModelConfig& config, int64_t tokens, Recompute recompute = Recompute::none,
                       std::vector<int> skip = {}) {
  StageOptions options = whole_model(config, tokens, recompute);
  options.fp8 = true;
  options.fp8_skip = std::move(skip);
  return options;
}

// Parameters as a model begins with: those of randomize() make losses that no rounding leaves alone.
struct Fresh : Whole<> {
  Fresh(const ModelConfig& config, const StageOptions& options) : Whole<>(config, options) { stage.initialize(4); }
};

const MicroBatch& batch_of(const ModelConfig& config) {
  static const MicroBatch batch = random_batch({37, 1, 90}, config.vocab_size, 3);
  return batch;
}

class Fp8StageTest : public testing::TestWithParam<ModelConfig::Family> {};
INSTANTIATE_TEST_SUITE_P(Families, Fp8StageTest, testing::ValuesIn(kFamilies));

TEST_P(Fp8StageTest, GradientsAreCloseInEveryLayer) {
  ModelConfig config = wide_config(GetParam());
  config.initializer_range = 0.1f;
  const MicroBatch& batch = batch_of(config);
  Fresh exact(config, whole_model(config, batch.size())), fp8(config, fp8_model(config, batch.size()));
  exact.step(batch);
  fp8.step(batch);
  EXPECT_NEAR(fp8.stage.loss(0).weighted, exact.stage.loss(0).weighted, 1e-2 * exact.stage.loss(0).weighted);
  const Tensors expected = hf_gradients(exact.stage.parameters()), got = hf_gradients(fp8.stage.parameters());
  for (int layer = 0; layer < config.layers; ++layer) {
    double error = 0, whole = 0;
    for (const auto& [name, values] : expected) {
      if (name.find("layers." + std::to_string(layer) + ".") == std::string::npos) continue;
      for (size_t i = 0; i < values.size(); ++i) {
        error += std::pow(got.at(name)[i] - values[i], 2);
        whole += std::pow(values[i], 2);
      }
    }
    // Three bits of mantissa: 2.6 % for an operand, 3.7 % for a product, and a gradient has up to 24 of them behind it,
    // whose errors know nothing of each other: 18 %.
    EXPECT_LT(std::sqrt(error / whole), 0.25) << "layer " << layer;
    EXPECT_GT(std::sqrt(error / whole), 0.02) << "layer " << layer << ": not of codes at all";
  }
}

TEST_P(Fp8StageTest, RecomputeGivesTheSameBitsAndMicroBatchesAddUp) {
  const ModelConfig config = wide_config(GetParam());
  const MicroBatch& batch = batch_of(config);
  Tensors expected;
  for (const Recompute level : kLevels) {
    Fresh model(config, fp8_model(config, batch.size(), level));
    model.step(batch);
    const Tensors once = hf_gradients(model.stage.parameters());
    if (expected.empty()) expected = once;
    EXPECT_EQ(once, expected);
    model.step(batch);
    for (const auto& [name, values] : hf_gradients(model.stage.parameters()))
      for (size_t i = 0; i < values.size(); ++i)
        ASSERT_NEAR(values[i], 2 * once.at(name)[i], 1e-6 + 1e-5 * std::fabs(values[i])) << name;
  }
}

// Another model's values, as a checkpoint brings them.
void load_other_values(ParameterSet& parameters) {
  const HostCopy values = parameters.host_values();
  for (int64_t i = 0; i < parameters.flat_elements(); ++i) values.view().f32()[i] *= 1.0f + 0.01f * (i % 7);
  parameters.store_values(values);
}

struct TwoSteps {
  std::vector<double> losses;
  std::vector<Tensors> gradients;
  bool operator==(const TwoSteps&) const = default;
};

// Two micro-batches and an evaluation, the same after other values were loaded.
TwoSteps two_steps(const ModelConfig& config, const StageOptions& options) {
  const MicroBatch batch = random_batch({37, 1}, config.vocab_size, 3),
                   other = random_batch({20, 17}, config.vocab_size, 8);
  Fresh model(config, options);
  TwoSteps outcome;
  for (int step = 0; step < 2; ++step) {
    model.stage.parameters().begin_gradients(model.run.exec);
    for (const MicroBatch& own : {batch, other}) {
      model.step(own);
      outcome.losses.push_back(model.stage.loss(0).weighted);
    }
    outcome.gradients.push_back(hf_gradients(model.stage.parameters()));
    load_other_values(model.stage.parameters());
    model.stage.evaluate(model.run.exec, batch, 0, {});
    outcome.losses.push_back(model.stage.loss(0).weighted);
  }
  return outcome;
}

TEST_P(Fp8StageTest, KeptCodesGiveTheBitsOfCodesMadeForEveryProduct) {
  const ModelConfig config = wide_config(GetParam());
  for (const Recompute level : kLevels) {
    StageOptions options = fp8_model(config, 38, level, {1});
    options.layer_chunk = 24;
    options.kept_codes = 0;
    const TwoSteps made = two_steps(config, options);
    EXPECT_NE(made.losses[0], made.losses[3]) << "other values, the same loss: nothing is tested here";
    for (const int kept : {1, -1}) {
      options.kept_codes = kept;
      EXPECT_TRUE(two_steps(config, options) == made)
          << "codes of " << kept << " layers, recompute " << static_cast<int>(level);
    }
  }
}

TEST(Fp8Stage, KeptCodesAreThoseOfTheLastChange) {
  const ModelConfig config = wide_config(ModelConfig::Family::qwen2);
  const MicroBatch& batch = batch_of(config);
  StageOptions options = fp8_model(config, batch.size());
  Fresh kept(config, options);
  options.kept_codes = 0;
  Fresh made(config, options);
  const auto loss = [&](Fresh& model) {
    model.stage.evaluate(model.run.exec, batch, 0, {});
    return model.stage.loss(0).weighted;
  };
  const double before = loss(kept);
  EXPECT_EQ(loss(made), before);
  for (Fresh* model : {&kept, &made}) {
    ParameterSet& parameters = model->stage.parameters();
    for (int i = 0; i < parameters.count(); ++i)
      if (parameters.parameter(i).name == "layers.1.down.weight") parameters.value(i).f32()[0] = 3;
  }
  const double after = loss(made);
  EXPECT_NE(after, before);
  EXPECT_EQ(loss(kept), before) << "the codes are made again though nobody said that the weights changed";
  kept.stage.parameters().weights_changed();
  EXPECT_EQ(loss(kept), after);
}

TEST(Fp8Stage, WeightsStayAsTheyAreBetweenForwardAndBackward) {
  const ModelConfig config = wide_config(ModelConfig::Family::qwen2);
  const MicroBatch& batch = batch_of(config);
  Fresh model(config, fp8_model(config, batch.size()));
  model.stage.forward(model.run.exec, batch, 0, {});
  model.stage.parameters().weights_changed();
  EXPECT_THROW(model.stage.backward(model.run.exec, batch, 0, {}), InternalError);
}

std::map<std::string, int64_t> bytes_by_name(const MemoryPlan& plan) {
  std::map<std::string, int64_t> bytes;
  for (const MemoryPlan::Item& item : plan.items()) bytes[item.name] = item.bytes;
  return bytes;
}

TEST_P(Fp8StageTest, KeptCodesTakeTwoBytesAParameterAsPlanned) {
  const ModelConfig config = wide_config(GetParam());
  const MicroBatch& batch = batch_of(config);
  // By hand: qkv, output, gate and up, down, each with its scales in one line of 64 bytes.
  const int64_t layer = 2 * (64 * 128 + 64 * 64 + 64 * 192 + 96 * 64) + 4 * 64;
  for (const auto& [kept, layers, name] : {std::tuple{-1, 2, "fp8 weights"},
                                           {2, 2, "fp8 weights"},
                                           {1, 1, "fp8 weights, 1 of 2 layers"},
                                           {0, 0, "fp8 weights, 0 of 2 layers"}}) {
    StageOptions options = fp8_model(config, batch.size(), kLevels[std::abs(kept)], {1});
    options.layer_chunk = kept == 1 ? 48 : 1000;
    options.kept_codes = kept;
    Fresh model(config, options);
    model.stage.evaluate(model.run.exec, batch, 0, {});
    model.step(batch);  // an arena that is too small throws
    auto planned = bytes_by_name(Stage::memory_plan(config, options, model.attention, 2)),
         used = bytes_by_name(model.stage.memory_used());
    EXPECT_EQ(planned.at(name), layers * layer);
    // Temporaries are planned as if the largest codes met the largest of the others.
    EXPECT_LE(used.at("workspace"), planned.at("workspace"));
    EXPECT_GT(used.at("workspace"), planned.at("workspace") * 0.85);
    used["workspace"] = planned["workspace"];
    EXPECT_EQ(used, planned);
  }
}

TEST(Fp8Stage, AsManyCodesAreKeptAsHaveRoom) {
  const ModelConfig config = wide_config(ModelConfig::Family::qwen2);
  const NaiveAttention attention;
  // Few tokens, so that a weight is the largest thing that has codes.
  StageOptions options = fp8_model(config, 8);
  const auto plan = [&](int kept) {
    options.kept_codes = kept;
    return Stage::memory_plan(config, options, attention, 2);
  };
  const int64_t layer = 2 * (64 * 128 + 64 * 64 + 64 * 192 + 96 * 64) + 4 * 64, none = plan(0).total();
  EXPECT_EQ(plan(1).total(), none + layer);
  EXPECT_EQ(plan(2).total(), none + 2 * layer);
  EXPECT_LT(plan(3).total(), none + 3 * layer) << "nobody makes codes of weights any more";
  EXPECT_EQ(plan(-1).total(), plan(3).total());
  for (const auto& [limit, expected] : {std::pair<int64_t, int>{0, 3},
                                        {plan(3).total(), 3},
                                        {plan(3).total() - 1, 2},
                                        {none + layer, 1},
                                        {none + layer - 1, 0},
                                        {1, 0}})
    EXPECT_EQ(Stage::most_kept_codes(options, limit, plan), expected) << limit;
  EXPECT_EQ(Stage::most_kept_codes(whole_model(config, 8), 0, plan), 0) << "without fp8 there are none";
}

TEST(Fp8Stage, SkippedLayersAreLeftAlone) {
  const ModelConfig config = wide_config(ModelConfig::Family::qwen2);
  const MicroBatch& batch = batch_of(config);
  const auto loss = [&](const StageOptions& options) {
    Fresh model(config, options);
    model.step(batch);
    return model.stage.loss(0).weighted;
  };
  const double exact = loss(whole_model(config, batch.size()));
  EXPECT_EQ(loss(fp8_model(config, batch.size(), Recompute::none, {0, 1, 2})), exact);
  const double ends = loss(fp8_model(config, batch.size(), Recompute::none, {0, 2}));
  EXPECT_NE(ends, exact);
  EXPECT_NE(ends, loss(fp8_model(config, batch.size())));
}

TEST(Fp8Stage, AnOutlyingChannelStaysFinite) {
  const ModelConfig config = wide_config(ModelConfig::Family::qwen2);
  const MicroBatch& batch = batch_of(config);
  Fresh model(config, fp8_model(config, batch.size()));
  ParameterSet& parameters = model.stage.parameters();
  for (int i = 0; i < parameters.count(); ++i)
    if (parameters.parameter(i).name.find("norm") != std::string::npos) parameters.value(i).f32()[5] *= 100;
  model.step(batch);
  EXPECT_TRUE(std::isfinite(model.stage.loss(0).weighted));
  for (const auto& [name, values] : hf_gradients(parameters))
    for (const float value : values) ASSERT_TRUE(std::isfinite(value)) << name;
}

TEST(Fp8Stage, MemoryIsPlannedAndPiecesOfTokensFit) {
  const ModelConfig config = wide_config(ModelConfig::Family::qwen2);
  const MicroBatch& batch = batch_of(config);
  for (const int64_t chunk : {int64_t{48}, int64_t{1000}}) {
    StageOptions options = fp8_model(config, batch.size(), Recompute::attention);
    options.layer_chunk = chunk;
    Fresh model(config, options);
    model.step(batch);  // an arena that is too small throws
    for (const auto& [name, values] : hf_gradients(model.stage.parameters()))
      ASSERT_TRUE(std::isfinite(norm(values))) << name;
  }
}

TEST(Fp8Stage, RefusesWhatItCannotDo) {
  ModelConfig config = wide_config(ModelConfig::Family::qwen2);
  EXPECT_EQ(user_error([&] { check_fp8(config, {}); }), "");
  LoraConfig lora;
  lora.rank = 4;
  EXPECT_SAYS(user_error([&] { check_fp8(config, lora); }), "lora");
  config.intermediate_size = 100;
  EXPECT_SAYS(user_error([&] { check_fp8(config, {}); }), "100");
}

}  // namespace
}  // namespace sb::test
