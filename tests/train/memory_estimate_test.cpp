// What `simulate` says of a rank's memory, beside the memory plan of the trainer.

#include <gtest/gtest.h>

#include <algorithm>

#include "attention/cuda/attention_memory.h"
#include "attention/dense_attention.h"
#include "attention/forwarding_attention.h"
#include "balance/layout_sweep.h"
#include "balance/profile.h"
#include "model/stage_memory.h"
#include "train/rank_model.h"

namespace sb {
namespace {

// As large as dense attention on a GPU; nothing runs.
class SizesOnGpu final : public ForwardingAttention {
 public:
  explicit SizesOnGpu(Attention& inner) : ForwardingAttention(inner) {
    options_.selection.pattern = SelectionPattern::dense;
  }
  int64_t scratch_bytes(const AttentionShape& shape, int64_t max_tokens, int) const override {
    return gpu::AttentionMemory{options_, 132, 0}.scratch_bytes(shape, max_tokens);
  }
  int64_t state_bytes(const AttentionShape&, int64_t) const override { return 0; }
  int64_t reserved_bytes(const AttentionShape&, int64_t, DType, int64_t) const override { return 0; }
  int64_t call_bytes(const AttentionShape&, int64_t, int) const override { return 0; }

 private:
  SparseAttention::Options options_;
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
  const StageBytes bytes(options.model, own, parameters, attention, options.threads);
  return stage_memory_plan(own, bytes).total() +
         ShardedAdamW::bytes(parameters.flat_elements(), own.shards, own.with_values) +
         Pipeline::buffer_bytes(stage, options.grid.pp, options.model.hidden_size, options.max_micro_batch_tokens,
                                options.dtype);
}

TEST(MemoryEstimate, IsWhatTheTrainerPlans) {
  DenseAttention dense;
  const SizesOnGpu attention(dense);
  for (const char* name : {"qwen2.5-0.5b", "qwen2.5-3b", "qwen2.5-7b"}) {
    const ModelShape shape = find_model_shape(name);
    const LatencyModel latency(analytic_profile("h200-analytic", shape));
    for (const auto& [dp, pp] : {std::pair{1, 1}, {4, 1}, {1, 4}, {2, 2}})
      for (const int64_t tokens : {4096, 32768, 40000, 131072, 262144}) {
        Layout layout;
        layout.dp = dp;
        layout.pp = pp;
        const CostModel cost(latency, {}, layout);
        RankModelOptions options;
        options.model = config_of(shape);
        for (int s = 0; s <= pp; ++s)
          options.first_layers.push_back(s < pp ? cost.first_layer(s) : static_cast<int>(shape.layers));
        options.grid = {dp, pp, 1};
        options.dtype = DType::bf16;
        options.max_micro_batch_tokens = options.max_sequence_length = tokens;
        int64_t fullest = 0;
        for (int s = 0; s < pp; ++s) fullest = std::max(fullest, planned_bytes(options, attention, s));
        const auto planned = static_cast<double>(fullest);
        EXPECT_NEAR(static_cast<double>(estimate_memory(cost, tokens).total()), planned, 0.02 * planned)
            << name << ", dp " << dp << ", pp " << pp << ", " << tokens << " tokens";
      }
  }
}

}  // namespace
}  // namespace sb
