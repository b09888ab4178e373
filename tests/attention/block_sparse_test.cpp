#include "attention/block_sparse.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "core/errors.h"
#include "core/random.h"
#include "tests/attention/reference.h"

namespace sb {
namespace {

AttentionShape shape_of(int heads, int kv_heads, int head_dim) {
  return {heads, kv_heads, head_dim, 1.0f / std::sqrt(static_cast<float>(head_dim))};
}

// Attention over an index that is given.
class GivenIndex final : public Attention {
 public:
  explicit GivenIndex(const BlockIndex& index) : index_(index) {}
  std::unique_ptr<AttentionState> make_state() const override { return std::make_unique<AttentionState>(); }
  void forward(const Exec& exec, int, const AttentionShape& shape, const PackedSequences&,
               const AttentionOperands& operands, AttentionState&, bool) override {
    block_sparse_forward(exec, shape, index_, operands);
  }
  void backward(const Exec& exec, int, const AttentionShape& shape, const PackedSequences&,
                const AttentionOperands& operands, const AttentionGradients& gradients, AttentionState&) override {
    block_sparse_backward(exec, shape, index_, operands, gradients);
  }
  int64_t scratch_bytes(const AttentionShape& shape, int64_t max_tokens, int threads) const override {
    return block_sparse_scratch_bytes(shape, max_tokens, threads);
  }
  int64_t state_bytes(const AttentionShape&, int64_t) const override { return 0; }

