#include "device/blas.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <thread>
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

// Sums of small whole numbers are exact in fp32, whatever the order: every bit must be right.
struct ExactProduct {
  int64_t m, n, k;
  std::vector<float> a, b, c;

  ExactProduct(int64_t rows, int64_t columns, int64_t inner, uint64_t seed)
      : m(rows), n(columns), k(inner), a(whole(m * k, seed)), b(whole(k * n, seed + 1)), c(m * n) {}
  static std::vector<float> whole(int64_t count, uint64_t seed) {
    Random random(seed);
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = static_cast<float>(random.below(15)) - 7;
    return values;
  }
  Sgemm product() {
    return {.m = m, .n = n, .k = k, .a = a.data(), .lda = k, .b = b.data(), .ldb = n, .c = c.data(), .ldc = n};
  }
  std::vector<float> expected() const {
    std::vector<float> result(c.size());
    for (int64_t i = 0; i < m; ++i)
      for (int64_t j = 0; j < n; ++j) {
        int64_t sum = 0;
        for (int64_t l = 0; l < k; ++l) sum += static_cast<int64_t>(a[i * k + l]) * static_cast<int64_t>(b[l * n + j]);
        result[i * n + j] = static_cast<float>(sum);
      }
    return result;
  }
};

// Around the kernels' tiles, on one side at a time and on all.
TEST(Blas, SizesAroundTheTilesAreExact) {
  for (const int64_t odd : {1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 47, 63, 65}) {
    const int64_t sizes[][3] = {{odd, 64, 64}, {64, odd, 64}, {64, 64, odd}, {odd, odd, odd}};
    for (const auto& [m, n, k] : sizes) {
      ExactProduct exact(m, n, k, static_cast<uint64_t>(odd));
      sgemm(exact.product());
      ASSERT_EQ(exact.c, exact.expected()) << m << " " << n << " " << k;
    }
  }
}

// On any number of threads the same numbers, also where pieces are empty.
TEST(Blas, ThreadsChangeNoBitOfExactProducts) {
  for (const auto& [m, n, k] : {Case{40, 41, 43}, Case{257, 5, 67}, Case{5, 257, 67}, Case{31, 1, 2200}}) {
    ExactProduct exact(m, n, k, 5);
    const std::vector<float> expected = exact.expected();
    for (const int threads : {1, 2, 3, 5, 8, 13}) {
      ThreadPool pool(threads);
      exact.c.assign(exact.c.size(), -1.0f);
      parallel_sgemm(pool, exact.product());
      ASSERT_EQ(exact.c, expected) << m << " " << n << " " << k << " on " << threads;
    }
  }
}

// The lower part of a matrix, the middle columns of another, into the middle of a third.
TEST(Blas, PartsOfLargerMatrices) {
  constexpr int64_t kSide = 20, m = 6, n = 5, k = 7;
  const auto a = ExactProduct::whole(kSide * kSide, 1), b = ExactProduct::whole(kSide * kSide, 2);
  for (const bool ta : {false, true}) {
    for (const bool tb : {false, true}) {
      std::vector<float> c = ExactProduct::whole(kSide * kSide, 3), expected = c;
      constexpr int64_t kA = 11 * kSide + 2, kB = 3 * kSide + 9, kC = 4 * kSide + 8;
      for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j) {
          float& sum = expected[kC + i * kSide + j];
          sum *= -2;
          for (int64_t l = 0; l < k; ++l)
            sum += a[kA + (ta ? l * kSide + i : i * kSide + l)] * b[kB + (tb ? j * kSide + l : l * kSide + j)];
        }
      sgemm({.transpose_a = ta,
             .transpose_b = tb,
             .m = m,
             .n = n,
             .k = k,
             .a = a.data() + kA,
             .lda = kSide,
             .b = b.data() + kB,
             .ldb = kSide,
             .beta = -2,
             .c = c.data() + kC,
             .ldc = kSide});
      EXPECT_EQ(c, expected) << ta << tb;
    }
  }
}

