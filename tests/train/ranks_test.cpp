// Whole runs on ranks that are threads of this process.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "data/files/token_writer.h"
#include "run/checkpoint/selection_file.h"
#include "tests/run/scratch_directory.h"
#include "tests/train/rank_runs.h"
#include "tests/train/tiny_run.h"
#include "train/training_run.h"

namespace sb {
namespace {

namespace fs = std::filesystem;

// Trains the tiny model; the summary of rank 0.
TrainSummary train(
    const fs::path& directory, const RankGrid& grid, std::vector<std::string> overrides,
    const std::function<bool(int rank)>& stop = [](int) { return false; }) {
  const std::vector<std::string> ranks = grid.overrides();
  overrides.insert(overrides.begin(), {"model.init.num_hidden_layers=3", "batch.global_batch_size=6", "train.threads=1",
                                       "train.max_steps=8", "train.save_steps=4"});
  overrides.insert(overrides.end(), ranks.begin(), ranks.end());
  return train_on_ranks(tiny_run(directory, overrides), stop);
}

// Every number of the record that does not depend on the clock or on the layout.
void expect_same_run(const fs::path& got, const fs::path& expected) {
  expect_same_record(got, expected,
                     {{"step", "tokens", "total_tokens", "targets", "longest_sequence", "skipped_steps"},
                      {"loss", "grad_norm", "validation_loss", "validation_recall", "coverage", "density"}});
}

const std::vector<RankGrid> kLayouts = {{2, 1}, {3, 1},    {1, 2},          {1, 3},
                                        {2, 2}, {.tp = 2}, {2, 3, 1, 0, 2}, {1, 1, 2, 0, 2}};

TEST(RanksRun, EveryLayoutLearnsTheSame) {
  ScratchDirectory scratch;
  for (const bool tied : {true, false}) {
    const std::vector<std::string> overrides = {fmt::format("model.init.tie_word_embeddings={}", tied),
                                                "train.validation_steps=4"};
    const fs::path alone = scratch / fmt::format("alone-{}", tied);
    const TrainSummary expected = train(alone, {1, 1}, overrides);
    for (const RankGrid& layout : kLayouts) {
      SCOPED_TRACE(fmt::format("tied {} {}", tied, layout.name()));
      const fs::path run = scratch / fmt::format("{}-{}", tied, layout.name());
      const TrainSummary summary = train(run, layout, overrides);
      EXPECT_EQ(summary.steps, 8);
      EXPECT_EQ(summary.tokens, expected.tokens);
      expect_same_run(run, alone);
      EXPECT_TRUE(fs::exists(run / "final" / "model.safetensors"));
    }
  }
}

RunConfig run_of_files(const fs::path& directory, const std::vector<fs::path>& files, const RankGrid& grid, int chunk) {
  std::string names;
  for (const fs::path& file : files) names += (names.empty() ? "" : ", ") + file.string();
  std::vector<std::string> overrides = grid.overrides();
  overrides.push_back("train.output_dir=" + directory.string());
  if (chunk > 0) overrides.push_back(fmt::format("balance.chunk={}", chunk));
  return parse_run_config(R"(
model:
  init: {model_type: qwen2, vocab_size: 16, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,
         num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16}
attention: {pattern: dense, block: 64}
train: {max_steps: 1, threads: 1, tensorboard: false}
batch: {global_batch_size: )" +
                              fmt::format("{}", 3 * files.size()) + ", micro_batch_sequences: 2}\ndata: {train: [" +
                              names + "]}",
                          "files.yaml", overrides);
}

// A step over everything: each file's loss is the one that a step over that file alone begins with.
TEST(RanksRun, EverySourceOfAMixtureHasItsLoss) {
  ScratchDirectory scratch;
  const std::vector<fs::path> files = {scratch / "first", scratch / "second"};
  std::map<std::string, double> expected;
  for (size_t i = 0; i < files.size(); ++i) {
    TokenWriter writer(files[i].string(), {});
    for (int32_t length : {40, 150, 210})
      writer.add([&] {
        std::vector<int32_t> tokens;
        for (int32_t t = 0; t < length; ++t) tokens.push_back((t * t + static_cast<int32_t>(i) * t) % (9 + 6 * i));
        return tokens;
      }());
    writer.finish();
    const fs::path run = scratch / fmt::format("alone-{}", i);
    train_on_ranks(run_of_files(run, {files[i]}, {}, 0));
    const nlohmann::json line = metrics_of(run).at(0);
    for (const auto& [name, value] : line.items()) EXPECT_FALSE(name.starts_with("loss_source_")) << name;
    expected["loss_source_" + files[i].string()] = line.at("loss");
  }
  ASSERT_GT(std::abs(expected.begin()->second - expected.rbegin()->second), 1e-3);
  for (const auto& [grid, chunk] : {std::pair(RankGrid{}, 0),
                                    {RankGrid{2, 1}, 0},
                                    {RankGrid{1, 2}, 64},
                                    {RankGrid{1, 1, 2}, 0},
                                    {RankGrid{1, 1, 2}, 128},
                                    {RankGrid{.tp = 2}, 0}}) {
    SCOPED_TRACE(fmt::format("{} chunk {}", grid.name(), chunk));
    const fs::path run = scratch / fmt::format("{}-{}", grid.name(), chunk);
    train_on_ranks(run_of_files(run, files, grid, chunk));
    const nlohmann::json line = metrics_of(run).at(0);
    for (const auto& [name, loss] : expected) EXPECT_NEAR(line.at(name).get<double>(), loss, 1e-5) << name;
  }
}

TEST(RanksRun, TwiceTheSameLayoutGivesTheSameBits) {
  ScratchDirectory scratch;
  for (const RankGrid& layout : std::vector<RankGrid>{{2, 2}, {2, 1, 1, 0, 2}}) {
    for (const std::string moments : {"float32", "bfloat16"}) {
      const std::string type = "optimizer.moments=" + moments, name = moments + layout.name();
      const fs::path a = scratch / ("a" + name), b = scratch / ("b" + name);
      train(a, layout, {type});
      // Stopped and resumed besides.
      train(b, layout, {type, "train.max_steps=4"});
      train(b, layout, {type});
      for (const char* file : {"final/model.safetensors", "checkpoint-8/state.json"})
        EXPECT_EQ(read_bytes(a / file), read_bytes(b / file)) << name << file;
      EXPECT_TRUE(checkpoint_tensors(a / "checkpoint-8") == checkpoint_tensors(b / "checkpoint-8")) << name;
    }
  }
}

// Gradients differ in their last bits, and for that a few roundings do: two to three of a hundred moments after eight
// steps. Of values rounded once by other random numbers a third would (the mean of 2 f (1 - f)), of these more.
// With equal gradients none do: tests/parallel/sharded_adamw_test.cpp.
TEST(RanksRun, MomentsInBf16AreRoundedAlikeOnEveryLayout) {
  ScratchDirectory scratch;
  const std::string type = "optimizer.moments=bfloat16";
  train(scratch / "alone", {1, 1}, {type});
  const std::vector<float> expected = moments_of(scratch / "alone/checkpoint-8");
  for (const RankGrid& layout : kLayouts) {
    SCOPED_TRACE(layout.name());
    const fs::path run = scratch / layout.name();
    train(run, layout, {type});
    const std::vector<float> moments = moments_of(run / "checkpoint-8");
    ASSERT_EQ(moments.size(), expected.size());
    size_t others = 0;
    for (size_t i = 0; i < moments.size(); ++i) others += moments[i] != expected[i];
    EXPECT_LT(others, expected.size() / 10);
  }
}

// Saved by one layout, loaded by another and saved again: the same bytes.
void expect_the_same_checkpoint_on_every_layout(const std::string& option) {
  ScratchDirectory scratch;
  train(scratch / "saved", {2, 2, 1, 0, 2}, {option});
  const fs::path checkpoint = scratch / "saved" / "checkpoint-8";
  for (const RankGrid& layout :
       std::vector<RankGrid>{{1, 1}, {3, 1}, {1, 3}, {2, 2}, {2, 3}, {.tp = 2}, {3, 2, 1, 0, 2}}) {
    SCOPED_TRACE(layout.name());
    const fs::path run = scratch / layout.name();
    train(run, layout, {option, "train.resume=" + checkpoint.string()});
    EXPECT_TRUE(checkpoint_tensors(run / "checkpoint-8") == checkpoint_tensors(checkpoint));
    EXPECT_EQ(read_bytes(run / "checkpoint-8/state.json"), read_bytes(checkpoint / "state.json"));
    EXPECT_EQ(read_bytes(run / "final" / "model.safetensors"), read_bytes(scratch / "saved/final/model.safetensors"));
  }
}

TEST(RanksRun, ACheckpointIsTheSameOnEveryLayout) {
  expect_the_same_checkpoint_on_every_layout("optimizer.moments=float32");
}

TEST(RanksRun, ACheckpointOfMomentsInBf16IsTheSameOnEveryLayout) {
  expect_the_same_checkpoint_on_every_layout("optimizer.moments=bfloat16");
}

TEST(RanksRun, ResumedOnOtherLayoutsItGoesOn) {
  ScratchDirectory scratch;
  train(scratch / "undisturbed", {2, 1}, {"train.max_steps=12"});
  const fs::path run = scratch / "run";
  const std::vector<RankGrid> layouts = {{2, 1}, {.tp = 2}, {1, 1}, {1, 3, 1, 0, 2}, {2, 2}, {3, 1}};
  for (size_t i = 0; i < layouts.size(); ++i) {
    // The learning rate is constant after the warm-up, so that the number of steps may grow.
    const TrainSummary summary = train(run, layouts[i], {fmt::format("train.max_steps={}", 2 * (i + 1))});
    EXPECT_EQ(summary.steps, static_cast<int64_t>(2 * (i + 1)));
  }
  const auto losses = [](const fs::path& directory) {
    std::vector<double> result;
    for (const auto& line : metrics_of(directory))
      if (line.contains("loss")) result.push_back(line["loss"]);
    return result;
  };
  const std::vector<double> got = losses(run), expected = losses(scratch / "undisturbed");
  ASSERT_EQ(got.size(), 12u);
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-5 * expected[i]) << i;
}

// A signal that reaches one rank only, and not the first: all of them save the same step.
TEST(RanksRun, OneRankAskedToStopStopsAll) {
  ScratchDirectory scratch;
  std::atomic<int> asked = 0;
  const TrainSummary summary = train(scratch / "run", {2, 2}, {"train.save_steps=0", "train.validation_sequences=0"},
                                     [&](int rank) { return rank == 2 && ++asked > 5; });
  EXPECT_TRUE(summary.interrupted);
  EXPECT_EQ(summary.steps, 5);
  EXPECT_TRUE(fs::exists(scratch / "run" / "checkpoint-5"));
  EXPECT_FALSE(fs::exists(scratch / "run" / "final"));
  train(scratch / "run", {2, 2}, {"train.save_steps=0", "train.validation_sequences=0"});
  train(scratch / "undisturbed", {2, 2}, {"train.save_steps=0", "train.validation_sequences=0"});
  EXPECT_EQ(read_bytes(scratch / "run" / "final" / "model.safetensors"),
            read_bytes(scratch / "undisturbed" / "final" / "model.safetensors"));
}

TEST(RanksRun, OneRanksFailureEndsAll) {
  ScratchDirectory scratch;
  const std::string message = user_error_of([&] {
    train(scratch / "run", {2, 1}, {}, [](int rank) -> bool {
      if (rank == 1) throw UserError("rank 1 has had enough");
      return false;
    });
  });
  EXPECT_EQ(message, "rank 1 has had enough");
}

TEST(RanksRun, AnotherNumberOfRanksIsRefusedBeforeAnythingIsWritten) {
  ScratchDirectory scratch;
  const std::string message = user_error_of([&] {
    const RunConfig config = tiny_run(scratch / "run", {"parallel.dp=2"});
    run_training(config, stdout, false, [] { return false; });
  });
  EXPECT_NE(message.find("need 2 ranks, but 1 were started"), std::string::npos) << message;
  EXPECT_FALSE(fs::exists(scratch / "run"));
}

TEST(RanksRun, WhatRanksCannotShareIsRefusedWithTheReason) {
  struct Refused {
    std::vector<std::string> options;
    const char* part;
  };
  for (const Refused& refused : std::vector<Refused>{
           {{"parallel.tp=3"}, "parallel.tp: 3 ranks cannot divide the 2 attention heads of model.init"},
           {{"parallel.tp=4", "model.init.num_attention_heads=4", "model.init.intermediate_size=50"},
            "the 50 channels"},
           {{"parallel.tp=3", "model.init.num_attention_heads=6", "model.init.num_key_value_heads=2"},
            "one must be a multiple of the other"},
           {{"parallel.tp=2", "attention.pattern=topk"}, "set parallel.tp to 1 or less, or attention.pattern: dense"},
           {{"parallel.tp=2", "attention.pattern=topk", "attention.dump_index=lists"}, "attention.dump_index"},
           {{"parallel.tp=2", "parallel.rehearse={dp: 2, pp: 2}"}, "parallel.tp: 1"}}) {
    const std::string message = user_error_of([&] { run_model_config(tiny_run("unused", refused.options)); });
    EXPECT_NE(message.find(refused.part), std::string::npos) << message;
  }
}

// Sparse attention with a threshold that it learns, on sequences long enough to have something to select from.
TEST(RanksRun, SparseAttentionIsReportedForTheWholeModel) {
  ScratchDirectory scratch;
  const std::vector<std::string> overrides = {
      "attention.pattern=topk",
      "attention.block=64",
      "attention.budget=256",
      "attention.local_blocks=1",
      "model.init.num_key_value_heads=2",
      "train.max_steps=2",
      "train.trace=true",
      "attention.layer_metrics=true",
      "data.synthetic={task: chunk_recall, vocab_size: 16, length: 600, min_length: 300, chunk: 4}"};
  train(scratch / "alone", {1, 1}, overrides);
  train(scratch / "ranks", {2, 2}, overrides);
  expect_same_run(scratch / "ranks", scratch / "alone");
  train(scratch / "heads", {1, 2, 1, 0, 2}, overrides);
  expect_same_run(scratch / "heads", scratch / "alone");
  const auto line = metrics_of(scratch / "ranks")[1];
  EXPECT_LT(line["density"].get<double>(), 0.95);
  for (const char* key : {"density_layer_0", "coverage_layer_2"}) EXPECT_TRUE(line.contains(key)) << line;

  std::map<std::pair<int, std::string>, int> events;
  for (const auto& event : nlohmann::json::parse(read_bytes(scratch / "ranks" / "trace.json")))
    ++events[{event["pid"].get<int>(), event["name"].get<std::string>()}];
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ((events[{rank, "step"}]), 2);
    EXPECT_GE((events[{rank, "forward"}]), 2);
    EXPECT_EQ((events[{rank, "backward"}]), (events[{rank, "forward"}]));
  }
}