 private:
  const BlockIndex& index_;
};

// What a row of the index holds, as a function of its place.
struct RowMaker {
  // First token that sees the block, or -1: not chosen.
  std::function<int(Random& random, int query_block, int tokens, int block, int own_block)> first;
  // Whether single tokens of blocks that are not chosen are gathered.
  std::function<bool(Random& random, int key)> gathered = [](Random&, int) { return false; };
};

BlockIndex build_index(const AttentionCase& c, const BlockIndexShape& shape, const RowMaker& maker,
                       std::vector<uint8_t> dense = {}) {
  BlockIndex index;
  BlockIndexBuilder builder;
  ThreadPool pool(1);
  Random random(17);
  builder.begin(index, shape, c.cu_seqlens, dense, 1);
  for (int64_t id = 0; id < index.rows(); ++id) {
    const auto place = index.place_of(id);
    const int tokens = index.query_tokens(*place.sequence, place.query_block);
    const int last = place.query_block * shape.query_block + tokens - 1;
    std::vector<IndexEntry> entries;
    std::vector<int32_t> columns;
    for (int block = 0; block * shape.block <= last; ++block) {
      const int first = maker.first(random, place.query_block, tokens, block, last / shape.block);
      if (first >= 0) {
        entries.push_back({static_cast<uint16_t>(block), static_cast<uint8_t>(first)});
      } else {
        for (int key = block * shape.block; key < (block + 1) * shape.block && key <= last; ++key) {
          if (maker.gathered(random, key)) columns.push_back(key);
        }
      }
    }
    builder.set_row(0, id, entries, columns);
  }
  builder.finish(pool);
  return index;
}

void check(const AttentionCase& c, const BlockIndex& index, double tolerance = 1e-5) {
  GivenIndex attention(index);
  const AttentionResults<float> one = run_attention(attention, c, 1);
  expect_close(one, reference_attention(c, sees_by(index, c.shape)), tolerance);
  EXPECT_TRUE(run_attention(attention, c, 2) == one) << "two threads give other bits";
  EXPECT_TRUE(run_attention(attention, c, 3) == one) << "three threads give other bits";
}

// Own block always, half of the others, with a staircase.
const RowMaker kRandom = {[](Random& random, int, int tokens, int block, int own) {
  if (block == own) return 0;
  return random.below(2) == 0 ? -1 : static_cast<int>(random.below(tokens));
}};
// Nothing is certain: rows, tokens and keys without a partner.
const RowMaker kSparse = {[](Random& random, int, int tokens, int, int) {
  return random.below(4) != 0 ? -1 : static_cast<int>(random.below(tokens));
}};
const RowMaker kDiagonal = {[](Random&, int, int, int block, int own) { return block == own ? 0 : -1; }};
const RowMaker kFull = {[](Random&, int, int, int, int) { return 0; }};
// Everybody looks at block 0, and hardly at anything else.
const RowMaker kHub = {[](Random& random, int, int, int block, int own) {
  return block == 0 || block == own || random.below(12) == 0 ? 0 : -1;
}};
const RowMaker kNothing = {[](Random&, int, int, int, int) { return -1; }};
const RowMaker kGathered = {
    [](Random& random, int, int, int block, int own) { return block == own || random.below(3) == 0 ? 0 : -1; },
    [](Random& random, int) { return random.below(7) == 0; }};
const RowMaker kOnlyGathered = {[](Random&, int, int, int, int) { return -1; },
                                [](Random& random, int key) { return key % 5 == 2 || random.below(40) == 0; }};

TEST(BlockSparse, LengthsAroundBlockBorders) {
  for (const int length : {1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 255, 256, 257, 383, 385, 513}) {
    SCOPED_TRACE(length);
    const AttentionCase c(shape_of(2, 1, 64), {length}, length);
    check(c, build_index(c, {128, 16, 1}, kRandom));
    check(c, build_index(c, {64, 16, 1}, kSparse));
  }
}

TEST(BlockSparse, LongSequences) {
  for (const int length : {640, 767, 1000}) {
    SCOPED_TRACE(length);
    const AttentionCase c(shape_of(4, 2, 16), {length}, length);
    check(c, build_index(c, {128, 16, 2}, kRandom));
    check(c, build_index(c, {64, 32, 4}, kSparse));
  }
}

TEST(BlockSparse, BlockSizes) {
  const AttentionCase c(shape_of(4, 2, 16), {300, 77, 515}, 3);
  for (const int block : {64, 128, 256}) {
    for (const int query_block : {1, 2, 7, 16, 48, 64, 100, 128}) {
      SCOPED_TRACE(std::to_string(block) + " keys, " + std::to_string(query_block) + " queries");
      check(c, build_index(c, {block, query_block, 2}, kRandom));
    }
  }
}

TEST(BlockSparse, ListsPerQueryHead) {
  const AttentionCase c(shape_of(6, 2, 32), {300, 130}, 4);
  for (const int query_block : {1, 16, 128}) {
    check(c, build_index(c, {128, query_block, 6}, kRandom));
    check(c, build_index(c, {64, query_block, 6}, kGathered));
  }
}

TEST(BlockSparse, Groups) {
  for (const auto& [heads, kv_heads] : {std::pair{1, 1}, {2, 2}, {4, 2}, {7, 1}, {14, 2}, {8, 1}, {16, 2}, {130, 1}}) {
    SCOPED_TRACE(heads);
    const std::vector<int32_t> lengths = heads < 100 ? std::vector<int32_t>{150, 260} : std::vector<int32_t>{70};
    const AttentionCase c(shape_of(heads, kv_heads, 16), lengths, heads);
    check(c, build_index(c, {128, 16, kv_heads}, kRandom));
    check(c, build_index(c, {64, 128, kv_heads}, kSparse));
  }
}

TEST(BlockSparse, HeadDimensions) {
  for (const int head_dim : {8, 16, 24, 32, 64, 80, 128, 192, 256}) {
    SCOPED_TRACE(head_dim);
    const AttentionCase c(shape_of(2, 1, head_dim), {280}, head_dim);
    check(c, build_index(c, {64, 16, 1}, kRandom));
    check(c, build_index(c, {128, 64, 2}, kGathered));
  }
}

TEST(BlockSparse, SpecialIndices) {
  const AttentionCase c(shape_of(4, 2, 32), {1, 129, 0, 400}, 6);
  for (const RowMaker* maker : {&kDiagonal, &kFull, &kHub, &kNothing, &kGathered, &kOnlyGathered, &kSparse}) {
    check(c, build_index(c, {128, 16, 2}, *maker));
    check(c, build_index(c, {64, 24, 4}, *maker));
    check(c, build_index(c, {256, 128, 2}, *maker));
  }
}

TEST(BlockSparse, NothingChosenGivesZeros) {
  const AttentionCase c(shape_of(2, 1, 64), {200}, 7);
  const BlockIndex index = build_index(c, {128, 16, 1}, kNothing);
  GivenIndex attention(index);
  const AttentionResults<float> r = run_attention(attention, c, 1);
  for (const std::vector<float>* x : {&r.out, &r.dq, &r.dk, &r.dv}) {
    EXPECT_TRUE(std::all_of(x->begin(), x->end(), [](float value) { return value == 0.0f; }));
  }
  EXPECT_TRUE(std::all_of(r.lse.begin(), r.lse.end(), [](float value) { return value == -INFINITY; }));
}

TEST(BlockSparse, DenseSequencesInTheSameCall) {
  const AttentionCase c(shape_of(4, 2, 64), {200, 150, 0, 333}, 8);
  check(c, build_index(c, {128, 16, 2}, kRandom, {1, 0, 1, 0}));
  check(c, build_index(c, {128, 16, 4}, kGathered, {0, 1, 0, 1}));
  check(c, build_index(c, {64, 128, 2}, kNothing, {1, 1, 1, 1}));
}

TEST(BlockSparse, MoreGatheredColumnsThanATileHolds) {
  const AttentionCase c(shape_of(2, 1, 16), {900}, 9);
  check(c, build_index(c, {64, 128, 2},
                       {[](Random&, int, int, int, int) { return -1; },
                        [](Random& random, int) { return random.below(2) == 0; }}));
}

TEST(BlockSparse, AnIndexForOtherOperandsIsRefused) {
  const AttentionCase c(shape_of(4, 2, 16), {100}), longer(shape_of(4, 2, 16), {101});
  const BlockIndex index = build_index(c, {128, 16, 2}, kFull), per_one = build_index(c, {128, 16, 1}, kFull);
  GivenIndex attention(index), wrong_heads(per_one);
  EXPECT_THROW(run_attention(attention, longer, 1), InternalError);
  EXPECT_THROW(run_attention(wrong_heads, c, 1), InternalError);
}

}  // namespace
}  // namespace sb
