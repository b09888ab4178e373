#include "attention/cpu/dense_attention.h"

#include <gtest/gtest.h>

#include <cmath>

#include "core/errors.h"
#include "tests/attention/reference.h"
#include "tests/attention/sparse_cases.h"

namespace sb {
namespace {

void check(const AttentionCase& c, double tolerance = 1e-5) {
  DenseAttention attention;
  const AttentionResults<float> one = run_attention(attention, c, 1);
  expect_close(one, reference_attention(c, sees_everything), tolerance);
  EXPECT_TRUE(run_attention(attention, c, 2) == one) << "two threads give other bits";
  EXPECT_TRUE(run_attention(attention, c, 3) == one) << "three threads give other bits";
}

TEST(DenseAttention, EveryLengthAroundTileBorders) {
  for (const int length :
       {1, 2, 3, 7, 13, 14, 15, 16, 17, 31, 32, 33, 63, 64, 65, 111, 112, 113, 127, 128, 129, 255, 256, 257, 300}) {
    SCOPED_TRACE(length);
    check(AttentionCase(shape_of(2, 1, 64), {length}, length));
  }
}

TEST(DenseAttention, HeadDimensions) {
  for (const int head_dim : {1, 3, 8, 15, 16, 17, 32, 48, 64, 65, 80, 96, 128, 129, 192, 256, 300}) {
    SCOPED_TRACE(head_dim);
    check(AttentionCase(shape_of(3, 1, head_dim), {20, 133}, head_dim));
  }
}

TEST(DenseAttention, Groups) {
  for (const auto& [heads, kv_heads] : {std::pair{1, 1}, {4, 4}, {4, 2}, {7, 1}, {14, 2}, {16, 2}, {9, 3}}) {
    SCOPED_TRACE(heads);
    check(AttentionCase(shape_of(heads, kv_heads, 32), {5, 130, 61}, heads));
  }
  // One token has more rows than a tile.
  check(AttentionCase(shape_of(130, 1, 16), {5, 33}, 130));
}

TEST(DenseAttention, PackedSequences) {
  for (const std::vector<int32_t>& lengths :
       {std::vector<int32_t>{1, 1, 1}, {0}, {0, 0}, {0, 5, 0}, {129, 0, 1, 64, 2, 257}, {3, 400, 3}}) {
    check(AttentionCase(shape_of(4, 2, 16), lengths, lengths.size()));
  }
}

TEST(DenseAttention, ManyChunksOfALongSequence) {
  // Backward cuts it into chunks whose key gradients meet in a fixed order.
  check(AttentionCase(shape_of(3, 1, 16), {1000}, 5));
  check(AttentionCase(shape_of(2, 2, 64), {700, 800}, 6));
}

TEST(DenseAttention, LargeScores) {
  // Scores of several hundred: the running maximum has to carry them.
  check(AttentionCase(shape_of(2, 1, 64), {300}, 8, 9.0), 2e-4);
}

TEST(DenseAttention, DoesNotLookAhead) {
  AttentionCase c(shape_of(4, 2, 64), {50, 300}, 9);
  DenseAttention attention;
  const AttentionResults<float> before = run_attention(attention, c, 1);
  const int64_t row = c.shape.heads * c.shape.head_dim, kv_row = c.shape.kv_heads * c.shape.head_dim, from = 250;
  for (int64_t i = from * row; i < c.tokens() * row; ++i) c.q[i] += 1.0f;
  for (int64_t i = from * kv_row; i < c.tokens() * kv_row; ++i) c.k[i] -= 2.0f, c.v[i] *= 3.0f;
  const AttentionResults<float> after = run_attention(attention, c, 1);
  EXPECT_TRUE(std::equal(before.out.begin(), before.out.begin() + from * row, after.out.begin()));
  EXPECT_FALSE(std::equal(before.out.begin() + from * row, before.out.end(), after.out.begin() + from * row));
}

TEST(DenseAttention, NonFiniteValuesAreNotHidden) {
  AttentionCase c(shape_of(1, 1, 64), {40}, 10);
  c.v[3 * 64 + 5] = std::nanf("");
  DenseAttention attention;
  const AttentionResults<float> r = run_attention(attention, c, 1);
  for (int token = 3; token < 40; ++token) EXPECT_TRUE(std::isnan(r.out[token * 64 + 5])) << token;
  c.v[3 * 64 + 5] = 0.0f;
  c.k[3 * 64] = std::nanf("");
  const AttentionResults<float> s = run_attention(attention, c, 1);
  for (int token = 0; token < 40; ++token) EXPECT_EQ(std::isnan(s.lse[token]), token >= 3) << token;
}

// The reference itself, by finite differences of sum(out · dout) in fp64.
TEST(AttentionReference, GradientsAreTheDerivatives) {
  AttentionCase c(shape_of(2, 1, 4), {5, 7}, 11);
  const SeesKey sees = [](int head, int, int query, int key) { return (head + query + key) % 3 != 0; };
  const AttentionResults<double> r = reference_attention(c, sees);
  const auto objective = [&] {
    const AttentionResults<double> moved = reference_attention(c, sees);
    double sum = 0;
    for (size_t i = 0; i < moved.out.size(); ++i) sum += moved.out[i] * c.dout[i];
    return sum;
  };
  const auto check_gradient = [&](std::vector<float>& x, const std::vector<double>& gradient) {
    for (size_t i = 0; i < x.size(); ++i) {
      const float kept = x[i];
      x[i] = kept + 0x1p-9f;
      const double up = x[i], above = objective();
      x[i] = kept - 0x1p-9f;
      const double down = x[i], below = objective();
      x[i] = kept;
      EXPECT_NEAR((above - below) / (up - down), gradient[i], 1e-4);
    }
  };
  check_gradient(c.q, r.dq);
  check_gradient(c.k, r.dk);
  check_gradient(c.v, r.dv);
}

TEST(DenseAttention, WrongShapesAreRefused) {
  AttentionCase c(shape_of(4, 2, 16), {10});
  DenseAttention attention;
  c.shape.kv_heads = 3;
  EXPECT_THROW(run_attention(attention, c, 1), InternalError);
  c.shape = shape_of(4, 2, 16);
  c.cu_seqlens = {1, 10};
  EXPECT_THROW(run_attention(attention, c, 1), InternalError);
}

}  // namespace
}  // namespace sb
