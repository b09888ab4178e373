#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "attention/cpu/sparse_attention.h"

namespace sb {

// Attention for generation: keys and values of every (sequence, layer) stay in a cache, so that a new token costs one
// row. The first micro-batch of a sequence (its prompt) runs through `prefill`; later ones look at the cache. With
// `choosing`, new tokens choose key blocks by the rule they would have had in training; otherwise they look at
// everything. Caches lie in host memory in fp32 and new tokens attend there, whatever device the model runs on.
class CachedAttention final : public Attention {
 public:
  struct Options {
    Attention* prefill = nullptr;
    // `prefill` once more where it is causal with lists per kv head, and its pattern; null: new tokens see everything.
    ChoosingAttention* choosing = nullptr;
    SelectionConfig selection = {};
    LearnedSelection learned = {};  // in training
    int layers = 0;
    int sequences = 0;     // caches
    int64_t capacity = 0;  // tokens of each
    AttentionShape shape{};
  };
  explicit CachedAttention(const Options& options);

  // What prompts and new tokens select by from now on, where they choose. Caches have to be empty.
  void learn(const LearnedSelection& learned);
  // Forgets what the caches hold.
  void clear();
  // The sequences of the micro-batches to come, as cache numbers. None: `prefill` alone, nothing is kept.
  void use(std::vector<int> caches) { caches_ = std::move(caches); }
  // Tokens in a cache (after whole forwards).
  int64_t length(int cache) const { return slots_[cache * options_.layers].tokens; }

  std::unique_ptr<AttentionState> make_state() const override { return options_.prefill->make_state(); }
  void forward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
               const AttentionOperands& operands, AttentionState& state, bool replay) override;
  // Generation has no backward: InternalError.
  void backward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
                const AttentionOperands& operands, const AttentionGradients& gradients, AttentionState& state) override;
  void reserve(const AttentionShape& shape, int64_t max_tokens, DType dtype,
               std::span<const std::unique_ptr<AttentionState>> states) override {
    options_.prefill->reserve(shape, max_tokens, dtype, states);
  }
  int64_t scratch_bytes(const AttentionShape& shape, int64_t max_tokens, int threads) const override;
  int64_t state_bytes(const AttentionShape& shape, int64_t max_tokens) const override;
  int64_t call_bytes(const AttentionShape& shape, int64_t max_tokens, int threads) const override {
    return options_.prefill->call_bytes(shape, max_tokens, threads);
  }

 private:
  // One sequence in one layer.
  struct Slot {
    int64_t tokens = 0;
    std::vector<float> k, v;        // [tokens, kv_heads, d]
    std::vector<float> tile_q;      // queries of the tile under way, [rows, heads, d]
    std::vector<float> statistics;  // of finished key blocks, [kv_heads, blocks of the capacity, width]
    int64_t finished_blocks = 0;
    const LayerPlanes* planes = nullptr;  // by which blocks are judged, where that is by planes
  };
  Slot& slot(int cache, int layer) { return slots_[cache * options_.layers + layer]; }
  void make_room(Slot& slot) const;
  void append(const Exec& exec, Slot& slot, int layer, const AttentionOperands& operands, int64_t begin, int64_t end);
  void attend(const Slot& slot, int layer, int kv_head, const float* q, float* out) const;
  std::vector<std::pair<int64_t, int64_t>> visible_keys(const Slot& slot, int layer, int kv_head) const;
  SequenceTiles tiles(int64_t tokens) const;

  Options options_;
  std::optional<Selector> selector_;
  std::optional<StepSelection> step_;
  std::vector<Slot> slots_;
  std::vector<int> caches_;
};

}  // namespace sb
