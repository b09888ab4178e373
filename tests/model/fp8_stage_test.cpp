// Products of e4m3 codes in a stage: how far gradients are from those without, and what must not change them.
#include <gtest/gtest.h>

#include <cmath>

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
