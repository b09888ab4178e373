// The engine against Hugging Face's own numbers (tests/data/hf).
#include <gtest/gtest.h>

#include <cmath>

#include "attention/dense_attention.h"
#include "model/hf_checkpoint.h"
#include "ops/adamw.h"
#include "tests/model/model_fixture.h"

namespace sb::test {
namespace {

constexpr double kTolerance = 1e-4;

struct Case {
  const char* fixture;
  const char* config_file;
  Recompute recompute;
};

std::string case_name(const testing::TestParamInfo<Case>& info) {
  const std::string recompute[] = {"none", "attention", "layer"};
  return std::string(info.param.fixture) + "_" + (info.param.config_file == std::string("config.json") ? "v5" : "v4") +
         "_" + recompute[static_cast<int>(info.param.recompute)];
}

class HfFixtureTest : public testing::TestWithParam<Case> {
 protected:
  HfFixtureTest()
      : fixture_(GetParam().fixture),
        config_(read_model_config(fixture_.directory / GetParam().config_file)),
        all_(pack(fixture_.sequences, count_targets(fixture_.sequences))),
        stage_(config_, whole_model(config_, all_.size(), GetParam().recompute), attention_, 2) {
    read_hf_weights(fixture_.directory, stage_.parameters());
  }

  Tensors expected_gradients() const {
    Tensors gradients;
    for (const auto& [name, values] : fixture_.expected) {
      if (name.starts_with("grad.")) gradients[name.substr(5)] = values;
    }
    return gradients;
  }

  void step(const MicroBatch& batch) {
    stage_.forward(run_.exec, batch, 0, {});
    stage_.backward(run_.exec, batch, 0, {});
  }

  HfFixture fixture_;
  ModelConfig config_;
  TestExec run_;
  DenseAttention attention_;
  MicroBatch all_;
  Stage stage_;
};

TEST_P(HfFixtureTest, Logits) {
  EXPECT_LT(relative_difference(all_logits(stage_, run_.exec, all_), fixture_.expected.at("logits")), kTolerance);
}

TEST_P(HfFixtureTest, LossAndTokenLoss) {
  stage_.forward(run_.exec, all_, 0, {});
  const LossSums& loss = stage_.loss(0);
  EXPECT_NEAR(loss.weighted / fixture_.loss, 1, kTolerance);
  EXPECT_EQ(loss.targets, count_targets(fixture_.sequences));
  EXPECT_NEAR(loss.nll / static_cast<double>(loss.targets) / fixture_.loss, 1, kTolerance);
  const TensorView token_loss = stage_.token_loss(0);
  const std::vector<float> got(token_loss.f32(), token_loss.f32() + token_loss.elements());
  EXPECT_LT(relative_difference(got, fixture_.expected.at("token_loss")), kTolerance);
}

TEST_P(HfFixtureTest, GradientsOfOneMicroBatch) {
  step(all_);
  EXPECT_LT(largest_relative_difference(hf_gradients(stage_.parameters()), expected_gradients()), kTolerance);
}

TEST_P(HfFixtureTest, GradientsOfSeveralMicroBatchesInAnyOrder) {
  const int64_t targets = count_targets(fixture_.sequences);
  const auto& s = fixture_.sequences;
  step(pack({s[2]}, targets));
  std::vector<std::vector<int32_t>> rest(s.begin() + 3, s.end());
  rest.push_back(s[0]);
  step(pack(rest, targets));
  step(pack({s[1]}, targets));
  EXPECT_LT(largest_relative_difference(hf_gradients(stage_.parameters()), expected_gradients()), kTolerance);
}

TEST_P(HfFixtureTest, TenAdamWSteps) {
  ParameterSet& parameters = stage_.parameters();
  std::vector<float> m(static_cast<size_t>(parameters.flat_elements())), v(m.size());
  for (int64_t i = 0; i < std::ssize(fixture_.losses); ++i) {
    parameters.zero_gradients();
    step(all_);
    const double grad_norm = std::sqrt(squared_norm(run_.exec, parameters.gradients()));
    EXPECT_NEAR(stage_.loss(0).weighted / fixture_.losses[static_cast<size_t>(i)], 1, kTolerance) << "step " << i;
    EXPECT_NEAR(grad_norm / fixture_.grad_norms[static_cast<size_t>(i)], 1, kTolerance) << "step " << i;
    const double scale = std::min(1.0, fixture_.clip / (grad_norm + 1e-6));
    for (int p = 0; p < parameters.count(); ++p) {
      const Parameter& parameter = parameters.parameter(p);
      const AdamWStep update{static_cast<float>(fixture_.learning_rate),
                             static_cast<float>(fixture_.beta1),
                             static_cast<float>(fixture_.beta2),
                             static_cast<float>(fixture_.eps),
                             parameter.decay ? static_cast<float>(fixture_.weight_decay) : 0.0f,
                             i + 1,
                             static_cast<float>(scale)};
      const Shape flat{parameter.elements()};
      adamw_update(run_.exec, update, parameters.value(p).reshaped(flat), parameters.gradient(p).reshaped(flat),
                   {m.data() + parameter.offset, flat}, {v.data() + parameter.offset, flat});
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, HfFixtureTest,
                         testing::Values(Case{"qwen2_tied", "config.json", Recompute::none},
                                         Case{"qwen2_tied", "config.v4.json", Recompute::none},
                                         Case{"qwen2_tied", "config.json", Recompute::attention},
                                         Case{"qwen2_tied", "config.json", Recompute::layer},
                                         Case{"llama_untied", "config.json", Recompute::none},
                                         Case{"llama_untied", "config.v4.json", Recompute::none},
                                         Case{"llama_untied", "config.json", Recompute::attention},
                                         Case{"llama_untied", "config.json", Recompute::layer}),
                         case_name);

}  // namespace
}  // namespace sb::test
