// Checkpoints that every rank writes its part of, on ranks that are threads.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <set>

#include "model/hf_checkpoint.h"
#include "model/stage/stage.h"
#include "run/checkpoint/manifest.h"
#include "tests/run/scratch_directory.h"
#include "tests/train/rank_runs.h"
#include "tests/train/tiny_run.h"

namespace sb {
namespace {

namespace fs = std::filesystem;

constexpr int kSteps = 3;

TrainSummary train_saving(const fs::path& directory, const RankGrid& grid, std::vector<std::string> overrides = {}) {
  const std::vector<std::string> ranks = grid.overrides();
  overrides.insert(overrides.begin(), {"model.init.num_hidden_layers=4", "model.init.tie_word_embeddings=false",
                                       "batch.global_batch_size=8", "train.threads=1", "train.validation_sequences=0",
                                       fmt::format("train.max_steps={}", kSteps), "train.save_steps=2"});
  overrides.insert(overrides.end(), ranks.begin(), ranks.end());
  return train_on_ranks(tiny_run(directory, overrides));
}

fs::path checkpoint_of(const fs::path& run) {
  return checkpoint_path(run, kSteps);
}

const RankGrid kEight{2, 2, 1, 0, 2};

// Saved as it was loaded: nothing is trained in between.
void expect_the_same_from(const fs::path& checkpoint, const RankGrid& grid, const std::string& option) {
  SCOPED_TRACE(grid.name());
  ScratchDirectory scratch;
  train_saving(scratch / "run", grid, {option, "train.resume=" + checkpoint.string()});
  EXPECT_TRUE(checkpoint_tensors(checkpoint_of(scratch / "run")) == checkpoint_tensors(checkpoint));
  EXPECT_EQ(read_bytes(checkpoint_of(scratch / "run") / "state.json"), read_bytes(checkpoint / "state.json"));
}

const std::vector<RankGrid> kOthers = {{1, 1},          {2, 1},    {1, 2}, {.tp = 2},       {1, 1, 2}, {4, 1},
                                       {2, 1, 1, 0, 2}, {1, 2, 2}, {8, 1}, {1, 4, 1, 0, 2}, {2, 2, 2}};

TEST(ShardedCheckpoint, OfEightRanksResumesOnOneTwoFourAndEightToTheBit) {
  for (const std::string moments : {"float32", "bfloat16"}) {
    const std::string option = "optimizer.moments=" + moments;
    ScratchDirectory scratch;
    train_saving(scratch / "saved", kEight, {option});
    for (const RankGrid& grid : kOthers) expect_the_same_from(checkpoint_of(scratch / "saved"), grid, option);
  }
}

// As earlier versions wrote all of them.
TEST(ShardedCheckpoint, OfOneFileResumesOnManyRanksToTheBit) {
  ScratchDirectory scratch;
  train_saving(scratch / "saved", {1, 1});
  const fs::path checkpoint = checkpoint_of(scratch / "saved");
  ASSERT_TRUE(fs::exists(checkpoint / "model.safetensors") && fs::exists(checkpoint / "optimizer.safetensors"));
  for (const RankGrid& grid : {RankGrid{2, 1}, RankGrid{.tp = 2}, kEight})
    expect_the_same_from(checkpoint, grid, "optimizer.moments=float32");
}

// Each rank writes some of the weights and some of the moments.
TEST(ShardedCheckpoint, EveryRankWritesItsPart) {
  ScratchDirectory scratch;
  train_saving(scratch / "saved", kEight);
  const fs::path checkpoint = checkpoint_of(scratch / "saved");
  std::set<std::string> files;
  for (const auto& entry : fs::directory_iterator(checkpoint)) files.insert(entry.path().filename().string());
  for (int rank = 1; rank <= 8; ++rank)
    for (const char* stem : {"model", "optimizer"})
      EXPECT_TRUE(files.contains(fmt::format("{}-{:05}-of-00008.safetensors", stem, rank))) << stem << rank;
  EXPECT_TRUE(files.contains("model.safetensors.index.json") && files.contains("optimizer.safetensors.index.json"));
  EXPECT_EQ(compare_with_manifest(checkpoint, /*checksums=*/true), std::nullopt);
  // The exported model is what it was: one stream of tensors, in shards when it is large.
  EXPECT_TRUE(fs::exists(scratch / "saved/final/model.safetensors"));
}

// The index of weights is Hugging Face's: a run may begin with a checkpoint as its model.
TEST(ShardedCheckpoint, IsAHuggingFaceDirectory) {
  ScratchDirectory scratch;
  train_saving(scratch / "saved", kEight);
  const auto weights_in = [](const fs::path& directory) {
    const ModelConfig model = read_model_config(directory / "config.json");
    StageOptions whole;
    whole.last_layer = model.layers;
    ParameterSet parameters = Stage::declare_parameters(model, whole);
    parameters.allocate(/*with_gradients=*/false);
    read_hf_weights(directory, parameters);
    return std::vector<float>(parameters.values().f32(), parameters.values().f32() + parameters.flat_elements());
  };
  EXPECT_EQ(weights_in(checkpoint_of(scratch / "saved")), weights_in(scratch / "saved/final"));
}

}  // namespace
}  // namespace sb