// Sequences in pieces, by the configuration alone: in order, balanced, and with the size left to the planner.
TEST(RanksRun, SequencesInPiecesLearnTheSame) {
  ScratchDirectory scratch;
  const std::vector<std::string> data = {
      "attention.pattern=topk",
      "attention.block=64",
      "attention.budget=256",
      "attention.local_blocks=1",
      "train.max_steps=3",
      "train.validation_steps=3",
      "data.synthetic={task: chunk_recall, vocab_size: 16, length: 600, min_length: 60, chunk: 4}"};
  train(scratch / "alone", {1, 1}, data);
  const std::vector<std::vector<std::string>> ways = {
      {"balance.chunk=128"},
      {"balance={batching: sab, ordering: auto, profile: h200-analytic, chunk: 128}"},
      {"balance={batching: sab, ordering: auto, profile: h200-analytic, chunk: auto}"}};
  for (size_t way = 0; way < ways.size(); ++way) {
    for (const RankGrid& layout : std::vector<RankGrid>{{1, 1}, {2, 1}, {1, 3}, {2, 2}}) {
      SCOPED_TRACE(fmt::format("way {} dp {} pp {}", way, layout.dp, layout.pp));
      const fs::path run = scratch / fmt::format("{}-{}-{}", way, layout.dp, layout.pp);
      std::vector<std::string> overrides = data;
      overrides.insert(overrides.end(), ways[way].begin(), ways[way].end());
      train(run, layout, overrides);
      expect_same_run(run, scratch / "alone");
      if (way < 2) {
        EXPECT_GT(metrics_of(run)[1]["micro_batches"].get<int>(), 6);
      }
    }
  }
}

