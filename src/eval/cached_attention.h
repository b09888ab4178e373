#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "attention/cpu/sparse_attention.h"
#include "device/memory.h"

namespace sb {

// Attention for generation: keys and values of every (sequence, layer) stay in a cache, so that a new token costs one
// row. The first micro-batch of a sequence (its prompt) runs through `prefill`; later ones look at the cache. With
// `selecting`, new tokens select key blocks by the rule they would have had in training; otherwise they look at
// everything. Caches lie on the device that the model runs on and new tokens attend there; which blocks they see is
// selected on the host, from statistics of finished blocks.
class CachedAttention final : public Attention {
 public:
  struct Options {
    Attention* prefill = nullptr;
    // `prefill` once more where it is causal with lists per kv head, and its pattern; null: new tokens see everything.
    SelectingAttention* selecting = nullptr;
    SelectionConfig selection = {};
    LearnedSelection learned = {};  // in training
    int layers = 0;
    int sequences = 0;     // caches
    int64_t capacity = 0;  // tokens of each
    AttentionShape shape{};
    DeviceKind device = DeviceKind::cpu;
    DType dtype = DType::f32;  // of keys and values
  };
  explicit CachedAttention(const Options& options);

  // What prompts and new tokens select by from now on, where they select. Caches have to be empty.
  void learn(const LearnedSelection& learned);
  // Forgets what the caches hold.
  void clear();
  // The sequences of the micro-batches to come, as cache numbers. None: `prefill` alone, nothing is kept.
  void use(std::vector<int> caches) { caches_ = std::move(caches); }
  // Takes the memory of all caches, where that has not happened: with the first prompt, as whoever only scores never
  // needs it. OutOfMemory where a GPU has no room for them.
  void make_room();
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
    TensorView k, v;                // [capacity, kv_heads, d], on the device
    std::vector<float> tile_q;      // queries of the tile under way, [rows, heads, d]
    std::vector<float> statistics;  // of finished key blocks, [kv_heads, blocks of the capacity, width]
    int64_t finished_blocks = 0;
    const LayerPlanes* planes = nullptr;  // by which blocks are judged, where that is by planes
  };
  Slot& slot(int cache, int layer) { return slots_[cache * options_.layers + layer]; }
  const Slot& slot(int cache, int layer) const { return slots_[cache * options_.layers + layer]; }
  // Of what a GPU reads: tokens of a key block, blocks of the capacity, bytes of the lists of all sequences.
  int block() const;
  int64_t room() const;
  int64_t list_bytes() const;
  void append(const Exec& exec, Slot& slot, int layer, const AttentionOperands& operands, int64_t begin, int64_t end);
  // Statistics of the key blocks that are complete by now.
  void finish_blocks(const Exec& exec, Slot& slot, int layer);
  void attend_on_gpu(const Exec& exec, int layer, const AttentionOperands& operands);
  // Which blocks the new tokens see, as DecodeParams has it for one after the other, in device memory.
  const int32_t* send_lists(const Exec& exec, int layer);
  void attend_on_host(const Exec& exec, int layer, const AttentionOperands& operands) const;
  void attend(const Slot& slot, int layer, int kv_head, const float* q, float* out) const;
  std::vector<std::pair<int64_t, int64_t>> visible_keys(const Slot& slot, int layer, int kv_head) const;
  SequenceTiles tiles(int64_t tokens) const;

  Options options_;
  std::optional<Selector> selector_;
  std::optional<StepSelection> step_;
  std::vector<Slot> slots_;
  std::optional<Arena> memory_;  // of all slots
  HostMemory lists_;             // on their way to the GPU
  std::vector<int> caches_;
};

}  // namespace sb
