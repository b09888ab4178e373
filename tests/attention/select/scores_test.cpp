#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention/select/block_scores.h"
#include "attention/select/block_statistics.h"
#include "attention/select/coverage.h"
#include "core/random.h"

namespace sb {
namespace {

struct Inputs {
  AttentionShape shape;
  int64_t tokens;
  std::vector<float> q, k;
};

Inputs make_inputs(int heads, int kv_heads, int d, int64_t tokens, uint64_t seed) {
  Inputs in{{heads, kv_heads, d, 1.0f / std::sqrt(static_cast<float>(d))}, tokens, {}, {}};
  Random random(seed);
  in.q.resize(tokens * heads * d);
  in.k.resize(tokens * kv_heads * d);
  for (float& x : in.q) x = static_cast<float>(random.normal());
  for (float& x : in.k) x = static_cast<float>(random.normal() + 0.5);
  return in;
}

std::vector<float> statistics(const Inputs& in, const BlockScoring& scoring, ThreadPool& pool) {
  Exec exec;
  exec.pool = &pool;
  const int64_t blocks = (in.tokens + scoring.block - 1) / scoring.block;
  std::vector<float> rows(BlockStatistics::floats(scoring, in.shape, blocks), 77.0f);
  BlockStatistics::fill(exec, in.shape, scoring, in.k.data(), in.tokens, rows.data());
  return rows;
}

const BlockScoring kMoments(BlockScore::moments, 64);

TEST(BlockStatistics, MeanAndVarianceOfEveryBlock) {
  for (const int threads : {1, 2}) {
    ThreadPool pool(threads);
    for (const int64_t tokens : {1, 63, 64, 65, 300}) {
      const Inputs in = make_inputs(4, 2, 16, tokens, 7);
      const std::vector<float> rows = statistics(in, kMoments, pool);
      const int64_t blocks = (tokens + 63) / 64;
      for (int h = 0; h < 2; ++h) {
        for (int64_t j = 0; j < blocks; ++j) {
          for (int c = 0; c < 16; ++c) {
            double sum = 0, squares = 0;
            const int64_t end = std::min<int64_t>(tokens, j * 64 + 64);
            for (int64_t t = j * 64; t < end; ++t) sum += in.k[(t * 2 + h) * 16 + c];
            const double mean = sum / static_cast<double>(end - j * 64);
            for (int64_t t = j * 64; t < end; ++t) squares += std::pow(in.k[(t * 2 + h) * 16 + c] - mean, 2);
            const float* row = rows.data() + (h * blocks + j) * 32;
            EXPECT_NEAR(row[c], mean, 1e-5);
            EXPECT_NEAR(row[16 + c], squares / static_cast<double>(end - j * 64), 1e-4);
          }
        }
      }
    }
  }
}

// The rows of parts, with odd tails, and zeros where there are no keys.
TEST(BlockStatistics, MeanAndVarianceOfEveryPart) {
  ThreadPool pool(2);
  for (const int64_t tokens : {1, 13, 64, 1100}) {
    for (const int part : {1, 8, 32}) {
      const Inputs in = make_inputs(2, 2, 8, tokens, 15);
      const BlockScoring scoring(BlockScore::moments, 64, part);
      const std::vector<float> rows = statistics(in, scoring, pool);
      const int64_t blocks = (tokens + 63) / 64, width = part == 1 ? 8 : 16, parts = 64 / part;
      ASSERT_EQ(rows.size(), static_cast<size_t>(2 * blocks * width * parts));
      for (int64_t j = 0; j < blocks; ++j) {
        for (int64_t p = 0; p < parts; ++p) {
          const int64_t begin = j * 64 + p * part, end = std::min(tokens, begin + part);
          const double count = static_cast<double>(std::max<int64_t>(1, end - begin));
          for (int h = 0; h < 2; ++h) {
            for (int c = 0; c < 8; ++c) {
              double sum = 0, squares = 0;
              for (int64_t t = begin; t < end; ++t) sum += in.k[(t * 2 + h) * 8 + c];
              for (int64_t t = begin; t < end; ++t) squares += std::pow(in.k[(t * 2 + h) * 8 + c] - sum / count, 2);
              const float* found = rows.data() + (h * blocks + j) * width * parts + p;
              EXPECT_NEAR(found[c * parts], sum / count, 1e-5);
              if (part > 1) {
                EXPECT_NEAR(found[(8 + c) * parts], squares / count, 1e-4);
              }
            }
          }
        }
      }
    }
  }
}

// The formula of the log-mass, term by term in fp64.
TEST(BlockScorer, RelativeMassesMatchTheFormula) {
  ThreadPool pool(1);
  for (const BlockScore score : {BlockScore::moments, BlockScore::mean}) {
    const Inputs in = make_inputs(6, 2, 32, 64 * 9 + 5, 3);
    const BlockScoring scoring(score, 64);
    const std::vector<float> rows = statistics(in, scoring, pool);
    const int64_t blocks = 10, count = 7, width = scoring.row_width(32);
    BlockScorer scorer(in.shape, scoring, in.q.data(), rows.data(), blocks);
    const float* masses = scorer.token_masses(1, 450, 470, count);
    for (int64_t t = 0; t < 20; ++t) {
      std::vector<double> expected(count, -1e30);
      for (int h = 3; h < 6; ++h) {
        const float* q = in.q.data() + ((450 + t) * 6 + h) * 32;
        std::vector<double> s(count);
        double sum = 0;
        for (int64_t j = 0; j < count; ++j) {
          const float* row = rows.data() + (blocks + j) * width;
          for (int c = 0; c < 32; ++c) {
            s[j] += q[c] * row[c] / std::sqrt(32.0);
            if (score == BlockScore::moments) s[j] += 0.5 * q[c] * q[c] * row[32 + c] / 32.0;
          }
          sum += std::exp(s[j]);
        }
        for (int64_t j = 0; j < count; ++j) expected[j] = std::max(expected[j], s[j] - std::log(sum));
      }
      for (int64_t j = 0; j < count; ++j) EXPECT_NEAR(masses[t * count + j], expected[j], 1e-4);
    }
  }
}

// Log-sum-exp over the parts of every block, straight from the keys in fp64, for one query; with single keys that is
// the exact log-mass. `rounding`: the most that operands rounded to bf16 can change any part's score.
struct ExactScores {
  std::vector<double> blocks;
  double rounding = 0;
};
ExactScores exact_scores(const Inputs& in, BlockScore score, int part, int64_t token, int head, int64_t count) {
  const int d = in.shape.head_dim, kv_heads = in.shape.kv_heads, kv_head = head / in.shape.group();
  const float* q = in.q.data() + (token * in.shape.heads + head) * d;
  ExactScores result;
  for (int64_t j = 0; j < count; ++j) {
    std::vector<double> parts;
    for (int64_t first = j * 64; first < (j + 1) * 64; first += part) {
      double s = 0, size = 0;
      for (int c = 0; c < d; ++c) {
        double mean = 0, variance = 0;
        const auto key = [&](int m) { return double{in.k[((first + m) * kv_heads + kv_head) * d + c]}; };
        for (int m = 0; m < part; ++m) mean += key(m) / part;
        for (int m = 0; m < part; ++m) variance += std::pow(key(m) - mean, 2) / part;
        const double linear = q[c] * mean / std::sqrt(static_cast<double>(d)),
                     square = 0.5 * q[c] * q[c] * variance / d;
        s += linear + (score == BlockScore::moments ? square : 0.0);
        size += std::abs(linear) + square;
      }
      parts.push_back(s);
      result.rounding = std::max(result.rounding, size / 256);
    }
    const double top = *std::max_element(parts.begin(), parts.end());
    double sum = 0;
    for (const double s : parts) sum += std::exp(s - top);
    result.blocks.push_back(top + std::log(sum));
  }
  return result;
}

// Large queries: the exponentials of a row then differ by more than fp32 can hold.
TEST(BlockScorer, PartsAddUpTheirMasses) {
  ThreadPool pool(1);
  for (const float size : {1.0f, 25.0f}) {
    for (const int d : {24, 7}) {
      Inputs in = make_inputs(6, 2, d, 64 * 19 + 5, 3);
      for (float& x : in.q) x *= size;
      for (const BlockScore score : {BlockScore::moments, BlockScore::mean}) {
        for (const int part : {1, 2, 8, 32}) {
          const BlockScoring scoring(score, 64, part);
          const std::vector<float> rows = statistics(in, scoring, pool);
          BlockScorer scorer(in.shape, scoring, in.q.data(), rows.data(), 20);
          for (const int64_t count : {1, 19}) {
            for (const int64_t tokens : {1, 13}) {  // 3 and 39 rows: less and more than a panel
              const int64_t begin = count * 64 - 8;
              const float* masses = scorer.token_masses(1, begin, begin + tokens, count);
              for (const int64_t t : {int64_t{0}, tokens - 1}) {
                std::vector<double> expected(count, -1e30);
                double rounding = 0;
                for (int h = 3; h < 6; ++h) {
                  const ExactScores exact = exact_scores(in, score, part, begin + t, h, count);
                  const double top = *std::max_element(exact.blocks.begin(), exact.blocks.end());
                  double sum = 0;
                  for (const double s : exact.blocks) sum += std::exp(s - top);
                  for (int64_t j = 0; j < count; ++j)
                    expected[j] = std::max(expected[j], exact.blocks[j] - top - std::log(sum));
                  rounding = std::max(rounding, exact.rounding);
                }
                for (int64_t j = 0; j < count; ++j) {
                  EXPECT_NEAR(masses[t * count + j], expected[j], 1e-4 + 1e-5 * std::abs(expected[j]) + rounding)
                      << "part " << part << " block " << j << " of " << count;
                }
              }
            }
          }
        }
      }
    }
  }
}

TEST(BlockScorer, TileMassesSumTheTokens) {
  ThreadPool pool(1);
  const Inputs in = make_inputs(2, 1, 16, 600, 9);
  const std::vector<float> rows = statistics(in, kMoments, pool);
  SequenceTiles tiles;
  tiles.tokens = 600;
  tiles.block = 64;
  tiles.query_block = 16;
  const int64_t count = 9;
  BlockScorer scorer(in.shape, kMoments, in.q.data(), rows.data(), 10);
  const float* got = scorer.tile_masses(0, tiles, 36, 38, count);
  const std::vector<float> sums(got, got + 2 * count);
  const float* tokens = scorer.token_masses(0, 576, 600, count);
  for (int64_t j = 0; j < count; ++j) {
    double first = 0, second = 0;
    for (int64_t t = 0; t < 16; ++t) first += std::exp(tokens[t * count + j]);
    for (int64_t t = 16; t < 24; ++t) second += std::exp(tokens[t * count + j]);
    EXPECT_NEAR(sums[j], std::log(first), 1e-4);
    EXPECT_NEAR(sums[count + j], std::log(second), 1e-4);
  }
}

TEST(CoverageGrid, AscendsToEverything) {
  for (const int64_t tokens : {1, 64, 257, 5000, 100000}) {
    const std::vector<int64_t> grid = coverage_grid(tokens, 64);
    EXPECT_TRUE(std::is_sorted(grid.begin(), grid.end()));
    EXPECT_GE(grid.back(), tokens);
    EXPECT_LT(grid.back(), tokens + 64);
  }
}

// Lists with known content against a softmax written out in fp64.
TEST(Coverage, HeldMassIsExact) {
  const Inputs in = make_inputs(4, 2, 16, 500, 21);
  SequenceTiles tiles;
  tiles.tokens = 500;
  tiles.block = 64;
  tiles.query_block = 16;
  double held = 0;
  for (int64_t t = 0; t < 500; ++t) {
    for (int h = 0; h < 4; ++h) {
      double all = 0, kept = 0;
      for (int64_t m = 0; m <= t; ++m) {
        double s = 0;
        for (int c = 0; c < 16; ++c) s += in.q[(t * 4 + h) * 16 + c] * in.k[(m * 2 + h / 2) * 16 + c];
        const double e = std::exp(s * in.shape.scale);
        all += e;
        const bool own = m / 64 == t / 64, listed = m / 64 == 1 && t / 64 > 1 && t % 16 >= 2;
        const bool column = m == 7 && t / 64 > 0;
        if (own || listed || column) kept += e;
      }
      held += kept / all / 2000.0;
    }
  }
  for (const int threads : {1, 2}) {
    ThreadPool pool(threads);
    Exec exec;
    exec.pool = &pool;
    const std::vector<float> rows = statistics(in, kMoments, pool);
    // Own block, block 1 from the tile's third token on, and column 7.
    const std::vector<int32_t> cu = {0, 500};
    BlockIndex index;
    BlockIndexBuilder builder;
    builder.begin(index, {64, 16, 2}, cu, {}, 1);
    for (int head = 0; head < 2; ++head) {
      for (int tile = 0; tile < tiles.tiles(); ++tile) {
        std::vector<IndexEntry> list;
        std::vector<int32_t> columns;
        if (tiles.competing(tile) > 1) list.push_back({1, 2});
        if (tiles.competing(tile) > 0) columns.push_back(7);
        list.push_back({static_cast<uint16_t>(tiles.competing(tile)), 0});
        builder.set_row(0, BlockIndex::row_id(index.sequences()[0], head, tile), list, columns);
      }
    }
    builder.finish(pool);
    const CoverageRequest request{in.q.data(), in.k.data(), rows.data(), kMoments, 500, &index, 0};
    const CoverageSample sample = measure_coverage(exec, in.shape, tiles, request);
    EXPECT_EQ(sample.rows, 500);
    EXPECT_NEAR(sample.held, held, 1e-5);
    EXPECT_TRUE(std::is_sorted(sample.curve.begin(), sample.curve.end()));
    EXPECT_NEAR(sample.curve.back(), 1.0, 1e-5);

    BlockIndex dense;
    const std::vector<uint8_t> is_dense = {1};
    builder.begin(dense, {64, 16, 2}, cu, is_dense, 1);
    builder.finish(pool);
    const CoverageRequest all{in.q.data(), in.k.data(), rows.data(), kMoments, 50, &dense, 0};
    EXPECT_DOUBLE_EQ(measure_coverage(exec, in.shape, tiles, all).held, 1.0);
  }
}

}  // namespace
}  // namespace sb