// Layers that are not narrow: with pieces, the second stage runs backward in two halves.
TEST(RanksRun, WideLayersInPiecesLearnTheSame) {
  ScratchDirectory scratch;
  const std::vector<std::string> wide = {
      "model.init.hidden_size=512", "model.init.intermediate_size=64", "train.max_steps=2", "train.trace=true",
      "data.synthetic={task: chunk_recall, vocab_size: 16, length: 200, min_length: 60, chunk: 4}"};
  train(scratch / "alone", {1, 1}, wide);
  for (const std::string chunk : {"none", "128", "auto"}) {
    SCOPED_TRACE(chunk);
    std::vector<std::string> overrides = wide;
    overrides.push_back("balance={batching: sab, ordering: auto, profile: h200-analytic, chunk: " + chunk + "}");
    train(scratch / chunk, {1, 2}, overrides);
    expect_same_run(scratch / chunk, scratch / "alone");
    std::map<std::string, int> operations;
    for (const auto& event : nlohmann::json::parse(read_bytes(scratch / chunk / "trace.json")))
      ++operations[event.value("name", "")];
    EXPECT_EQ(operations["forward"], operations["backward"]);
    // All sequences are shorter than what the planner would cut to by itself.
    if (chunk == "128")
      EXPECT_EQ(2 * operations["weights"], operations["backward"]);
    else
      EXPECT_EQ(operations["weights"], 0);
  }
}

