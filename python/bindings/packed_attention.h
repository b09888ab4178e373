#pragma once

#include <cstdint>

#include "attention/index/block_index.h"
#include "attention/select/selector.h"
#include "python/bindings/forked_pool.h"
#include "python/bindings/packed_call.h"

namespace sb::python {

// Attention over packed sequences in memory that the caller owns, on the CPU and in fp32: a function of its arguments
// alone. The lists have one byte for every (list head, query block, key block): the first token of the query block that
// sees the key block, or kNotListed.
constexpr uint8_t kNotListed = 255;

// The lists of an index that way. `tokens`: of all sequences.
void write_lists(const BlockIndex& index, int64_t tokens, std::span<uint8_t> lists, ThreadPool& pool);

class PackedAttention {
 public:
  // UserError for what it cannot do.
  PackedAttention(const SelectionConfig& config, int threads);

  void forward(const PackedCall& call, const PackedSeen& seen);
  void backward(const PackedCall& call, const AttentionGradients& gradients);
  const SelectionConfig& config() const { return config_; }

 private:
  void begin_index(const PackedCall& call, int threads, BlockIndexBuilder& builder, BlockIndex& index) const;
  void select(const Exec& exec, const PackedCall& call, const PackedSeen& seen, BlockIndex& index) const;

  SelectionConfig config_;
  Selector selector_;
  ForkedPool pool_;
};

}  // namespace sb::python
