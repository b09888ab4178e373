// `device: cuda` from configuration to the trained model, against the same run on the CPU.
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "core/errors.h"
#include "device/cuda.h"
#include "tests/data/temporary_folder.h"
#include "train/training_run.h"

namespace sb {
namespace {

RunConfig config_of(const std::string& output, const std::vector<std::string>& overrides) {
  const std::string yaml = R"(
model:
  init: {model_type: qwen2, vocab_size: 64, hidden_size: 128, intermediate_size: 256, num_hidden_layers: 2,
         num_attention_heads: 4, num_key_value_heads: 2, head_dim: 64, initializer_range: 0.1, tie_word_embeddings: true}
data:
  synthetic: {task: chunk_recall, vocab_size: 64, length: 700, min_length: 60, chunk: 4}
batch: {global_batch_size: 6, micro_batch_sequences: 2}
attention: {pattern: dense, coverage_rows: 0}
optimizer: {learning_rate: 2.0e-3, schedule: constant}
train: {max_steps: 30, save_steps: 10, threads: 2, validation_sequences: 2, tensorboard: false}
)";
  std::vector<std::string> all = {"train.output_dir=" + output};
  all.insert(all.end(), overrides.begin(), overrides.end());
  return parse_run_config(yaml, "run.yaml", all);
}

// The losses by step.
std::map<int64_t, double> train(const RunConfig& config) {
  std::FILE* out = std::fopen("/dev/null", "w");
  run_training(config, out, false, [] { return false; });
  std::fclose(out);
  std::map<int64_t, double> losses;
  std::ifstream in(config.train.output_dir / "metrics.jsonl");
  for (std::string line; std::getline(in, line);) {
    const auto json = nlohmann::json::parse(line);
    if (json.contains("loss")) losses[json["step"].get<int64_t>()] = json["loss"].get<double>();
  }
  return losses;
}

class CudaTraining : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::problem().empty()) GTEST_SKIP() << cuda::problem();
  }
  TemporaryFolder folder_;
};

TEST_F(CudaTraining, FollowsTheCpuAndLearns) {
  const auto cpu = train(config_of(folder_.path("cpu"), {}));
  const auto got = train(config_of(folder_.path("cuda"), {"device=cuda"}));
  ASSERT_EQ(got.size(), 30u);
  ASSERT_EQ(cpu.size(), got.size());
  EXPECT_LT(got.at(30), got.at(1));
  for (const auto& [step, loss] : cpu) EXPECT_NEAR(got.at(step) / loss, 1, 0.03) << "step " << step;
}

TEST_F(CudaTraining, ResumesFromItsCheckpoint) {
  const auto whole = train(config_of(folder_.path("whole"), {"device=cuda"}));
  train(config_of(folder_.path("parts"), {"device=cuda", "train.max_steps=10"}));
  const auto parts = train(config_of(folder_.path("parts"), {"device=cuda"}));
  // Values and moments come back exactly; sums of concurrent blocks are rounded in another order.
  EXPECT_NEAR(parts.at(11) / whole.at(11), 1, 1e-3);
  EXPECT_NEAR(parts.at(30) / whole.at(30), 1, 2e-2);
}

TEST_F(CudaTraining, TrainsWithSparseAttention) {
  const auto losses =
      train(config_of(folder_.path("sparse"), {"device=cuda", "attention.pattern=topk", "attention.block=128",
                                               "attention.budget=384", "attention.dense_below=0"}));
  EXPECT_LT(losses.at(30), losses.at(1));
}

TEST_F(CudaTraining, SeveralRanksAreRefused) {
  EXPECT_THROW(train(config_of(folder_.path("ranks"), {"device=cuda", "parallel.dp=2"})), UserError);
}

}  // namespace
}  // namespace sb