const std::vector<std::string> kBalanced = {"balance={batching: sab, ordering: auto, profile: h200-analytic}",
                                            "batch.global_batch_size=8"};

// The planner deals the sequences out and orders the micro-batches as it likes: the same numbers.
TEST(RanksRun, BalancedStepsLearnTheSame) {
  ScratchDirectory scratch;
  train(scratch / "alone", {1, 1}, {"batch.global_batch_size=8"});
  for (const RankGrid& layout : std::vector<RankGrid>{{2, 1}, {1, 3}, {2, 2}}) {
    SCOPED_TRACE(fmt::format("dp {} pp {}", layout.dp, layout.pp));
    const fs::path run = scratch / fmt::format("{}-{}", layout.dp, layout.pp);
    train(run, layout, kBalanced);
    expect_same_run(run, scratch / "alone");

    // It has heard how long every micro-batch took on every stage.
    std::istringstream in(read_bytes(run / "plan.jsonl"));
    std::string line;
    int measured = 0;
    while (std::getline(in, line)) {
      const auto object = nlohmann::json::parse(line);
      if (!object.contains("measured")) continue;
      ++measured;
      ASSERT_EQ(object["measured"]["ranks"].size(), static_cast<size_t>(layout.dp));
      for (const auto& rank : object["measured"]["ranks"]) {
        ASSERT_FALSE(rank.empty());
        for (const auto& micro_batch : rank) {
          for (const char* key : {"forward_ns", "backward_ns"}) {
            ASSERT_EQ(micro_batch[key].size(), static_cast<size_t>(layout.pp));
            for (const auto& time : micro_batch[key]) EXPECT_GT(time.get<int64_t>(), 0);
          }
        }
      }
    }
    EXPECT_EQ(measured, 8);
  }
}

