// Sequences that go through a stage piece by piece: loss, gradients and what a piece can see.
#include <gtest/gtest.h>

#include "attention/cpu/dense_attention.h"
#include "attention/cpu/sparse_attention.h"
#include "tests/model/whole_stage.h"

namespace sb::test {
namespace {

constexpr int64_t kPiece = 64;

ModelConfig small_model(ModelConfig::Family family) {
  ModelConfig config = tiny_config(family);
  config.layers = 3;
  config.head_dim = 16;
  config.max_position_embeddings = 1024;
  return config;
}

StageOptions options_for(const ModelConfig& config, Recompute recompute, int slots, int64_t tokens, int64_t longest) {
  StageOptions options = whole_model(config, tokens, recompute);
  options.max_sequence_length = longest;
  options.max_cut_sequence = tokens < longest ? longest : 0;
  options.slots = slots;
  options.loss_chunk = 50;
  return options;
}

struct Outcome {
  LossSums loss;
  Tensors gradients;
  std::vector<float> token_loss;
};

// Groups of micro-batches: forward in order, backward in reverse.
Outcome run(Stage& stage, const Exec& exec, const std::vector<std::vector<MicroBatch>>& groups) {
  Outcome outcome;
  stage.parameters().begin_gradients(exec);
  for (const std::vector<MicroBatch>& group : groups) {
    const auto count = static_cast<int>(group.size());
    for (int i = 0; i < count; ++i) stage.forward(exec, group[static_cast<size_t>(i)], i, {});
    for (int i = 0; i < count; ++i) {
      outcome.loss += stage.loss(i);
      for (const float value : host_values(stage.token_loss(i))) outcome.token_loss.push_back(value);
    }
    for (int i = count - 1; i >= 0; --i) stage.backward(exec, group[static_cast<size_t>(i)], i, {});
  }
  outcome.gradients = hf_gradients(stage.parameters());
  return outcome;
}

std::vector<MicroBatch> pieces_of(const MicroBatch& whole, int64_t piece = kPiece) {
  std::vector<MicroBatch> pieces;
  for (int64_t begin = 0; begin < whole.size(); begin += piece)
    pieces.push_back(cut_piece(whole, begin, std::min(begin + piece, whole.size())));
  return pieces;
}

SparseAttention::Options topk(int layers) {
  SparseAttention::Options options;
  options.layers = layers;
  options.selection.block = 64;
  options.selection.budget = 256;
  options.selection.local_blocks = 1;
  return options;
}

class PieceStage : public testing::TestWithParam<Recompute> {};

TEST_P(PieceStage, PiecesGiveTheGradientsOfTheWhole) {
  for (const ModelConfig::Family family : kFamilies) {
    const ModelConfig config = small_model(family);
    const auto sequences = random_sequences({300, 20, 256, 641}, config.vocab_size, 3);
    const int64_t targets = count_targets(sequences);
    std::vector<std::vector<MicroBatch>> whole, cut;
    for (const auto& sequence : sequences) {
      whole.push_back({pack({sequence}, targets)});
      cut.push_back(sequence.size() > kPiece ? pieces_of(whole.back()[0]) : whole.back());
    }
    TestExec exec;
    DenseAttention dense;
    Stage one(config, options_for(config, Recompute::none, 1, 641, 641), dense, 2);
    Stage many(config, options_for(config, GetParam(), 11, kPiece, 641), dense, 2);
    for (Stage* stage : {&one, &many}) randomize(stage->parameters(), 5);
    const Outcome expected = run(one, exec.exec, whole), got = run(many, exec.exec, cut);
    EXPECT_NEAR(got.loss.weighted, expected.loss.weighted, 1e-6 * expected.loss.weighted);
    EXPECT_EQ(got.loss.targets, expected.loss.targets);
    EXPECT_LT(relative_difference(got.token_loss, expected.token_loss), 1e-5);
    EXPECT_LT(largest_relative_difference(got.gradients, expected.gradients, 1e-6, 1e-3), 1e-5);
  }
}

TEST_P(PieceStage, AllLevelsOfRecomputeHaveTheSameBits) {
  const ModelConfig config = small_model(ModelConfig::Family::qwen3);
  const auto sequences = random_sequences({500}, config.vocab_size, 3);
  const std::vector<std::vector<MicroBatch>> groups = {pieces_of(pack(sequences, count_targets(sequences)), 128)};
  TestExec exec;
  Outcome outcomes[2];
  for (int i = 0; i < 2; ++i) {
    SparseAttention attention(topk(config.layers));
    StageOptions options = options_for(config, i == 0 ? Recompute::none : GetParam(), 4, 128, 500);
    if (i == 1 && GetParam() != Recompute::chunk) options.offload = 1;
    Stage stage(config, options, attention, 2);
    randomize(stage.parameters(), 5);
    outcomes[i] = run(stage, exec.exec, groups);
  }
  EXPECT_EQ(outcomes[0].gradients, outcomes[1].gradients);
  EXPECT_EQ(outcomes[0].token_loss, outcomes[1].token_loss);
}

INSTANTIATE_TEST_SUITE_P(Levels, PieceStage,
                         testing::Values(Recompute::none, Recompute::attention, Recompute::layer, Recompute::chunk));

// The forward of a piece that runs again is not counted again, and takes the memory that was planned.
TEST(PieceStage, ForwardsThatRunAgainLeaveNoTrace) {
  const ModelConfig config = small_model(ModelConfig::Family::qwen2);
  const auto sequences = random_sequences({700}, config.vocab_size, 3);
  const std::vector<std::vector<MicroBatch>> groups = {pieces_of(pack(sequences, count_targets(sequences)), 128)};
  TestExec exec;
  for (const SelectionPattern pattern : {SelectionPattern::topk, SelectionPattern::topp, SelectionPattern::mass}) {
    AttentionReport reports[2];
    SelectionObservations seen[2];
    Outcome outcomes[2];
    MemoryPlan plans[2];
    for (int i = 0; i < 2; ++i) {
      SparseAttention::Options selected = topk(config.layers);
      selected.selection.pattern = pattern;
      selected.coverage_rows = 8;
      SparseAttention attention(selected);
      const StageOptions options = options_for(config, i == 0 ? Recompute::attention : Recompute::chunk, 6, 128, 700);
      Stage stage(config, options, attention, 2);
      randomize(stage.parameters(), 5);
      outcomes[i] = run(stage, exec.exec, groups);
      reports[i] = attention.take_report();
      seen[i] = attention.take_observations();
      plans[i] = Stage::memory_plan(config, options, attention, 2);
      EXPECT_LE(stage.memory_used().total(), plans[i].total());
    }
    EXPECT_EQ(outcomes[0].gradients, outcomes[1].gradients);
    for (size_t layer = 0; layer < reports[0].layers.size(); ++layer) {
      EXPECT_EQ(reports[0].layers[layer].pairs, reports[1].layers[layer].pairs);
      EXPECT_EQ(reports[0].layers[layer].causal_pairs, reports[1].layers[layer].causal_pairs);
      EXPECT_EQ(reports[0].layers[layer].coverage, reports[1].layers[layer].coverage);
    }
    EXPECT_EQ(reports[0].samples.size(), reports[1].samples.size());
    ASSERT_EQ(seen[0].masses.size(), seen[1].masses.size());
    for (const auto& [key, counts] : seen[0].masses) EXPECT_EQ(seen[1].masses.at(key).selected, counts.selected);
    EXPECT_LT(plans[1].total(), plans[0].total());
  }
}

TEST(PieceStage, ATokenOfALaterPieceChangesNothingInEarlierOnes) {
  const ModelConfig config = small_model(ModelConfig::Family::qwen2);
  auto sequences = random_sequences({400}, config.vocab_size, 3);
  const int64_t targets = count_targets(sequences);
  TestExec exec;
  std::vector<Outcome> outcomes;
  for (int i = 0; i < 2; ++i) {
    SparseAttention attention(topk(config.layers));
    Stage stage(config, options_for(config, Recompute::attention, 4, 128, 400), attention, 2);
    randomize(stage.parameters(), 5);
    outcomes.push_back(run(stage, exec.exec, {pieces_of(pack(sequences, targets), 128)}));
    int32_t& token = sequences[0][256];
    token = (token + 1) % static_cast<int32_t>(config.vocab_size);
  }
  // Token 255 has another label.
  EXPECT_TRUE(
      std::equal(outcomes[0].token_loss.begin(), outcomes[0].token_loss.begin() + 255, outcomes[1].token_loss.begin()));
  EXPECT_NE(outcomes[0].token_loss[256], outcomes[1].token_loss[256]);
}

TEST(PieceStage, EvaluatesPieceByPiece) {
  const ModelConfig config = small_model(ModelConfig::Family::llama);
  const auto sequences = random_sequences({330}, config.vocab_size, 3);
  const MicroBatch whole = pack(sequences, count_targets(sequences));
  TestExec exec;
  DenseAttention dense;
  Stage one(config, options_for(config, Recompute::attention, 1, 330, 330), dense, 2);
  Stage many(config, options_for(config, Recompute::attention, 6, kPiece, 330), dense, 2);
  for (Stage* stage : {&one, &many}) randomize(stage->parameters(), 5);
  one.evaluate(exec.exec, whole, 0, {});
  LossSums sums;
  int slot = 0;
  for (const MicroBatch& piece : pieces_of(whole)) {
    many.evaluate(exec.exec, piece, slot, {});
    sums += many.loss(slot++);
  }
  EXPECT_NEAR(sums.nll, one.loss(0).nll, 1e-6 * sums.nll);
}

// The same memory for one whole sequence, then for many pieces, then for a few larger ones.
TEST(PieceStage, MemoryIsDividedAnewForOtherSizes) {
  const ModelConfig config = small_model(ModelConfig::Family::qwen2);
  const auto sequences = random_sequences({641}, config.vocab_size, 3);
  const MicroBatch whole = pack(sequences, count_targets(sequences));
  TestExec exec;
  DenseAttention dense;
  StageOptions options = options_for(config, Recompute::attention, 11, 641, 641);
  options.max_cut_sequence = 641;
  options.kept_tokens = 11 * kPiece;
  Stage stage(config, options, dense, 2);
  randomize(stage.parameters(), 5);
  stage.divide(1, 641);
  const Outcome expected = run(stage, exec.exec, {{whole}});
  for (const int64_t piece : {kPiece, int64_t{320}, int64_t{128}}) {
    const auto slots = static_cast<int>((641 + piece - 1) / piece);
    if (slots * piece > options.kept_tokens) {
      EXPECT_THROW(stage.divide(slots, piece), InternalError);
      continue;
    }
    stage.divide(slots, piece);
    const Outcome got = run(stage, exec.exec, {pieces_of(whole, piece)});
    EXPECT_LT(largest_relative_difference(got.gradients, expected.gradients, 1e-6, 1e-3), 1e-5) << piece;
  }
  const MemoryPlan plan = Stage::memory_plan(config, options, dense, 2);
  EXPECT_LE(stage.memory_used().total(), plan.total());
  StageOptions fixed = options;
  fixed.kept_tokens = 0;
  EXPECT_LT(3 * plan.total(), Stage::memory_plan(config, fixed, dense, 2).total());
}

TEST(PieceStage, PiecesOutOfOrderAreADefect) {
  const ModelConfig config = small_model(ModelConfig::Family::llama);
  const auto sequences = random_sequences({200}, config.vocab_size, 3);
  const std::vector<MicroBatch> pieces = pieces_of(pack(sequences, count_targets(sequences)));
  TestExec exec;
  DenseAttention dense;
  Stage stage(config, options_for(config, Recompute::attention, 4, kPiece, 200), dense, 2);
  stage.initialize(1);
  stage.parameters().begin_gradients(exec.exec);
  EXPECT_THROW(stage.forward(exec.exec, pieces[1], 1, {}), InternalError);
  for (int i = 0; i < 4; ++i) stage.forward(exec.exec, pieces[static_cast<size_t>(i)], i, {});
  EXPECT_THROW(stage.backward(exec.exec, pieces[2], 2, {}), InternalError);
}

TEST(PieceStage, KeysAndSumsArePlanned) {
  const ModelConfig config = small_model(ModelConfig::Family::llama);
  DenseAttention dense;
  const StageOptions options = options_for(config, Recompute::attention, 5, kPiece, 320);
  const MemoryPlan plan = Stage::memory_plan(config, options, dense, 1);
  const auto bytes = [&](const std::string& name) {
    for (const MemoryPlan::Item& item : plan.items())
      if (item.name == name) return item.bytes;
    return int64_t{-1};
  };
  const int64_t key = int64_t{config.kv_heads} * config.head_dim * 4;
  EXPECT_EQ(bytes("keys and values of pieces"), 3 * 2 * 5 * kPiece * key);
  EXPECT_EQ(bytes("packed keys and values of pieces"), 3 * 4 * 5 * kPiece * key);
  EXPECT_EQ(bytes("gradient sums of pieces"), 3 * 2 * 320 * key);
}

}  // namespace
}  // namespace sb::test