// A matrix times its own transpose: both operands are the same memory.
TEST(Blas, AMatrixWithItself) {
  constexpr int64_t m = 37, k = 29;
  const auto a = ExactProduct::whole(m * k, 4);
  std::vector<float> c(m * m);
  ThreadPool pool(3);
  parallel_sgemm(pool, {.transpose_b = true,
                        .m = m,
                        .n = m,
                        .k = k,
                        .a = a.data(),
                        .lda = k,
                        .b = a.data(),
                        .ldb = k,
                        .c = c.data(),
                        .ldc = m});
  for (int64_t i = 0; i < m; ++i) {
    float square = 0;
    for (int64_t l = 0; l < k; ++l) square += a[i * k + l] * a[i * k + l];
    EXPECT_EQ(c[i * m + i], square) << i;
    for (int64_t j = 0; j < i; ++j) ASSERT_EQ(c[i * m + j], c[j * m + i]) << i << ", " << j;
  }
}

// What is no number comes through in its row and column, and nowhere else.
TEST(Blas, NotANumberStaysInItsRowAndColumn) {
  for (const int threads : {1, 4}) {
    ThreadPool pool(threads);
    ExactProduct exact(50, 60, 70, 6);
    for (int64_t i = 0; i < 50; ++i) exact.a[i * 70 + 69] = 1;  // times an infinity is one
    const std::vector<float> finite = exact.expected();
    exact.a[13 * 70 + 5] = NAN;
    exact.b[69 * 60 + 44] = INFINITY;
    parallel_sgemm(pool, exact.product());
    for (int64_t i = 0; i < 50; ++i)
      for (int64_t j = 0; j < 60; ++j) {
        const float got = exact.c[i * 60 + j];
        if (i == 13)
          ASSERT_TRUE(std::isnan(got)) << i << ", " << j;
        else if (j == 44)
          ASSERT_TRUE(std::isinf(got)) << i << ", " << j;
        else
          ASSERT_EQ(got, finite[i * 60 + j]) << i << ", " << j;
      }
  }
}

// A product too small to be shared, and one of nothing, on a pool.
TEST(Blas, EmptyAndTinyProductsOnAPool) {
  ThreadPool pool(4);
  float c[6] = {1, 2, 3, 4, 5, 6};
  const float x[6] = {1, 1, 1, 1, 1, 1}, bias[3] = {10, 20, 30};
  parallel_sgemm(pool, {.m = 0, .n = 3, .k = 2, .a = x, .lda = 2, .b = x, .ldb = 3, .c = c, .ldc = 3});
  parallel_sgemm(pool, {.m = 2, .n = 0, .k = 2, .a = x, .lda = 2, .b = x, .ldb = 3, .c = c, .ldc = 3});
  EXPECT_EQ(std::vector<float>(c, c + 6), (std::vector<float>{1, 2, 3, 4, 5, 6}));
  parallel_sgemm(pool, {.m = 2, .n = 3, .k = 0, .a = x, .lda = 1, .b = x, .ldb = 3, .c = c, .ldc = 3, .bias = bias});
  EXPECT_EQ(std::vector<float>(c, c + 6), (std::vector<float>{10, 20, 30, 10, 20, 30})) << "beta 0: the bias alone";
  parallel_sgemm(pool, {.m = 2, .n = 3, .k = 2, .a = x, .lda = 2, .b = x, .ldb = 3, .beta = 1, .c = c, .ldc = 3});
  EXPECT_EQ(std::vector<float>(c, c + 6), (std::vector<float>{12, 22, 32, 12, 22, 32}));
}

// Ranks in one process multiply at the same time, each with a pool of its own or on its own thread.
TEST(Blas, ManyAtTheSameTime) {
  std::atomic<int> wrong = 0;
  std::vector<std::thread> ranks;
  for (int r = 0; r < 4; ++r)
    ranks.emplace_back([&, r] {
      ThreadPool pool(2);
      ExactProduct exact(45 + r, 51, 47, static_cast<uint64_t>(r));
      const std::vector<float> expected = exact.expected();
      for (int round = 0; round < 20; ++round) {
        exact.c.assign(exact.c.size(), NAN);
        round % 2 == 0 ? sgemm(exact.product()) : parallel_sgemm(pool, exact.product());
        wrong += exact.c != expected;
      }
    });
  for (std::thread& rank : ranks) rank.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace sb
