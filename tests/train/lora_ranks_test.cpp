// Whole runs with adapters on several ranks: the record of one alone.
#include <gtest/gtest.h>

#include "tests/run/scratch_directory.h"
#include "tests/train/rank_runs.h"
#include "tests/train/tiny_run.h"
#include "train/training_run.h"

namespace sb {
namespace {

namespace fs = std::filesystem;

TrainSummary train(const fs::path& base, const fs::path& directory, const RankGrid& grid,
                   std::vector<std::string> overrides = {}) {
  overrides.insert(overrides.begin(),
                   {"model={path: " + base.string() + "}", "model.init=null", "lora={rank: 4, alpha: 8, dropout: 0.1}",
                    "batch.global_batch_size=6", "train.threads=1", "train.max_steps=6", "train.save_steps=3",
                    "train.validation_steps=3", "data.max_sequence_length=512", "data.synthetic.length=448",
                    "data.synthetic.min_length=64", "attention.block=64", "attention.pattern=dense"});
  const std::vector<std::string> ranks = grid.overrides();
  overrides.insert(overrides.end(), ranks.begin(), ranks.end());
  return train_on_ranks(tiny_run(directory, overrides));
}

class LoraRanks : public testing::Test {
 protected:
  LoraRanks() {
    train_on_ranks(tiny_run(scratch / "base", {"model.init.num_hidden_layers=3", "train.max_steps=2", "train.threads=1",
                                               "model.init.tie_word_embeddings=true"}));
    base = scratch / "base/final";
  }
  ScratchDirectory scratch;
  fs::path base;
};

const RecordKeys kClose = {{"step", "tokens", "targets"}, {"loss", "grad_norm", "validation_loss"}, 1e-5};

TEST_F(LoraRanks, LearnWhatOneRankLearns) {
  train(base, scratch / "alone", {});
  for (const RankGrid& grid : {RankGrid{2, 1, 1, 0}, RankGrid{1, 2, 1, 0}, RankGrid{1, 1, 2, 0}, RankGrid{2, 2, 2, 0},
                               RankGrid{2, 1, 1, 0, 2}}) {
    SCOPED_TRACE(grid.name());
    EXPECT_EQ(train(base, scratch / grid.name(), grid).steps, 6);
    expect_same_record(scratch / grid.name(), scratch / "alone", kClose);
  }
}

TEST_F(LoraRanks, MomentsInBf16GoOnExactly) {
  const std::string type = "optimizer.moments=bfloat16";
  const RankGrid grid{2, 1, 1, 0, 2};
  train(base, scratch / "whole", grid, {type});
  train(base, scratch / "halves", grid, {type, "train.max_steps=3"});
  train(base, scratch / "halves", grid, {type});
  EXPECT_TRUE(checkpoint_tensors(scratch / "whole/checkpoint-6") ==
              checkpoint_tensors(scratch / "halves/checkpoint-6"));
}

TEST_F(LoraRanks, PackingRecomputeBalancingAndPiecesChangeNothing) {
  train(base, scratch / "alone", {});
  int number = 0;
  for (const std::vector<std::string>& how : {std::vector<std::string>{"batch.micro_batch_sequences=1"},
                                              {"batch.micro_batch_sequences=3"},
                                              {"train.recompute=none"},
                                              {"train.recompute=layer", "train.layer_chunk=100"},
                                              {"balance.chunk=128"},
                                              {"balance={batching: sab, ordering: auto, profile: h200-analytic, "
                                               "chunk: 128}"}}) {
    SCOPED_TRACE(how.front());
    const fs::path run = scratch / std::to_string(number++);
    train(base, run, {}, how);
    expect_same_record(run, scratch / "alone", kClose);
  }
}

// Trained norms and a trained embedding, whose two copies two stages hold.
TEST_F(LoraRanks, TrainedPartsLearnTheSame) {
  const std::vector<std::string> parts = {"lora.train=[norms, embedding]"};
  train(base, scratch / "alone", {}, parts);
  for (const RankGrid& grid :
       {RankGrid{1, 2, 1, 0}, RankGrid{2, 2, 1, 0}, RankGrid{1, 1, 2, 0}, RankGrid{1, 3, 1, 0, 2}}) {
    SCOPED_TRACE(grid.name());
    const TrainSummary summary = train(base, scratch / grid.name(), grid, parts);
    EXPECT_TRUE(fs::exists(summary.merged / "model.safetensors"));
    expect_same_record(scratch / grid.name(), scratch / "alone", kClose);
  }
}

// A checkpoint of one rank goes on with another number, against the same base.
TEST_F(LoraRanks, ResumeOnOtherRanks) {
  train(base, scratch / "alone", {});
  train(base, scratch / "moved", {.tp = 2}, {"train.max_steps=3"});
  train(base, scratch / "moved", {2, 2, 1, 0});
  expect_same_record(scratch / "moved", scratch / "alone", kClose);
}

}  // namespace
}  // namespace sb
