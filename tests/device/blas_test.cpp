#include "device/blas.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "core/random.h"

namespace sb {
namespace {

std::vector<float> random_values(int64_t count, uint64_t seed) {
  Random random(seed);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = static_cast<float>(random.uniform() - 0.5);
  return values;
}

struct Case {
  int64_t m, n, k;
};

// Rows further apart than they are long, so that a wrong distance shows.
constexpr int64_t kGap = 3;

// Runs one product on `threads` (0: the plain call) and compares every element of C, the gaps between rows included.
void expect_product(const Case& c, bool transpose_a, bool transpose_b, float beta, bool with_bias, int threads) {
  SCOPED_TRACE(::testing::Message() << c.m << "x" << c.n << "x" << c.k << " transposed " << transpose_a << transpose_b
                                    << " beta " << beta << " bias " << with_bias << " threads " << threads);
  const int64_t lda = (transpose_a ? c.m : c.k) + kGap, ldb = (transpose_b ? c.k : c.n) + kGap, ldc = c.n + kGap;
  const auto a = random_values(lda * (transpose_a ? c.k : c.m), 1),
             b = random_values(ldb * (transpose_b ? c.n : c.k), 2);
  const auto bias = random_values(c.n, 3), before = random_values(ldc * c.m, 4);
  std::vector<float> actual = before;
  // With beta 0 what was there must not matter, not even NaN.
  if (beta == 0) {
    for (int64_t i = 0; i < c.m; ++i) std::fill_n(actual.begin() + i * ldc, c.n, NAN);
  }
  const Sgemm product = {.transpose_a = transpose_a,
                         .transpose_b = transpose_b,
                         .m = c.m,
                         .n = c.n,
                         .k = c.k,
                         .a = a.data(),
                         .lda = lda,
                         .b = b.data(),
                         .ldb = ldb,
                         .beta = beta,
                         .c = actual.data(),
                         .ldc = ldc,
                         .bias = with_bias ? bias.data() : nullptr};
  if (threads == 0) {
    sgemm(product);
  } else {
    ThreadPool pool(threads);
    parallel_sgemm(pool, product);
  }
  for (int64_t i = 0; i < c.m; ++i) {
    for (int64_t j = 0; j < ldc; ++j) {
      if (j >= c.n) {
        ASSERT_EQ(actual[i * ldc + j], before[i * ldc + j]) << "between rows, " << i << ", " << j;
        continue;
      }
      double expected = beta == 0 ? 0.0 : static_cast<double>(beta) * before[i * ldc + j];
      if (with_bias) expected += bias[j];
      for (int64_t l = 0; l < c.k; ++l) {
        expected += static_cast<double>(transpose_a ? a[l * lda + i] : a[i * lda + l]) *
                    (transpose_b ? b[j * ldb + l] : b[l * ldb + j]);
      }
      ASSERT_NEAR(actual[i * ldc + j], expected, 2e-6 * (4 + std::sqrt(static_cast<double>(c.k)))) << i << ", " << j;
    }
  }
}

TEST(Blas, EveryVariantMatchesTheDefinition) {
  for (const Case& c : {Case{1, 1, 1}, Case{5, 3, 7}, Case{61, 97, 41}}) {
    for (const bool transpose_a : {false, true}) {
      for (const bool transpose_b : {false, true}) {
        for (const float beta : {0.0f, 1.0f, 0.5f}) {
          for (const bool with_bias : {false, true}) {
            for (const int threads : {0, 2}) expect_product(c, transpose_a, transpose_b, beta, with_bias, threads);
          }
        }
      }
    }
  }
}

TEST(Blas, AnyNumberOfThreadsCoversTheWholeResult) {
  // Tall, wide, square, thinner than a tile, fewer rows than threads: all large enough to be shared.
  for (const Case& c :
       {Case{1024, 3, 64}, Case{3, 1024, 64}, Case{131, 127, 64}, Case{17, 17, 509}, Case{1, 2, 40000}}) {
    for (const int threads : {1, 2, 3, 4, 6, 7}) expect_product(c, false, true, 0.0f, true, threads);
  }
}

TEST(Blas, EmptyProducts) {
  float c[4] = {1, 2, 3, 4};
  const float x[4] = {}, bias[2] = {10, 20};
  sgemm({.m = 0, .n = 2, .k = 2, .a = x, .lda = 2, .b = x, .ldb = 2, .c = c, .ldc = 2});
  EXPECT_EQ(c[0], 1.0f);
  sgemm({.m = 2, .n = 2, .k = 0, .a = x, .lda = 1, .b = x, .ldb = 2, .beta = 1, .c = c, .ldc = 2, .bias = bias});
  EXPECT_EQ(std::vector<float>(c, c + 4), (std::vector<float>{11, 22, 13, 24}));
  sgemm({.m = 2, .n = 2, .k = 0, .a = x, .lda = 1, .b = x, .ldb = 2, .beta = 0, .c = c, .ldc = 2});
  EXPECT_EQ(std::vector<float>(c, c + 4), std::vector<float>(4, 0.0f));
}

TEST(Blas, RepetitionGivesTheSameBits) {
  const auto a = random_values(200 * 100, 1), b = random_values(100 * 150, 2);
  std::vector<float> first(200 * 150), second(first.size());
  ThreadPool pool(3);
  Sgemm product = {.m = 200, .n = 150, .k = 100, .a = a.data(), .lda = 100, .b = b.data(), .ldb = 150, .ldc = 150};
  product.c = first.data();
  parallel_sgemm(pool, product);
  product.c = second.data();
  parallel_sgemm(pool, product);
  EXPECT_EQ(first, second);
}

}  // namespace
}  // namespace sb