TEST(RanksRun, BalancedRunsWithoutAdaptationGoOnExactly) {
  ScratchDirectory scratch;
  std::vector<std::string> overrides = kBalanced;
  overrides.push_back("balance.adapt=false");
  train(scratch / "undisturbed", {2, 2}, overrides);
  std::atomic<int> asked = 0;
  overrides.push_back("train.validation_sequences=0");
  const TrainSummary stopped =
      train(scratch / "run", {2, 2}, overrides, [&](int rank) { return rank == 3 && ++asked > 3; });
  EXPECT_EQ(stopped.steps, 3);
  train(scratch / "run", {2, 2}, overrides);
  EXPECT_EQ(read_bytes(scratch / "run" / "final" / "model.safetensors"),
            read_bytes(scratch / "undisturbed" / "final" / "model.safetensors"));
}

const std::vector<std::string> kLearnedMass = {
    "attention.pattern=mass",
    "attention.score=moments",
    "model.init.num_key_value_heads=2",
    "attention.block=64",
    "attention.budget=384",
    "attention.local_blocks=1",
    "attention.dense_below=64",
    "model.init.initializer_range=0.3",
    "train.max_steps=4",
    "train.save_steps=0",
    "train.validation_sequences=0",
    "data.synthetic={task: chunk_recall, vocab_size: 16, length: 1500, min_length: 500, chunk: 4}"};

