// A model whose sequences several ranks share: the same loss and the same gradients as on one rank.
#include <gtest/gtest.h>

#include <mutex>

#include "attention/dense_attention.h"
#include "comm/thread_communicator.h"
#include "parallel/context_batch.h"
#include "parallel/ring_attention.h"
#include "tests/model/model_fixture.h"

namespace sb::test {
namespace {

struct Outcome {
  double loss = 0;
  int64_t targets = 0;
  Tensors gradients;
};

Outcome run_stage(Attention& attention, const ModelConfig& model, const MicroBatch& batch, int64_t most_tokens,
                  int64_t longest, Recompute recompute) {
  StageOptions options = whole_model(model, most_tokens, recompute);
  options.max_sequence_length = longest;
  Stage stage(model, options, attention, 1);
  stage.initialize(7);
  TestExec run(1);
  stage.parameters().zero_gradients(run.exec);
  stage.forward(run.exec, batch, 0, {});
  const Outcome outcome{stage.loss(0).weighted, stage.loss(0).targets, {}};
  stage.backward(run.exec, batch, 0, {});
  return {outcome.loss, outcome.targets, hf_gradients(stage.parameters())};
}

Outcome run_shared(const ModelConfig& model, const MicroBatch& whole, int64_t longest, int ranks,
                   const RingAttention::Options& options, Recompute recompute) {
  Outcome sum;
  std::mutex mutex;
  run_thread_ranks(ranks, [&](Communicator& world) {
    RingAttention ring(world, options);
    const MicroBatch part = context_part(whole, ring.layout(whole.cu_seqlens), world.rank());
    const Outcome own = run_stage(ring, model, part, whole.size(), longest, recompute);
    const std::lock_guard lock(mutex);
    sum.loss += own.loss;
    sum.targets += own.targets;
    for (const auto& [name, values] : own.gradients) {
      std::vector<float>& target = sum.gradients[name];
      target.resize(values.size());
      for (size_t i = 0; i < values.size(); ++i) target[i] += values[i];
    }
  });
  return sum;
}

TEST(RingModel, SharedSequencesGiveTheSameGradients) {
  for (const auto family : {ModelConfig::Family::qwen2, ModelConfig::Family::qwen3}) {
    const ModelConfig model = tiny_config(family);
    const auto sequences = random_sequences({300, 70, 5, 64, 191}, model.vocab_size, 3);
    const MicroBatch whole = pack(sequences, count_targets(sequences));
    SelectionConfig selection;
    selection.pattern = SelectionPattern::dense;
    selection.block = 64;
    DenseAttention dense;
    for (const Recompute recompute : {Recompute::none, Recompute::attention, Recompute::layer}) {
      const Outcome alone = run_stage(dense, model, whole, whole.size(), 300, recompute);
      for (const int ranks : {2, 3, 4}) {
        const Outcome shared =
            run_shared(model, whole, 300, ranks, {selection, model.layers, ContextPlacement::triangular, 0}, recompute);
        EXPECT_NEAR(shared.loss, alone.loss, 1e-6 * alone.loss);
        EXPECT_EQ(shared.targets, alone.targets);
        EXPECT_LT(largest_relative_difference(shared.gradients, alone.gradients), 1e-5);
      }
    }
  }
}

TEST(RingModel, SparseAttentionToo) {
  const ModelConfig model = tiny_config(ModelConfig::Family::qwen2);
  const auto sequences = random_sequences({700, 130}, model.vocab_size, 4);
  const MicroBatch whole = pack(sequences, count_targets(sequences));
  SelectionConfig selection;
  selection.block = 64;
  selection.budget = 320;
  selection.dense_below = 128;
  SparseAttention sparse({selection, model.layers, 0});
  const Outcome alone = run_stage(sparse, model, whole, whole.size(), 700, Recompute::layer);
  ASSERT_LT(sparse.take_report().total().density(), 0.95);
  for (const int ranks : {2, 4}) {
    const Outcome shared = run_shared(model, whole, 700, ranks,
                                      {selection, model.layers, ContextPlacement::triangular, 2}, Recompute::layer);
    EXPECT_NEAR(shared.loss, alone.loss, 1e-6 * alone.loss);
    EXPECT_LT(largest_relative_difference(shared.gradients, alone.gradients), 1e-4);
  }
}

// Fewer blocks than ranks: some compute nothing but take part.
TEST(RingModel, RanksWithoutTokens) {
  const ModelConfig model = tiny_config(ModelConfig::Family::qwen2);
  const auto sequences = random_sequences({90}, model.vocab_size, 5);
  const MicroBatch whole = pack(sequences, count_targets(sequences));
  SelectionConfig selection;
  selection.pattern = SelectionPattern::dense;
  selection.block = 64;
  DenseAttention dense;
  const Outcome alone = run_stage(dense, model, whole, 90, 90, Recompute::attention);
  const Outcome shared =
      run_shared(model, whole, 90, 4, {selection, model.layers, ContextPlacement::striped, 0}, Recompute::attention);
  EXPECT_NEAR(shared.loss, alone.loss, 1e-6 * alone.loss);
  EXPECT_LT(largest_relative_difference(shared.gradients, alone.gradients), 1e-5);
}

}  // namespace
}  // namespace sb::test
