#pragma once

#include <cstdint>
#include <span>

#include "attention/attention.h"
#include "attention/index/block_index.h"
#include "attention/select/learned_selection.h"
#include "attention/select/selector.h"
#include "python/bindings/forked_pool.h"

namespace sb::python {

// Attention over packed sequences in memory that the caller owns, on the CPU and in fp32: a function of its arguments
// alone. What backward needs besides output and log-sum-exp, the lists, is written to the caller's memory too, one byte
// for every (list head, query block, key block): the first token of the query block that sees the key block, or
// kNotListed.
class PackedAttention {
 public:
  static constexpr uint8_t kNotListed = 255;

  struct Call {
    int layer = 0;
    AttentionShape shape{};
    std::span<const int32_t> cu_seqlens, budgets;  // budgets: one a sequence, or none
    std::span<uint8_t> lists;
    AttentionOperands operands;
    // What selection goes by beyond the sequences at hand. `planes` where blocks are judged by planes: tokens, then
    // squares of queries, sums and squares of keys, [kv_heads, head_dim] each. `thresholds` where they are learned: one
    // a sequence.
    std::span<const double> planes;
    std::span<const float> thresholds;
  };
  // What a forward saw, for those who learn from it: blocks chosen and wanted of every sequence, [sequences, 2]; the
  // sums that planes are chosen by, as Call::planes.
  struct Seen {
    std::span<int64_t> counts;
    std::span<double> sums;
  };

  // UserError for what it cannot do.
  PackedAttention(const SelectionConfig& config, int threads);

  void forward(const Call& call, const Seen& seen);
  void backward(const Call& call, const AttentionGradients& gradients);

 private:
  void check(const Call& call) const;
  SequenceTiles tiles_of(const Call& call, int sequence) const;
  void begin_index(const Call& call, int threads, BlockIndexBuilder& builder, BlockIndex& index) const;
  void choose(const Exec& exec, const Call& call, const Seen& seen, BlockIndex& index) const;

  SelectionConfig config_;
  Selector selector_;
  ForkedPool pool_;
};

}  // namespace sb::python
