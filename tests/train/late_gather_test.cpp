// Whole runs in which the weights of other ranks are garbage until somebody waits for them, against runs that wait at
// once: the same bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "attention/forwarding_attention.h"
#include "comm/thread_communicator.h"
#include "tests/parallel/late_gathers.h"
#include "tests/run/scratch_directory.h"
#include "tests/train/rank_runs.h"
#include "tests/train/tiny_run.h"
#include "train/training_run.h"

namespace sb {
namespace {

namespace fs = std::filesystem;

using Stop = std::function<bool(int rank)>;

void train(const RunConfig& config, bool at_once, const Stop& stop) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> out(std::fopen("/dev/null", "w"), std::fclose);
  run_thread_ranks(config.parallel.grid().ranks(), [&](Communicator& world) {
    LateGathers late(world, at_once);
    run_training(config, out.get(), false, [&] { return stop(world.rank()); }, {&late, late.size()});
  });
}

// A validation and a checkpoint after every second step: with the gather of that step under way.
RunConfig config_of(const fs::path& directory, const RankGrid& grid, std::vector<std::string> overrides) {
  const std::vector<std::string> ranks = grid.overrides();
  overrides.insert(
      overrides.begin(),
      {"model.init.num_hidden_layers=3", "batch.global_batch_size=6", "train.threads=1", "train.max_steps=5",
       "train.save_steps=2", "train.validation_steps=2", "train.save_total_limit=0", "data.max_sequence_length=256",
       "data.synthetic.length=192", "data.synthetic.min_length=40", "attention.block=64"});
  overrides.insert(overrides.end(), ranks.begin(), ranks.end());
  return tiny_run(directory, overrides);
}

// Without what the planner has measured.
nlohmann::json state_of(const fs::path& checkpoint) {
  nlohmann::json state = nlohmann::json::parse(read_bytes(checkpoint / "state.json"));
  state.erase("planner_state");
  return state;
}

// The records' numbers and the tensors of all checkpoints.
void expect_same_bits(const fs::path& got, const fs::path& expected) {
  expect_same_record(got, expected,
                     {{"step", "tokens", "targets"}, {"loss", "grad_norm", "validation_loss", "density"}, 0.0});
  for (const int64_t step : checkpoint_steps(expected)) {
    const std::string name = fmt::format("checkpoint-{}", step);
    EXPECT_TRUE(checkpoint_tensors(got / name) == checkpoint_tensors(expected / name)) << name;
    EXPECT_EQ(state_of(got / name), state_of(expected / name)) << name;
  }
  for (const char* file : {"final/model.safetensors", "final/adapter_model.safetensors", "merged/model.safetensors"})
    if (fs::exists(expected / file)) {
      EXPECT_TRUE(read_bytes(got / file) == read_bytes(expected / file)) << file;
    }
}

void expect_late_as_at_once(
    const RankGrid& grid, const std::vector<std::string>& overrides, const Stop& stop = [](int) { return false; }) {
  SCOPED_TRACE(grid.name() + (overrides.empty() ? "" : " " + overrides.front()));
  ScratchDirectory scratch;
  train(config_of(scratch / "at-once", grid, overrides), true, stop);
  train(config_of(scratch / "late", grid, overrides), false, stop);
  ASSERT_GE(checkpoint_steps(scratch / "at-once").size(), 1u);
  expect_same_bits(scratch / "late", scratch / "at-once");
}

const std::vector<RankGrid> kGrids = {{2, 1}, {3, 1},          {2, 2},          {1, 1, 2},      {2, 1, 2},
                                      {2, 3}, {2, 1, 1, 0, 2}, {1, 2, 2, 0, 2}, {2, 2, 1, 0, 2}};

TEST(LateGather, ChangesNothingOnAnyLayout) {
  for (const RankGrid& grid : kGrids)
    for (const bool tied : {true, false})
      expect_late_as_at_once(grid, {fmt::format("model.init.tie_word_embeddings={}", tied)});
}

// Layers large enough for a bucket each, and one for the embedding.
TEST(LateGather, ChangesNothingWithManyBuckets) {
  expect_late_as_at_once({2, 1}, {"model.init.hidden_size=512", "model.init.intermediate_size=2800",
                                  "model.init.num_hidden_layers=2", "batch.global_batch_size=2",
                                  "batch.micro_batch_sequences=1", "train.max_steps=3", "train.save_steps=0"});
}

TEST(LateGather, ChangesNothingWithOtherWaysToTrain) {
  for (const std::vector<std::string>& way :
       {std::vector<std::string>{"optimizer.moments=bfloat16"},
        {"train.recompute=chunk", "balance.chunk=64", "attention.pattern=topk", "attention.budget=320"},
        {"balance={batching: sab, ordering: auto, profile: h200-analytic, adapt: false, compare_steps: 2}"},
        {"attention.pattern=mass", "attention.budget=320", "attention.local_blocks=1", "attention.dense_below=64"}})
    expect_late_as_at_once({2, 1}, way);
  expect_late_as_at_once({2, 2}, {"balance.chunk=64"});
}

TEST(LateGather, ChangesNothingWithAdapters) {
  ScratchDirectory scratch;
  train(config_of(scratch / "base", {}, {"train.max_steps=1"}), true, [](int) { return false; });
  for (const RankGrid& grid : {RankGrid{2, 1}, RankGrid{2, 2}, RankGrid{1, 1, 2}, RankGrid{2, 1, 1, 0, 2}})
    expect_late_as_at_once(grid, {"lora={rank: 4, alpha: 8, dropout: 0.1}", "model.init=null",
                                  "model={path: " + (scratch / "base/final").string() + "}"});
}

// Asked at the beginning of a step, while what the step before has updated is on its way: saved is all of it.
TEST(LateGather, AStopSavesWhatIsOnItsWay) {
  for (const RankGrid& grid : {RankGrid{2, 1}, RankGrid{2, 2}}) {
    SCOPED_TRACE(grid.name());
    ScratchDirectory scratch;
    const std::vector<std::string> how = {"train.validation_sequences=0", "train.validation_steps=0",
                                          "train.save_steps=0"};
    const auto after = [](int steps) {
      return [steps, asked = std::make_shared<std::atomic<int>>(0)](int rank) { return rank == 1 && ++*asked > steps; };
    };
    const Stop never = [](int) { return false; };
    train(config_of(scratch / "at-once", grid, how), true, after(3));
    train(config_of(scratch / "late", grid, how), false, after(3));
    EXPECT_EQ(checkpoint_steps(scratch / "late"), (std::vector<int64_t>{3}));
    expect_same_bits(scratch / "late", scratch / "at-once");
    train(config_of(scratch / "late", grid, how), false, never);
    train(config_of(scratch / "whole", grid, how), true, never);
    EXPECT_TRUE(read_bytes(scratch / "late/final/model.safetensors") ==
                read_bytes(scratch / "whole/final/model.safetensors"));
  }
}

// A rank fails while its weights are on their way; the others end, and the run goes on from its checkpoint.
TEST(LateGather, AFailureLeavesWhatIsOnItsWay) {
  ScratchDirectory scratch;
  const RankGrid grid{2, 2};
  const std::vector<std::string> how = {"train.validation_sequences=0", "train.validation_steps=0"};
  const Stop never = [](int) { return false; };
  std::atomic<int> asked = 0;
  const std::string message = user_error_of([&] {
    train(config_of(scratch / "run", grid, how), false, [&](int rank) -> bool {
      if (rank == 1 && ++asked > 4) throw UserError("enough");
      return false;
    });
  });
  EXPECT_EQ(message, "enough");
  EXPECT_GE(checkpoint_steps(scratch / "run").size(), 1u);
  train(config_of(scratch / "run", grid, how), false, never);
  train(config_of(scratch / "whole", grid, how), true, never);
  EXPECT_TRUE(read_bytes(scratch / "run/final/model.safetensors") ==
              read_bytes(scratch / "whole/final/model.safetensors"));
}

// Dense attention that gives no number in the third step's forward.
class NotANumber final : public ForwardingAttention {
 public:
  NotANumber() : ForwardingAttention(dense_) {}
  void forward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
               const AttentionOperands& operands, AttentionState& state, bool replay) override {
    ForwardingAttention::forward(exec, layer, shape, sequences, operands, state, replay);
    if (layer == 0 && calls_++ == 2) operands.out.f32()[0] = NAN;
  }

