#include "attention/cpu/block_sparse.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "core/errors.h"
#include "tests/attention/sparse_cases.h"

namespace sb {
namespace {

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

void check(const AttentionCase& c, const BlockIndex& index, double tolerance = 1e-5) {
  GivenIndex attention(index);
  const AttentionResults<float> one = run_attention(attention, c, 1);
  expect_close(one, reference_attention(c, sees_by(index, c.shape)), tolerance);
  EXPECT_TRUE(run_attention(attention, c, 2) == one) << "two threads give other bits";
  EXPECT_TRUE(run_attention(attention, c, 3) == one) << "three threads give other bits";
}

// A group of the cases that CPU and GPU share (tests/attention/sparse_cases.cpp).
class BlockSparseCases : public testing::TestWithParam<const char*> {};

TEST_P(BlockSparseCases, EqualTheReference) {
  int checked = 0;
  for (const SparseCase& one : sparse_cases()) {
    if (!one.name.starts_with(std::string(GetParam()) + ":")) continue;
    SCOPED_TRACE(one.name);
    const AttentionCase c = one.operands();
    check(c, one.index(c));
    ++checked;
  }
  EXPECT_GT(checked, 0);
}

INSTANTIATE_TEST_SUITE_P(Groups, BlockSparseCases,
                         testing::Values("lengths", "long", "blocks", "per query head", "groups", "head dimensions",
                                         "special", "dense beside", "many gathered"),
                         [](const auto& group) {
                           std::string name = group.param;
                           std::replace(name.begin(), name.end(), ' ', '_');
                           return name;
                         });

TEST(BlockSparse, NothingSelectedGivesZeros) {
  const AttentionCase c(shape_of(2, 1, 64), {200}, 7);
  const BlockIndex index = build_index(c, {128, 16, 1}, kNoRows);
  GivenIndex attention(index);
  const AttentionResults<float> r = run_attention(attention, c, 1);
  for (const std::vector<float>* x : {&r.out, &r.dq, &r.dk, &r.dv}) {
    EXPECT_TRUE(std::all_of(x->begin(), x->end(), [](float value) { return value == 0.0f; }));
  }
  EXPECT_TRUE(std::all_of(r.lse.begin(), r.lse.end(), [](float value) { return value == -INFINITY; }));
}

TEST(BlockSparse, AnIndexForOtherOperandsIsRefused) {
  const AttentionCase c(shape_of(4, 2, 16), {100}), longer(shape_of(4, 2, 16), {101});
  const BlockIndex index = build_index(c, {128, 16, 2}, kFullRows), per_one = build_index(c, {128, 16, 1}, kFullRows);
  GivenIndex attention(index), wrong_heads(per_one);
  EXPECT_THROW(run_attention(attention, longer, 1), InternalError);
  EXPECT_THROW(run_attention(wrong_heads, c, 1), InternalError);
}

}  // namespace
}  // namespace sb
