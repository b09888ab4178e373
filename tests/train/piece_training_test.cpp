// Training with sequences in pieces, from the plan to the record: what whole sequences give.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "attention/cpu/sparse_attention.h"
#include "attention/forwarding_attention.h"
#include "tests/run/scratch_directory.h"
#include "tests/train/tiny_run.h"
#include "train/make_planner.h"
#include "train/training_run.h"

namespace sb {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kChunk = 128;

// Every longer sequence in pieces of kChunk tokens, the others by themselves; 0: all whole. Keeps what it is told.
class CuttingPlanner final : public StepPlanner {
 public:
  CuttingPlanner(int layers, int64_t chunk, int ahead = 1) : layers_(layers), chunk_(chunk), ahead_(ahead) {}

  void announce(int64_t step, std::vector<Sequence> sequences) override {
    plan_ = {};
    plan_.step = step;
    plan_.layers = layers_;
    PlannedRank& rank = plan_.ranks.emplace_back();
    rank.ahead = ahead_;
    for (const Sequence& sequence : sequences) {
      const int64_t piece = chunk_ > 0 && sequence.tokens > chunk_ ? chunk_ : sequence.tokens;
      for (int64_t begin = 0; begin < sequence.tokens; begin += piece) {
        PlannedMicroBatch& next = rank.micro_batches.emplace_back();
        next.sequences = {sequence.id};
        next.tokens = std::min(piece, sequence.tokens - begin);
        if (piece == sequence.tokens) continue;
        next.begin = begin;
        next.end = begin + next.tokens;
      }
    }
  }
  Plan next() override { return plan_; }
  void learn(const StepMeasurement& measurement) override { measured = measurement; }

  StepMeasurement measured;