 private:
  DenseAttention dense_;
  int calls_ = 0;
};

// By steps, of all ranks one after the other: the weights as they are read when the step is over.
std::vector<std::vector<float>> weights_around_a_skipped_step(const fs::path& directory, bool at_once, bool read) {
  const RunConfig config =
      tiny_run(directory, {"parallel.dp=2", "batch.micro_batch_sequences=4", "train.threads=1", "train.max_steps=6"});
  std::vector<std::vector<float>> weights(2);
  run_thread_ranks(2, [&](Communicator& world) {
    LateGathers late(world, at_once);
    NotANumber attention;
    TinyTrainer::Replace replace{&attention};
    replace.world = &late;
    TinyTrainer trainer(config, replace);
    for (int step = 1; step <= 5; ++step) {
      EXPECT_TRUE(trainer->step());
      EXPECT_EQ(trainer->last_step().skipped, step == 3);
      std::vector<float>& own = weights[static_cast<size_t>(world.rank())];
      if (!read && step < 5) continue;
      const std::vector<float> now = weights_of(*trainer);
      own.insert(own.end(), now.begin(), now.end());
    }
  });
  EXPECT_EQ(weights[0], weights[1]);
  return weights;
}

TEST(LateGather, ASkippedStepLeavesWeightsAsTheyAre) {
  ScratchDirectory scratch;
  const auto expected = weights_around_a_skipped_step(scratch / "at-once", true, true);
  const auto late = weights_around_a_skipped_step(scratch / "late", false, true);
  EXPECT_EQ(late, expected);
  const size_t size = late[0].size() / 5;
  const auto of_step = [&](size_t step) { return std::span(late[0]).subspan((step - 1) * size, size); };
  EXPECT_TRUE(std::ranges::equal(of_step(2), of_step(3)));
  EXPECT_FALSE(std::ranges::equal(of_step(3), of_step(4)));
  // Nobody reads them in between.
  const auto unread = weights_around_a_skipped_step(scratch / "unread", false, false);
  EXPECT_TRUE(std::ranges::equal(unread[0], of_step(5)));
}

}  // namespace
}  // namespace sb
