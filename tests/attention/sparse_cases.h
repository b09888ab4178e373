#pragma once

#include <functional>
#include <string>
#include <vector>

#include "attention/index/block_index.h"
#include "core/random.h"
#include "tests/attention/reference.h"

namespace sb {

AttentionShape shape_of(int heads, int kv_heads, int head_dim);

// What a row of the index holds, as a function of its place.
struct RowMaker {
  // First token that sees the block, or -1: not selected.
  std::function<int(Random& random, int query_block, int tokens, int block, int own_block)> first;
  // Whether single tokens of blocks that are not selected are gathered.
  std::function<bool(Random& random, int key)> gathered = [](Random&, int) { return false; };
};

BlockIndex build_index(const AttentionCase& c, const BlockIndexShape& shape, const RowMaker& maker,
                       std::vector<uint8_t> dense = {});

// Own block always, half of the others, with a staircase.
extern const RowMaker kRandomRows;
// Nothing is selected: no keys, no gradients.
extern const RowMaker kNoRows;
extern const RowMaker kFullRows;

// What sparse attention has to get right on every device: operands and lists.
struct SparseCase {
  std::string name;  // group, then what is special
  AttentionShape shape;
  std::vector<int32_t> lengths;
  uint64_t seed;
  BlockIndexShape lists;
  RowMaker maker;
  std::vector<uint8_t> dense = {};

  AttentionCase operands() const { return AttentionCase(shape, lengths, seed); }
  BlockIndex index(const AttentionCase& c) const { return build_index(c, lists, maker, dense); }
};
const std::vector<SparseCase>& sparse_cases();

}  // namespace sb
