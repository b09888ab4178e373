// A model whose sequences several ranks share: the same loss and the same gradients as on one rank.
#include <gtest/gtest.h>

#include <mutex>

#include "attention/cpu/dense_attention.h"
#include "attention/forwarding_attention.h"
#include "comm/thread_communicator.h"
#include "parallel/ring/context_batch.h"
#include "parallel/ring/ring_attention.h"
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

// What depends on the tokens of a rank, of a plan.
int64_t bytes_of_tokens(const MemoryPlan& plan) {
  int64_t sum = 0;
  for (const MemoryPlan::Item& item : plan.items())
    for (const char* name : {"activations", "attention state", "workspace", "scratch"})
      if (item.name == name) sum += item.bytes;
  return sum;
}

SelectionConfig memory_selection(SelectionPattern pattern, int block) {
  SelectionConfig selection;
  selection.pattern = pattern;
  if (pattern == SelectionPattern::vertical_slash) selection.order = SelectionOrder::lookahead;
  selection.block = block;
  selection.budget = 4 * block;
  selection.vertical_cap = 40;
  selection.slash_cap = 4;
  return selection;
}

class WatchedRing final : public ForwardingAttention {
 public:
  explicit WatchedRing(RingAttention& ring) : ForwardingAttention(ring), ring_(ring) {}
  void backward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
                const AttentionOperands& operands, const AttentionGradients& gradients,
                AttentionState& state) override {
    ForwardingAttention::backward(exec, layer, shape, sequences, operands, gradients, state);
    states = std::max(states, RingAttention::bytes(state));
    calls = std::max(calls, ring_.call_bytes_used());
  }
  int64_t states = 0, calls = 0;

 private:
  RingAttention& ring_;
};

TEST(RingModel, TakesTheMemoryThatWasPlanned) {
  const ModelConfig model = tiny_config(ModelConfig::Family::qwen2);
  const auto sequences = random_sequences({2048}, model.vocab_size, 6);
  const MicroBatch whole = pack(sequences, count_targets(sequences));
  for (const SelectionPattern pattern :
       {SelectionPattern::dense, SelectionPattern::topk, SelectionPattern::vertical_slash})
    for (const int ranks : {1, 2, 4, 8})
      run_thread_ranks(ranks, [&](Communicator& world) {
        RingAttention ring(world, {memory_selection(pattern, 64), model.layers, ContextPlacement::triangular, 0});
        WatchedRing watched(ring);
        const ContextLayout layout = ring.layout(whole.cu_seqlens);
        int64_t most = 0;
        for (int r = 0; r < ranks; ++r) most = std::max<int64_t>(most, layout.local_cu_seqlens(r).back());
        StageOptions options = whole_model(model, most, Recompute::attention);
        options.max_sequence_length = 2048;
        Stage stage(model, options, watched, 1);
        stage.initialize(7);
        TestExec run(1);
        const MicroBatch part = context_part(whole, layout, world.rank());
        stage.forward(run.exec, part, 0, {});
        stage.backward(run.exec, part, 0, {});
        const MemoryPlan plan = Stage::memory_plan(model, options, watched, 1), used = stage.memory_used();
        for (size_t i = 0; i < plan.items().size(); ++i) {
          EXPECT_LE(used.items()[i].bytes, plan.items()[i].bytes) << plan.items()[i].name;
          // The plan has the most there may be, of copies and of key tiles.
          EXPECT_GE(used.items()[i].bytes, 0.9 * static_cast<double>(plan.items()[i].bytes)) << plan.items()[i].name;
        }
        const AttentionShape shape{model.heads, model.kv_heads, model.head_dim, 1.0f};
        EXPECT_LE(watched.states, ring.state_bytes(shape, most)) << ranks << " ranks";
        EXPECT_LE(watched.calls, ring.call_bytes(shape, most, 1)) << ranks << " ranks";
        EXPECT_GT(watched.calls, 0);
      });
}

// 512K tokens of a model of common size: what a rank takes is what one alone would take for so many tokens, and little
// more.
TEST(RingModel, PlansMemoryThatFallsWithTheRanks) {
  ModelConfig model = tiny_config(ModelConfig::Family::qwen2);
  model.hidden_size = 896;
  model.intermediate_size = 4864;
  model.heads = 14;
  model.kv_heads = 2;
  model.head_dim = 64;
  model.layers = 24;
  constexpr int64_t kTokens = 512 * 1024;
  for (const SelectionPattern pattern : {SelectionPattern::dense, SelectionPattern::topk, SelectionPattern::mass,
                                         SelectionPattern::vertical_slash, SelectionPattern::window})
    for (const Recompute recompute : {Recompute::none, Recompute::attention, Recompute::layer}) {
      SelectionConfig selection;
      selection.pattern = pattern;
      if (pattern == SelectionPattern::vertical_slash) selection.order = SelectionOrder::lookahead;
      StageOptions options = whole_model(model, kTokens, recompute);
      options.max_sequence_length = kTokens;
      DenseAttention dense;
      SparseAttention sparse({selection, model.layers, 0});
      Attention& alone = pattern == SelectionPattern::dense ? static_cast<Attention&>(dense) : sparse;
      for (const int ranks : {2, 4, 8, 32})
        for (const int node_size : {0, ranks / 2})
          run_thread_ranks(ranks, [&](Communicator& world) {
            if (world.rank() != 0) return;
            const RingAttention ring(world, {selection, model.layers, ContextPlacement::triangular, node_size});
            StageOptions shared = options;
            shared.max_micro_batch_tokens = ContextLayout::most_tokens(ranks, selection.block, kTokens, 1);
            const int64_t each = bytes_of_tokens(Stage::memory_plan(model, shared, ring, 1));
            const int64_t share = bytes_of_tokens(Stage::memory_plan(model, shared, alone, 1));
            EXPECT_LT(static_cast<double>(each), 1.2 * static_cast<double>(share))
                << "pattern " << static_cast<int>(pattern) << ", " << ranks << " ranks, nodes of " << node_size;
          });
    }
}

}  // namespace
}  // namespace sb::test
