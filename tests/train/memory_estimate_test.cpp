// What `simulate` says of a rank's memory, beside the memory plan of the trainer.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>

#include "attention/cpu/dense_attention.h"
#include "attention/forwarding_attention.h"
#include "attention/gpu/attention_memory.h"
#include "comm/thread_communicator.h"
#include "model/stage/stage_memory.h"
#include "parallel/ring/context_layout.h"
#include "parallel/ring/gpu/cuda_ring_memory.h"
#include "plan/latency/adapter_profile.h"
#include "plan/simulate/layout_sweep.h"
#include "train/rank_model.h"

namespace sb {
namespace {

constexpr int kMultiprocessors = 132;

// As large as dense attention on a GPU, or on the GPUs of a ring; nothing runs.
class SizesOnGpu final : public ForwardingAttention {
 public:
  SizesOnGpu(Attention& inner, const RingTravel* ring) : ForwardingAttention(inner), ring_(ring) {}
  int64_t scratch_bytes(const AttentionShape& shape, int64_t max_tokens, int threads) const override {
    if (ring_ == nullptr) {
      SparseAttention::Options options;
      options.selection.pattern = SelectionPattern::dense;
      return gpu::AttentionMemory{options, kMultiprocessors, 0}.scratch_bytes(shape, max_tokens);
    }
    RingAttention::Options options;
    options.selection.pattern = SelectionPattern::dense;
    options.dtype = DType::bf16;
    const int ranks = ring_->shape().ranks;
    return CudaRingMemory{options, ranks, kMultiprocessors, *ring_, nullptr, true}.scratch_bytes(shape, max_tokens,
                                                                                                 threads);
  }
  int64_t state_bytes(const AttentionShape&, int64_t) const override { return 0; }
  int64_t reserved_bytes(const AttentionShape&, int64_t, DType, int64_t) const override { return 0; }
  int64_t call_bytes(const AttentionShape&, int64_t, int) const override { return 0; }

