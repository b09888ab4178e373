// The engine against Hugging Face's own numbers (tests/data/hf).
#include <gtest/gtest.h>

#include <cmath>
#include <optional>

#include "attention/cpu/dense_attention.h"
#include "device/cuda.h"
#include "device/memory.h"
#include "model/hf_checkpoint.h"
#include "ops/adamw.h"
#include "tests/model/host_attention.h"
#include "tests/model/model_fixture.h"

namespace sb::test {
namespace {

struct Case {
  const char* fixture;
  const char* config_file;
  Recompute recompute;
  DeviceKind device = DeviceKind::cpu;
  DType dtype = DType::f32;
};

std::string case_name(const testing::TestParamInfo<Case>& info) {
  const std::string recompute[] = {"none", "attention", "layer"};
  std::string name = std::string(info.param.fixture) + "_" +
                     (info.param.config_file == std::string("config.json") ? "v5" : "v4") + "_" +
                     recompute[static_cast<int>(info.param.recompute)];
  if (info.param.device == DeviceKind::cuda) name += "_cuda_" + std::string(dtype_name(info.param.dtype));
  return name;
}

class HfFixtureTest : public testing::TestWithParam<Case> {
 protected:
  HfFixtureTest()
      : fixture_(GetParam().fixture),
        config_(read_model_config(fixture_.directory / GetParam().config_file)),
        all_(pack(fixture_.sequences, count_targets(fixture_.sequences))) {}

  void SetUp() override {
    const bool cuda = GetParam().device == DeviceKind::cuda;
    if (cuda && !sb::cuda::problem().empty()) GTEST_SKIP() << sb::cuda::problem();
    run_.emplace(2, GetParam().device);
    if (cuda)
      attention_ = std::make_unique<HostAttention>();
    else
      attention_ = std::make_unique<DenseAttention>();
    StageOptions options = whole_model(config_, all_.size(), GetParam().recompute);
    options.device = GetParam().device;
    options.dtype = GetParam().dtype;
    stage_.emplace(config_, options, *attention_, 2);
    read_hf_weights(fixture_.directory, stage_->parameters());
  }

  // fp32: 1e-4. bf16: weights, activations and the logits are rounded to 8 bits of mantissa, three layers deep.
  double tolerance() const { return GetParam().dtype == DType::bf16 ? 2e-2 : 1e-4; }

  void expect_gradients() {
    Tensors expected;
    for (const auto& [name, values] : fixture_.expected) {
      if (name.starts_with("grad.")) expected[name.substr(5)] = values;
    }
    const Tensors got = hf_gradients(stage_->parameters());
    if (GetParam().dtype == DType::f32) {
      EXPECT_LT(largest_relative_difference(got, expected), tolerance());
    } else {
      EXPECT_LT(largest_relative_difference(got, expected, 1e-6, 0.05), 2 * tolerance());
    }
  }

  void step(const MicroBatch& batch) {
    stage_->forward(run_->exec, batch, 0, {});
    stage_->backward(run_->exec, batch, 0, {});
  }

  HfFixture fixture_;
  ModelConfig config_;
  MicroBatch all_;
  std::optional<TestExec> run_;
  std::unique_ptr<Attention> attention_;
  std::optional<Stage> stage_;
};

TEST_P(HfFixtureTest, Logits) {
  EXPECT_LT(relative_difference(all_logits(*stage_, run_->exec, all_), fixture_.expected.at("logits")), tolerance());
}

TEST_P(HfFixtureTest, LossAndTokenLoss) {
  stage_->forward(run_->exec, all_, 0, {});
  const LossSums& loss = stage_->loss(0);
  EXPECT_NEAR(loss.weighted / fixture_.loss, 1, tolerance());
  EXPECT_EQ(loss.targets, count_targets(fixture_.sequences));
  EXPECT_NEAR(loss.nll / static_cast<double>(loss.targets) / fixture_.loss, 1, tolerance());
  EXPECT_LT(relative_difference(host_values(stage_->token_loss(0)), fixture_.expected.at("token_loss")), tolerance());
}

TEST_P(HfFixtureTest, GradientsOfOneMicroBatch) {
  step(all_);
  expect_gradients();
}

TEST_P(HfFixtureTest, GradientsOfSeveralMicroBatchesInAnyOrder) {
  const int64_t targets = count_targets(fixture_.sequences);
  const auto& s = fixture_.sequences;
  step(pack({s[2]}, targets));
  std::vector<std::vector<int32_t>> rest(s.begin() + 3, s.end());
  rest.push_back(s[0]);
  step(pack(rest, targets));
  step(pack({s[1]}, targets));
  expect_gradients();
}

TEST_P(HfFixtureTest, TenAdamWSteps) {
  ParameterSet& parameters = stage_->parameters();
  const Exec& exec = run_->exec;
  const int64_t elements = parameters.flat_elements();
  Arena moments = make_arena("moments", 2 * parameters.flat_bytes(), exec.device);
  AdamWBuffers buffers{parameters.values(),
                       parameters.gradients(),
                       moments.allocate(DType::f32, {elements}),
                       moments.allocate(DType::f32, {elements}),
                       parameters.rounded_weights(),
                       {}};
  zero_tensor(exec, buffers.m);
  zero_tensor(exec, buffers.v);
  std::vector<DecayRange> ranges;
  for (int p = 0; p < parameters.count(); ++p) {
    const Parameter& parameter = parameters.parameter(p);
    ranges.push_back({parameter.offset, parameter.offset + parameter.elements(), parameter.decay});
  }
  for (int64_t i = 0; i < std::ssize(fixture_.losses); ++i) {
    parameters.zero_gradients(exec);
    step(all_);
    const double grad_norm = std::sqrt(squared_norm(exec, parameters.gradients()));
    EXPECT_NEAR(stage_->loss(0).weighted / fixture_.losses[static_cast<size_t>(i)], 1, tolerance()) << "step " << i;
    EXPECT_NEAR(grad_norm / fixture_.grad_norms[static_cast<size_t>(i)], 1, 2 * tolerance()) << "step " << i;
    const AdamWStep update{static_cast<float>(fixture_.learning_rate),
                           static_cast<float>(fixture_.beta1),
                           static_cast<float>(fixture_.beta2),
                           static_cast<float>(fixture_.eps),
                           static_cast<float>(fixture_.weight_decay),
                           i + 1,
                           static_cast<float>(std::min(1.0, fixture_.clip / (grad_norm + 1e-6)))};
    adamw_update(exec, update, ranges, buffers);
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
#ifdef SB_TEST_CUDA
constexpr DeviceKind kCuda = DeviceKind::cuda;
INSTANTIATE_TEST_SUITE_P(OnCuda, HfFixtureTest,
                         testing::Values(Case{"qwen2_tied", "config.json", Recompute::none, kCuda, DType::f32},
                                         Case{"qwen2_tied", "config.json", Recompute::layer, kCuda, DType::f32},
                                         Case{"llama_untied", "config.json", Recompute::attention, kCuda, DType::f32},
                                         Case{"qwen2_tied", "config.json", Recompute::attention, kCuda, DType::bf16},
                                         Case{"llama_untied", "config.json", Recompute::none, kCuda, DType::bf16}),
                         case_name);
#endif

}  // namespace
}  // namespace sb::test
