// `device: cuda` from configuration to the trained model, against the same run on the CPU.
#include <gtest/gtest.h>

#include <map>

#include "core/errors.h"
#include "device/cuda.h"
#include "tests/data/temporary_folder.h"
#include "tests/train/cuda_run.h"
#include "train/training_run.h"

namespace sb {
namespace {

// The losses by step.
std::map<int64_t, double> train(const RunConfig& config) {
  std::FILE* out = std::fopen("/dev/null", "w");
  run_training(config, out, false, [] { return false; });
  std::fclose(out);
  return test::losses_by_step(config);
}

class CudaTraining : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::problem().empty()) GTEST_SKIP() << cuda::problem();
  }
  TemporaryFolder folder_;
  const int64_t last_ = test::run_steps().all, part_ = test::run_steps().part;
  const std::string first_part_ = fmt::format("train.max_steps={}", part_);
};

TEST_F(CudaTraining, FollowsTheCpuAndLearns) {
  const auto cpu = train(test::small_run(folder_.path("cpu"), {}));
  const auto got = train(test::small_run(folder_.path("cuda"), {"device=cuda"}));
  ASSERT_EQ(got.size(), static_cast<size_t>(last_));
  ASSERT_EQ(cpu.size(), got.size());
  EXPECT_LT(got.at(last_), got.at(1));
  for (const auto& [step, loss] : cpu) EXPECT_NEAR(got.at(step) / loss, 1, 0.03) << "step " << step;
}

TEST_F(CudaTraining, ResumesFromItsCheckpoint) {
  const auto whole = train(test::small_run(folder_.path("whole"), {"device=cuda"}));
  train(test::small_run(folder_.path("parts"), {"device=cuda", first_part_}));
  const auto parts = train(test::small_run(folder_.path("parts"), {"device=cuda"}));
  // Values and moments come back exactly; sums of concurrent blocks are rounded in another order.
  EXPECT_NEAR(parts.at(part_ + 1) / whole.at(part_ + 1), 1, 1e-3);
  EXPECT_NEAR(parts.at(last_) / whole.at(last_), 1, 2e-2);
}

TEST_F(CudaTraining, Fp8FollowsBfloat16AndResumesWithTheSameBits) {
  if (cuda::device_info().major != 9) GTEST_SKIP() << "not a Hopper GPU";
  const std::vector<std::string> options = {"device=cuda", "train.precision=fp8", "train.deterministic=true"};
  const auto run = [&](const std::string& name, std::vector<std::string> more) {
    more.insert(more.end(), options.begin(), options.end());
    return train(test::small_run(folder_.path(name), more));
  };
  const auto bf16 = train(test::small_run(folder_.path("bf16"), {"device=cuda", "train.deterministic=true"}));
  const auto whole = run("whole", {});
  for (const auto& [step, loss] : bf16) EXPECT_NEAR(whole.at(step) / loss, 1, 0.05) << "step " << step;
  EXPECT_NE(whole, bf16);
  run("parts", {first_part_});
  EXPECT_EQ(run("parts", {}), whole);
  EXPECT_EQ(run("layer", {"train.recompute=layer"}), whole);
  EXPECT_EQ(run("skipped", {"train.fp8_skip=[first, last]"}), bf16);
}

TEST_F(CudaTraining, TrainsWithSparseAttention) {
  const auto losses =
      train(test::small_run(folder_.path("sparse"),
                            {"device=cuda", "attention.pattern=topk", "attention.block=128",
                             test::sized("attention.budget=384", "attention.budget=256"), "attention.dense_below=0"}));
  EXPECT_LT(losses.at(last_), losses.at(1));
}

TEST_F(CudaTraining, SequencesInPiecesTrainAsWholeOnes) {
  for (const std::vector<std::string>& pattern :
       {std::vector<std::string>{"attention.pattern=dense"},
        {"attention.pattern=topk", "attention.block=128", "attention.budget=256", "attention.dense_below=0"},
        {"attention.pattern=mass", "attention.block=128", "attention.budget=256", "attention.dense_below=0"}}) {
    const auto run = [&](const std::string& name, std::vector<std::string> more) {
      more.insert(more.end(), pattern.begin(), pattern.end());
      more.push_back("device=cuda");
      return test::small_run(folder_.path(pattern.front().substr(18) + name), more);
    };
    const auto whole = train(run("whole", {}));
    const auto pieces = train(run("pieces", {test::in_pieces()}));
    ASSERT_EQ(pieces.size(), whole.size());
    EXPECT_LT(pieces.at(last_), pieces.at(1));
    for (const auto& [step, loss] : whole) EXPECT_NEAR(pieces.at(step) / loss, 1, 0.03) << "step " << step;
    train(run("resumed", {test::in_pieces(), first_part_}));
    EXPECT_NEAR(train(run("resumed", {test::in_pieces()})).at(last_) / pieces.at(last_), 1, 2e-2);
  }
}

// The same kernels on the same numbers, wherever these wait: the same losses, also after a resumed run.
TEST_F(CudaTraining, ValuesAndMomentsInHostMemoryTrainAlike) {
  for (const std::string moments : {"float32", "bfloat16"}) {
    SCOPED_TRACE(moments);
    const auto run = [&](const std::string& name, std::vector<std::string> more) {
      more.insert(more.end(),
                  {"device=cuda", "train.deterministic=true", test::in_pieces(), "optimizer.moments=" + moments});
      return train(test::small_run(folder_.path(moments + name), more));
    };
    const auto device = run("device", {});
    EXPECT_LT(device.at(last_), device.at(1));
    EXPECT_EQ(run("host", {"train.offload_optimizer=true"}), device);
    run("resumed", {"train.offload_optimizer=true", first_part_});
    EXPECT_EQ(run("resumed", {"train.offload_optimizer=true"}).at(last_), device.at(last_));
    EXPECT_EQ(run("chunk", {"train.recompute=chunk"}), device);
  }
}

TEST_F(CudaTraining, SeveralRanksAreRefused) {
  EXPECT_THROW(train(test::small_run(folder_.path("ranks"), {"device=cuda", "parallel.dp=2"})), UserError);
}

}  // namespace
}  // namespace sb