 private:
  int layers_;
  int64_t chunk_;
  int ahead_;
  Plan plan_;
};

// `chunk`: as in balance.chunk; 0: off.
RunConfig long_run(const fs::path& directory, int64_t chunk, std::vector<std::string> overrides = {}) {
  if (chunk > 0) overrides.push_back(fmt::format("balance.chunk={}", chunk));
  overrides.insert(overrides.begin(),
                   {"attention.pattern=topk", "attention.block=64", "attention.budget=256", "attention.local_blocks=1",
                    "data.synthetic={task: chunk_recall, vocab_size: 16, length: 600, min_length: 60, chunk: 4}",
                    "train.max_steps=4", "train.save_steps=2", "train.validation_steps=2"});
  return tiny_run(directory, overrides);
}

SparseAttention::Options attention_of(const RunConfig& config) {
  const ModelConfig model = run_model_config(config);
  SelectionConfig selection = config.attention.selection;
  settle_score_channels(selection, model.head_dim);
  return {selection, model.layers, 16};
}

struct Trained {
  std::vector<float> weights;
  StepMeasurement measured;
};

Trained train_pieces(const RunConfig& config, int ahead = 1) {
  const int64_t chunk = config.balance.chunk;
  SparseAttention attention(attention_of(config));
  CuttingPlanner planner(2, chunk, ahead);
  TinyTrainer::Replace replace;
  replace.attention = &attention;
  replace.sparse = &attention;
  replace.planner = &planner;
  TinyTrainer trainer(config, replace);
  Trained run;
  trainer->run();
  run.weights = weights_of(*trainer);
  run.measured = planner.measured;
  return run;
}

std::vector<nlohmann::json> lines_of(const fs::path& run) {
  std::istringstream in(read_bytes(run / "metrics.jsonl"));
  std::vector<nlohmann::json> lines;
  for (std::string line; std::getline(in, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

TEST(PieceTraining, TheRecordIsThatOfWholeSequences) {
  ScratchDirectory scratch;
  for (const char* pattern : {"topk", "topp", "window", "mass"}) {
    SCOPED_TRACE(pattern);
    const std::string override = std::string("attention.pattern=") + pattern;
    const fs::path whole = scratch / (std::string(pattern) + "-whole"), cut = scratch / (std::string(pattern) + "-cut");
    train_pieces(long_run(whole, 0, {override}));
    const Trained run = train_pieces(long_run(cut, kChunk, {override}), 5);
    const auto a = lines_of(cut), b = lines_of(whole);
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) {
      for (const char* key : {"tokens", "targets", "longest_sequence", "attention_pairs"})
        EXPECT_EQ(a[i].value(key, 0), b[i].value(key, 0)) << key << " of line " << i;
      for (const char* key : {"loss", "grad_norm", "validation_loss", "validation_recall", "coverage", "density"})
        EXPECT_NEAR(a[i].value(key, 0.0), b[i].value(key, 0.0), 1e-5 * std::max(1.0, b[i].value(key, 0.0)))
            << key << " of line " << i;
    }
    // How long every piece took.
    size_t pieces = 0;
    ASSERT_EQ(run.measured.ranks.size(), 1u);
    for (const MicroBatchTimes& times : run.measured.ranks[0]) {
      EXPECT_GT(times.forward.at(0), 0);
      EXPECT_GT(times.backward.at(0), 0);
      ++pieces;
    }
    EXPECT_GT(pieces, 4u);
    EXPECT_EQ(pieces, a.back().contains("micro_batches") ? a.back()["micro_batches"].get<size_t>()
                                                         : a[a.size() - 2]["micro_batches"].get<size_t>());
  }
}

// Keys and values alone are kept of pieces, and their forwards run again.
TEST(PieceTraining, RecomputeByChunkHasTheBitsOfTheOthers) {
  ScratchDirectory scratch;
  for (const char* pattern : {"topk", "mass"}) {
    const std::string override = std::string("attention.pattern=") + pattern;
    const auto run = [&](const std::string& level) {
      return train_pieces(long_run(scratch / (pattern + level), kChunk, {override, "train.recompute=" + level}));
    };
    EXPECT_EQ(run("chunk").weights, run("attention").weights) << pattern;
    EXPECT_EQ(lines_of(scratch / (std::string(pattern) + "chunk")).back()["validation_loss"],
              lines_of(scratch / (std::string(pattern) + "attention")).back()["validation_loss"]);
  }
}

TEST(PieceTraining, AResumedRunHasTheBitsOfAnUndisturbedOne) {
  ScratchDirectory scratch;
  const Trained undisturbed = train_pieces(long_run(scratch / "undisturbed", kChunk), 5);
  train_pieces(long_run(scratch / "run", kChunk, {"train.max_steps=2"}), 5);
  EXPECT_EQ(train_pieces(long_run(scratch / "run", kChunk), 5).weights, undisturbed.weights);
}

TEST(PieceTraining, WhatCannotRunInPiecesIsRefusedBeforeAnythingRuns) {
  ScratchDirectory scratch;
  const RunConfig config = long_run(scratch / "run", kChunk);
  SparseAttention attention(attention_of(config));
  struct WholeOnly : ForwardingAttention {
    using ForwardingAttention::ForwardingAttention;
    std::string refuses_pieces() const override { return "it reads whole sequences"; }
  } whole_only(attention);
  TinyTrainer::Replace replace;
  replace.attention = &whole_only;
  replace.sparse = &attention;
  const std::string message = user_error_of([&] { TinyTrainer(config, replace)->run(); });
  EXPECT_EQ(message, "balance.chunk: it reads whole sequences; set balance.chunk: none");
  EXPECT_FALSE(fs::exists(scratch / "run" / "metrics.jsonl"));
}

// Where memory is divided once (GPUs with several stages), one size serves the whole run. Nothing here needs the GPU.
TEST(PieceTraining, AnAutomaticSizeIsSettledForStagesOnGpus) {
  ScratchDirectory scratch;
  const auto settled = [&](std::vector<std::string> overrides, std::vector<size_t> lengths, int64_t validated = 0) {
    overrides.insert(
        overrides.begin(),
        {"device=cuda", "parallel.pp=4", "model.init.hidden_size=2048", "model.init.intermediate_size=11008",
         "model.init.num_hidden_layers=36", "model.init.num_attention_heads=16", "model.init.num_key_value_heads=2",
         "model.init.head_dim=128", "model.init.max_position_embeddings=65536", "batch.micro_batch_sequences=1",
         "balance={batching: sab, ordering: auto, profile: h200-analytic, chunk: auto}"});
    RunConfig config = tiny_run(scratch / "run", overrides);
    std::vector<TokenSequence> sequences;
    for (const auto length : lengths)
      sequences.push_back({0, std::vector<int32_t>(length), std::vector<int32_t>(length)});
    const ListSource source(sequences);
    settle_chunk(config, run_model_config(config), source, std::max(source.max_length(), validated), nullptr);
    return config.balance.chunk;
  };
  const int64_t size = settled({"batch.global_batch_size=2"}, {65536, 16384});
  EXPECT_GE(size, 2048);
  EXPECT_LT(size, 65536);
  EXPECT_EQ(settled({"batch.global_batch_size=64"}, {1024}), 0);  // nothing to cut
  // A long sequence of the validation does not fit a micro-batch whole, whatever is trained on.
  const std::vector<std::string> capped{"batch.global_batch_size=64", "batch.micro_batch_sequences=0",
                                        "batch.micro_batch_tokens=4096"};
  EXPECT_EQ(settled(capped, {1024}), 0);
  const int64_t capped_size = settled(capped, {1024}, 65536);
  EXPECT_TRUE(capped_size == 2048 || capped_size == 4096) << capped_size;
  EXPECT_EQ(settled({"parallel.cp=2"}, {4096}), BalanceOptions::kAutomaticChunk);  // refused with the layout
}

// A plan made for larger pieces.
TEST(PieceTraining, PiecesLargerThanPlannedForAreRefused) {
  ScratchDirectory scratch;
  const RunConfig config = long_run(scratch / "run", kChunk, {"train.validation_sequences=1"});
  SparseAttention attention(attention_of(config));
  CuttingPlanner planner(2, 192);
  TinyTrainer::Replace replace;
  replace.attention = &attention;
  replace.sparse = &attention;
  replace.planner = &planner;
  TinyTrainer trainer(config, replace);
  const std::string message = user_error_of([&] { trainer->run(); });
  EXPECT_NE(message.find("pieces of 192 tokens, for which no memory is planned"), std::string::npos) << message;
}

}  // namespace
}  // namespace sb