LearnedSelection learned_by(const fs::path& run, int64_t step) {
  const fs::path checkpoint = run / fmt::format("checkpoint-{}", step);
  FoundSelection found = read_selection_of(checkpoint, read_model_config(checkpoint / "config.json"));
  EXPECT_EQ(found.problem, "");
  return std::move(found.learned);
}

// Counts are whole numbers, so that every layout, packing and order learns the same to the bit, as long as the weights
// are the same: a learning rate that changes none of them.
TEST(RanksRun, MassSelectsTheSameOnEveryLayout) {
  ScratchDirectory scratch;
  std::vector<std::string> overrides = kLearnedMass;
  overrides.push_back("optimizer.learning_rate=1.0e-30");
  train(scratch / "alone", {1, 1}, overrides);
  const LearnedSelection expected = learned_by(scratch / "alone", 4);
  std::set<int> layers;
  for (const auto& [key, threshold] : expected.thresholds) layers.insert(key.layer);
  EXPECT_EQ(layers, (std::set<int>{0, 1, 2}));
  const auto compare = [&](const fs::path& run) {
    EXPECT_EQ(learned_by(run, 4).thresholds, expected.thresholds);
    expect_same_record(run, scratch / "alone", {{"attention_pairs", "density"}, {"loss"}});
  };
  for (const RankGrid& layout : std::vector<RankGrid>{{2, 1}, {1, 2}, {1, 3}, {2, 2}}) {
    SCOPED_TRACE(layout.name());
    train(scratch / layout.name(), layout, overrides);
    compare(scratch / layout.name());
  }
  for (const char* packing : {"batch.micro_batch_sequences=1", "batch.micro_batch_sequences=6"}) {
    SCOPED_TRACE(packing);
    overrides.push_back(packing);
    train(scratch / packing, {1, 1}, overrides);
    compare(scratch / packing);
  }
}

std::vector<std::string> by_planes() {
  std::vector<std::string> overrides = kLearnedMass;
  overrides.insert(overrides.end(), {"attention.score=planes", "attention.score_channels=8"});
  return overrides;
}

// Sums of squares are added up in another order, so that they are the same up to rounding; the planes selected are the
// same ones, and so are the lists.
TEST(RanksRun, PlanesAreLearnedAlikeOnEveryLayout) {
  ScratchDirectory scratch;
  std::vector<std::string> overrides = by_planes();
  overrides.push_back("optimizer.learning_rate=1.0e-30");
  train(scratch / "alone", {1, 1}, overrides);
  const LearnedSelection expected = learned_by(scratch / "alone", 4);
  const AttentionShape shape{2, 2, 16, 0.25f};
  ASSERT_EQ(expected.planes.size(), 3u);
  for (const RankGrid& layout : std::vector<RankGrid>{{2, 1}, {1, 2}, {2, 3}, {1, 1, 2, 0}, {2, 1, 2, 0}, {.tp = 2}}) {
    SCOPED_TRACE(layout.name());
    train(scratch / layout.name(), layout, overrides);
    const LearnedSelection learned = learned_by(scratch / layout.name(), 4);
    ASSERT_EQ(learned.planes.size(), 3u);
    for (size_t layer = 0; layer < 3; ++layer) {
      EXPECT_EQ(learned.planes[layer].tokens, expected.planes[layer].tokens);
      ASSERT_EQ(learned.planes[layer].key_squares.size(), 32u);
      for (size_t i = 0; i < 32; ++i)
        EXPECT_NEAR(learned.planes[layer].key_squares[i], expected.planes[layer].key_squares[i],
                    1e-4 * expected.planes[layer].key_squares[i]);
      EXPECT_EQ(select_planes(shape, learned.planes[layer], 8).channel,
                select_planes(shape, expected.planes[layer], 8).channel);
    }
    EXPECT_TRUE(layout.cp * layout.tp > 1 || learned.thresholds == expected.thresholds);
    expect_same_record(scratch / layout.name(), scratch / "alone", {{}, {"loss", "density"}, 1e-4});
  }
}

