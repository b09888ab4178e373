// What a rank takes for one training step when several share a sequence: planned, and used. One sequence of 16,384
// tokens (or as many as the first argument says) through two layers of hidden size 256, forward and backward on thread
// ranks. Only what depends on the tokens is counted: activations, attention's lists, workspace and scratch, which holds
// the ring's buffers.
#include <fmt/format.h>

#include <cstdlib>
#include <mutex>

#include "attention/cpu/dense_attention.h"
#include "attention/forwarding_attention.h"
#include "comm/thread_communicator.h"
#include "core/random.h"
#include "model/stage/stage.h"
#include "parallel/ring/context_batch.h"
#include "parallel/ring/ring_attention.h"

namespace {

using namespace sb;

ModelConfig small_model() {
  ModelConfig config;
  config.vocab_size = 512;
  config.hidden_size = 256;
  config.intermediate_size = 768;
  config.layers = 2;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_dim = 64;
  config.tie_word_embeddings = true;
  return config;
}

MicroBatch one_sequence(int32_t tokens, int64_t vocabulary) {
  MicroBatch batch;
  Random random(1);
  for (int32_t i = 0; i < tokens; ++i) {
    batch.tokens.push_back(static_cast<int32_t>(random.below(vocabulary)));
    batch.positions.push_back(i);
    batch.labels.push_back(i + 1 < tokens ? 0 : -100);
    batch.weights.push_back(1.0f / static_cast<float>(tokens));
  }
  for (int32_t i = 0; i + 1 < tokens; ++i) batch.labels[i] = batch.tokens[i + 1];
  batch.cu_seqlens = {0, tokens};
  return batch;
}

// Keeps the size of the largest state.
class Watched final : public ForwardingAttention {
 public:
  Watched(Attention& inner, std::function<int64_t(AttentionState&)> bytes)
      : ForwardingAttention(inner), bytes_(std::move(bytes)) {}
  void backward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
                const AttentionOperands& operands, const AttentionGradients& gradients,
                AttentionState& state) override {
    ForwardingAttention::backward(exec, layer, shape, sequences, operands, gradients, state);
    most = std::max(most, bytes_(state));
  }
  int64_t most = 0;

 private:
  std::function<int64_t(AttentionState&)> bytes_;
};

struct Bytes {
  int64_t activations = 0, state = 0, workspace = 0, scratch = 0;
  int64_t total() const { return activations + state + workspace + scratch; }
};

Bytes bytes_of(const MemoryPlan& plan) {
  Bytes bytes;
  for (const MemoryPlan::Item& item : plan.items()) {
    if (item.name == "activations") bytes.activations = item.bytes;
    if (item.name == "attention state") bytes.state = item.bytes;
    if (item.name == "workspace") bytes.workspace = item.bytes;
    if (item.name == "scratch") bytes.scratch = item.bytes;
  }
  return bytes;
}

struct Measured {
  Bytes planned, used;
};

// The rank with the most.
Measured measure(const ModelConfig& model, const MicroBatch& whole, int ranks, const SelectionConfig& selection) {
  Measured most;
  std::mutex mutex;
  run_thread_ranks(ranks, [&](Communicator& world) {
    RingAttention ring(world, {selection, model.layers, ContextPlacement::triangular, 0});
    DenseAttention dense;
    SparseAttention sparse({selection, model.layers, 0});
    const bool shared = ranks > 1, listed = selection.pattern != SelectionPattern::dense;
    Attention& inner = shared ? ring : listed ? static_cast<Attention&>(sparse) : dense;
    Watched attention(inner, [&](AttentionState& state) {
      return shared ? RingAttention::bytes(state) : listed ? SparseAttention::index(state).bytes() : 0;
    });
    const MicroBatch part = shared ? context_part(whole, ring.layout(whole.cu_seqlens), world.rank()) : whole;
    StageOptions options;
    options.last_layer = model.layers;
    options.recompute = Recompute::attention;
    options.max_micro_batch_tokens = ContextLayout::most_tokens(ranks, selection.block, whole.size(), 1);
    options.max_sequence_length = whole.size();
    Stage stage(model, options, attention, 1);
    stage.initialize(1);
    ThreadPool pool(1);
    const Exec exec{DeviceKind::cpu, &pool, nullptr, nullptr};
    stage.parameters().zero_gradients(exec);
    stage.forward(exec, part, 0, {});
    stage.backward(exec, part, 0, {});
    Measured own{bytes_of(Stage::memory_plan(model, options, attention, 1)), bytes_of(stage.memory_used())};
    own.used.state = model.layers * attention.most + ring.call_bytes_used();
    const std::lock_guard lock(mutex);
    if (own.used.total() > most.used.total()) most = own;
  });
  return most;
}

}  // namespace

int main(int argc, char** argv) {
  const ModelConfig model = small_model();
  const MicroBatch whole = one_sequence(argc > 1 ? std::atoi(argv[1]) : 16384, model.vocab_size);
  fmt::print("{} tokens, {} layers of hidden size {}, {}:{} heads of {}; MiB of a rank, planned / used\n", whole.size(),
             model.layers, model.hidden_size, model.heads, model.kv_heads, model.head_dim);
  SelectionConfig dense, topk, vertical_slash;
  dense.pattern = SelectionPattern::dense;
  topk.budget = vertical_slash.budget = 2048;
  vertical_slash.pattern = SelectionPattern::vertical_slash;
  vertical_slash.order = SelectionOrder::lookahead;
  vertical_slash.vertical_cap = 256;
  vertical_slash.slash_cap = 16;
  const auto column = [](int64_t planned, int64_t used) {
    return fmt::format("{:.1f} / {:.1f}", static_cast<double>(planned) / 1048576.0,
                       static_cast<double>(used) / 1048576.0);
  };
  double worst = 0;
  for (const auto& [name, selection] :
       {std::pair("dense", &dense), std::pair("topk", &topk), std::pair("vertical_slash", &vertical_slash)}) {
    fmt::print("\n{:<16} {:>15} {:>15} {:>15} {:>15} {:>15} {:>11}\n", name, "activations", "lists", "workspace",
               "scratch", "together", "cp x used");
    double alone = 0;
    for (const int ranks : {1, 2, 4, 8}) {
      const auto [plan, used] = measure(model, whole, ranks, *selection);
      if (ranks == 1) alone = static_cast<double>(used.total());
      const double share = static_cast<double>(used.total() * ranks) / alone;
      worst = std::max(worst, share);
      fmt::print("{:<16} {:>15} {:>15} {:>15} {:>15} {:>15} {:>10.2f}x\n", fmt::format("cp {}", ranks),
                 column(plan.activations, used.activations), column(plan.state, used.state),
                 column(plan.workspace, used.workspace), column(plan.scratch, used.scratch),
                 column(plan.total(), used.total()), share);
      std::fflush(stdout);
    }
  }
  fmt::print("\nmost used by all ranks together over one rank alone: {:.2f}\n", worst);
}