 private:
  const RingTravel* ring_;
};

ModelConfig config_of(const ModelShape& shape) {
  ModelConfig config;
  config.layers = static_cast<int>(shape.layers);
  config.hidden_size = static_cast<int>(shape.hidden);
  config.heads = static_cast<int>(shape.heads);
  config.kv_heads = static_cast<int>(shape.kv_heads);
  config.head_dim = static_cast<int>(shape.head_dim);
  config.intermediate_size = static_cast<int>(shape.intermediate);
  config.vocab_size = static_cast<int>(shape.vocabulary);
  config.tie_word_embeddings = shape.tied;
  return config;
}

// RankModel::memory_plan in bf16, whose operations need a GPU to be asked for their small temporaries: those of the CPU
// stand for them.
int64_t planned_bytes(const RankModelOptions& options, const Attention& attention, int stage) {
  const StageOptions own = options.stage(stage);
  StageOptions exact = own;
  exact.dtype = DType::f32;
  const ParameterSet parameters = Stage::declare_parameters(options.model, exact);
  // What is frozen is the whole model.
  exact.lora = {};
  const ParameterSet frozen = options.lora.enabled() ? Stage::declare_parameters(options.model, exact) : ParameterSet();
  const StageBytes bytes(options.model, own, parameters, frozen, attention, options.threads);
  return stage_memory_plan(own, bytes).total() +
         ShardedAdamW::bytes(parameters.flat_elements(), own.shards, own.with_values, options.optimizer()) +
         Pipeline::buffer_bytes(stage, options.grid.pp, options.model.hidden_size,
                                own.token_shares().most(options.max_micro_batch_tokens), options.dtype);
}

// The fullest stage's.
int64_t planned_bytes(const ModelShape& shape, const CostModel& cost, int64_t tokens, const RingTravel* ring,
                      Recompute recompute = Recompute::attention) {
  DenseAttention dense;
  const SizesOnGpu attention(dense, ring);
  const Layout& layout = cost.layout();
  RankModelOptions options;
  options.model = config_of(shape);
  for (int s = 0; s <= layout.pp; ++s)
    options.first_layers.push_back(s < layout.pp ? cost.first_layer(s) : static_cast<int>(shape.layers));
  options.grid = {layout.dp, layout.pp, layout.cp, layout.tp};
  options.dtype = DType::bf16;
  options.recompute = recompute;
  options.lora.rank = static_cast<int>(cost.profile().lora_rank);
  options.max_sequence_length = tokens;
  options.max_micro_batch_tokens = ContextLayout::most_tokens(layout.cp, SelectionConfig().block, tokens, 1);
  int64_t fullest = 0;
  for (int s = 0; s < layout.pp; ++s) fullest = std::max(fullest, planned_bytes(options, attention, s));
  return fullest;
}

// Table of docs/lora.md: the longest sequence, in steps of 16,384 tokens, that training with adapters of rank 32 plans
// for one H200.
TEST(MemoryEstimate, OfAdaptersIsWhatTheTrainerPlansAndTheGuideSays) {
  struct Row {
    const char* name;
    int64_t attention, layer;  // longest by train.recompute
  };
  // 139 GiB, of which kernels and attention's lists take one.
  constexpr int64_t kStep = 16384, kMemory = int64_t{138} << 30;
  for (const Row& row :
       {Row{"qwen2.5-7b", 278528, 491520}, Row{"qwen2.5-14b", 98304, 196608}, Row{"qwen2.5-32b", 49152, 81920}}) {
    const ModelShape shape = find_model_shape(row.name);
    const LatencyModel latency(with_adapters(analytic_profile("h200-analytic", shape), 32));
    const CostModel cost(latency, {}, {});
    const auto longest = [&](Recompute recompute) {
      int64_t tokens = 0;
      while (planned_bytes(shape, cost, tokens + kStep, nullptr, recompute) <= kMemory) tokens += kStep;
      return tokens;
    };
    EXPECT_EQ(longest(Recompute::attention), row.attention) << row.name;
    EXPECT_EQ(longest(Recompute::layer), row.layer) << row.name;
    // By hand: the model in bf16, and of every token and layer its input (and attention's result and log-sum-exp).
    const int64_t model = 2 * (shape.layers * shape.layer_parameters() + 2 * shape.embedding_parameters());
    const int64_t input = 2 * shape.hidden, result = 2 * shape.heads * shape.head_dim + 4 * shape.heads;
    for (const auto& [tokens, each] : {std::pair{row.attention, input + result}, {row.layer, input}}) {
      EXPECT_LT(model + shape.layers * tokens * each, kMemory) << row.name;
      EXPECT_GT(model + shape.layers * (tokens + kStep) * each, kMemory * 3 / 4) << row.name;
    }
    for (const int64_t tokens : {8192, 65536}) {
      const auto planned = static_cast<double>(planned_bytes(shape, cost, tokens, nullptr));
      EXPECT_NEAR(static_cast<double>(estimate_memory(cost, tokens).total()) / planned, 1.0, 0.04)
          << row.name << " " << tokens;
    }
  }
}

// Table of docs/fp8.md: Qwen2.5-3B on one H200, in GiB.
TEST(MemoryEstimate, OfFp8IsWhatTheGuideSays) {
  struct Row {
    int64_t tokens, sequence, loss_chunk;
    double bf16, made, kept;  // codes of weights made for every product, or kept
    int layers;               // whose codes have room
  };
  constexpr double kGib = int64_t{1} << 30, kMemory = 138.5 * kGib;  // 139 GiB, of which kernels take a half
  DenseAttention dense;
  const SizesOnGpu attention(dense, nullptr);
  for (const Row& row :
       {Row{8192, 8192, 4096, 72.7, 72.8, 77.9, 36}, Row{32768, 1024, 16384, 135.5, 135.8, 141.0, 18}}) {
    RankModelOptions options;
    options.model = config_of(find_model_shape("qwen2.5-3b"));
    options.first_layers = {0, options.model.layers};
    options.dtype = DType::bf16;
    options.recompute = Recompute::none;
    options.max_micro_batch_tokens = row.tokens;
    options.max_sequence_length = row.sequence;
    options.loss_chunk = row.loss_chunk;
    const auto plan = [&](int kept_codes) {
      options.kept_codes = {kept_codes};
      MemoryPlan whole;
      whole.add("all", planned_bytes(options, attention, 0));
      return whole;
    };
    const auto gib = [&](int kept_codes) { return static_cast<double>(plan(kept_codes).total()) / kGib; };
    EXPECT_NEAR(gib(0), row.bf16, 0.05);
    options.fp8 = true;
    EXPECT_NEAR(gib(0), row.made, 0.05);
    EXPECT_NEAR(gib(-1), row.kept, 0.05);
    // By hand: 2 bytes of each of 36 layers' q, k and v, o, gate and up, down.
    EXPECT_NEAR(row.kept - row.made, 2 * 36 * 2048.0 * (2560 + 2048 + 3 * 11008) / kGib, 0.1);
    EXPECT_EQ(Stage::most_kept_codes(options.stage(0), static_cast<int64_t>(kMemory), plan), row.layers);
  }
}

TEST(MemoryEstimate, IsWhatTheTrainerPlans) {
  for (const char* name : {"qwen2.5-0.5b", "qwen2.5-3b", "qwen2.5-7b"}) {
    const ModelShape shape = find_model_shape(name);
    const LatencyModel latency(analytic_profile("h200-analytic", shape));
    for (const auto& [dp, pp, cp, tp] : std::vector<std::array<int, 4>>{{1, 1, 1, 1},
                                                                        {4, 1, 1, 1},
                                                                        {1, 4, 1, 1},
                                                                        {2, 2, 1, 1},
                                                                        {1, 1, 2, 1},
                                                                        {1, 1, 8, 1},
                                                                        {1, 2, 4, 1},
                                                                        {1, 1, 1, 2},
                                                                        {2, 4, 1, 2}})
      for (const int64_t tokens : {4096, 32768, 40000, 131072, 262144, 1048576}) {
        Layout layout;
        layout.dp = dp;
        layout.pp = pp;
        layout.cp = cp;
        layout.tp = tp;
        const CostModel cost(latency, {}, layout);
        double planned = 0;
        run_thread_ranks(cp, [&, ranks = cp](Communicator& world) {
          const RingTravel ring(world, ranks);
          if (world.rank() == 0)
            planned = static_cast<double>(planned_bytes(shape, cost, tokens, ranks > 1 ? &ring : nullptr));
        });
        // Tiles at the ends of a ring's blocks are left out.
        const double tolerance = (tp > 1 ? 0.04 : cp > 1 ? 0.03 : 0.02) * planned;
        EXPECT_NEAR(static_cast<double>(estimate_memory(cost, tokens).total()), planned, tolerance)
            << name << ", dp " << dp << ", pp " << pp << ", cp " << cp << ", tp " << tp << ", " << tokens << " tokens";
      }
  }
}

}  // namespace
}  // namespace sb