TEST(RanksRun, ResumedWhatSelectionLearnedGoesOnToTheBit) {
  ScratchDirectory scratch;
  for (const RankGrid& layout : std::vector<RankGrid>{{1, 1}, {2, 2}, {1, 1, 2, 0}, {.tp = 2}}) {
    SCOPED_TRACE(layout.name());
    std::vector<std::string> overrides = by_planes();
    train(scratch / ("whole" + layout.name()), layout, overrides);
    overrides.push_back("train.max_steps=2");
    train(scratch / ("halves" + layout.name()), layout, overrides);
    overrides.back() = "train.max_steps=4";
    train(scratch / ("halves" + layout.name()), layout, overrides);
    for (const char* file :
         {"final/model.safetensors", "checkpoint-4/selection.safetensors", "final/sparsebalance/selection.safetensors"})
      EXPECT_EQ(read_bytes(scratch / ("halves" + layout.name()) / file),
                read_bytes(scratch / ("whole" + layout.name()) / file))
          << file;
  }
}

// On other ranks the next steps select by the same thresholds and planes, and so the same lists.
TEST(RanksRun, WhatSelectionLearnedServesAnyLayout) {
  ScratchDirectory scratch;
  std::vector<std::string> overrides = by_planes();
  overrides.push_back("train.max_steps=2");
  train(scratch / "start", {1, 1}, overrides);
  overrides.back() = "train.max_steps=3";
  fs::copy(scratch / "start", scratch / "alone", fs::copy_options::recursive);
  train(scratch / "alone", {1, 1}, overrides);
  for (const RankGrid& layout : std::vector<RankGrid>{{2, 1}, {1, 2}, {2, 2}, {1, 1, 2, 0}, {1, 2, 1, 0, 2}}) {
    SCOPED_TRACE(layout.name());
    fs::copy(scratch / "start", scratch / layout.name(), fs::copy_options::recursive);
    train(scratch / layout.name(), layout, overrides);
    expect_same_record(scratch / layout.name(), scratch / "alone", {{}, {"loss", "grad_norm", "density"}, 1e-5});
  }
}

// A checkpoint of an earlier version has none, and a damaged one is no reason not to go on.
TEST(RanksRun, WithoutWhatSelectionLearnedItLearnsAnew) {
  ScratchDirectory scratch;
  std::vector<std::string> overrides = kLearnedMass;
  overrides.push_back("train.max_steps=2");
  train(scratch / "run", {1, 1}, overrides);
  const fs::path checkpoint = scratch / "run" / "checkpoint-2";
  const ModelConfig model = read_model_config(checkpoint / "config.json");
  EXPECT_EQ(read_selection_of(checkpoint, model).problem, "");
  fs::resize_file(checkpoint / "selection.safetensors", 100);
  EXPECT_NE(read_selection_of(checkpoint, model).problem, "");
  fs::remove(checkpoint / "selection.safetensors");
  EXPECT_NE(read_selection_of(checkpoint, model).problem.find("no selection.safetensors"), std::string::npos);
  EXPECT_EQ(read_selection_of(checkpoint, model).learned, LearnedSelection());
}

}  // namespace
}  // namespace sb
