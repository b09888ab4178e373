#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "attention/select/block_scores.h"
#include "attention/select/block_statistics.h"
#include "attention/select/coverage.h"
#include "core/errors.h"
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

// Channels of every kv head in a mixed order of planes, other ones for every head.
LayerPlanes some_planes(const AttentionShape& shape, int channels) {
  LayerPlanes planes{shape.kv_heads, channels, {}, {}, {}};
  for (int head = 0; head < shape.kv_heads; ++head) {
    std::vector<int32_t> of_head;
    for (int c = 0; c < channels; ++c) of_head.push_back((c * 5 + head) % shape.head_dim);
    std::sort(of_head.begin(), of_head.end());
    of_head.erase(std::unique(of_head.begin(), of_head.end()), of_head.end());
    for (int32_t c = 0; std::ssize(of_head) < channels; ++c)
      if (std::find(of_head.begin(), of_head.end(), c) == of_head.end()) of_head.push_back(c);
    planes.channel.insert(planes.channel.end(), of_head.begin(), of_head.end());
    planes.scale.push_back(shape.scale * (1.0f + 0.25f * static_cast<float>(head)));
  }
  return planes;
}

std::vector<float> gathered(const Inputs& in, const BlockScoring& scoring, const LayerPlanes& planes,
                            ThreadPool& pool) {
  Exec exec;
  exec.pool = &pool;
  std::vector<float> rows(BlockStatistics::floats(scoring, in.shape, (in.tokens + scoring.block - 1) / scoring.block),
                          77.0f);
  BlockStatistics::fill(exec, in.shape, scoring, in.k.data(), in.tokens, rows.data(), &planes);
  return rows;
}

// Between neighbouring bf16 the nearer, of two equally near ones the even.
float nearest_bf16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const float below = std::bit_cast<float>(bits & 0xffff0000u),
              above = std::bit_cast<float>((bits & 0xffff0000u) + 0x10000u);
  const double to_below = std::abs(double{x} - below), to_above = std::abs(double{above} - x);
  if (to_below != to_above) return to_below < to_above ? below : above;
  return (bits >> 16 & 1) == 0 ? below : above;
}

TEST(BlockStatistics, SelectedChannelsOfEveryKeyAsPairsOfBf16) {
  for (const int threads : {1, 2}) {
    ThreadPool pool(threads);
    for (const int64_t tokens : {1, 63, 64, 65, 300}) {
      Inputs in = make_inputs(4, 2, 14, tokens, 7);
      if (tokens == 300) in.k[0] = in.k[13] = 1.00390625f;  // halfway between two, below an even one
      const LayerPlanes planes = some_planes(in.shape, 6);
      const BlockScoring scoring(BlockScore::planes, 64, 0, 6);
      const std::vector<float> rows = gathered(in, scoring, planes, pool);
      const int64_t blocks = (tokens + 63) / 64;
      ASSERT_EQ(std::ssize(rows), 2 * blocks * 3 * 64);
      for (int h = 0; h < 2; ++h)
        for (int64_t j = 0; j < blocks; ++j)
          for (int c = 0; c < 6; ++c)
            for (int64_t i = 0; i < 64; ++i) {
              const int64_t key = std::min(j * 64 + i, tokens - 1);  // beyond the end: the last one again
              const auto pair = std::bit_cast<uint32_t>(rows[((h * blocks + j) * 3 + c / 2) * 64 + i]);
              const float found = std::bit_cast<float>(c % 2 == 0 ? pair << 16 : pair & 0xffff0000u);
              EXPECT_EQ(found, nearest_bf16(in.k[(key * 2 + h) * 14 + planes.of(h)[c]]));
            }
    }
  }
}

// Scores of one token straight from the definition in fp64, and the most that rounding to bf16 can change them.
ExactScores largest_keys(const Inputs& in, const LayerPlanes& planes, int block, int64_t token, int kv_head,
                         int64_t count) {
  const int d = in.shape.head_dim, group = in.shape.group();
  ExactScores result;
  for (int64_t j = 0; j < count; ++j) {
    double top = -INFINITY;
    for (int64_t m = j * block; m < std::min(in.tokens, (j + 1) * block); ++m) {
      double s = 0, size = 0;
      for (const int32_t c : planes.of(kv_head)) {
        double q = 0;
        for (int h = kv_head * group; h < (kv_head + 1) * group; ++h) q += in.q[(token * in.shape.heads + h) * d + c];
        const double product = q / group * planes.scale[kv_head] * in.k[(m * in.shape.kv_heads + kv_head) * d + c];
        s += product;
        size += std::abs(product);
      }
      top = std::max(top, s);
      result.rounding = std::max(result.rounding, size / 256);
    }
    result.blocks.push_back(top);
  }
  return result;
}

struct PlaneCase {
  int heads, kv_heads, d, channels, block;
  int64_t tokens;
  float size = 1.0f;
};

TEST(BlockScorer, PlanesTakeTheLargestKeyOfTheMeanQuery) {
  ThreadPool pool(2);
  for (const PlaneCase& c : {PlaneCase{2, 2, 16, 2, 64, 64 * 9 + 5},
                             {4, 2, 16, 16, 64, 64 * 9},
                             {7, 1, 9, 6, 128, 128 * 5 + 1},
                             {16, 2, 64, 32, 128, 777},
                             {16, 1, 24, 10, 256, 1100},
                             {14, 2, 64, 32, 64, 64 * 21 + 63, 40.0f},
                             {2, 1, 2, 2, 64, 1},
                             {8, 1, 32, 32, 64, 130, 1e4f}}) {
    Inputs in = make_inputs(c.heads, c.kv_heads, c.d, c.tokens, 3);
    for (float& x : in.q) x *= c.size;
    const LayerPlanes planes = some_planes(in.shape, c.channels);
    const BlockScoring scoring(BlockScore::planes, c.block, 0, c.channels);
    const std::vector<float> rows = gathered(in, scoring, planes, pool);
    const int64_t blocks = (c.tokens + c.block - 1) / c.block;
    BlockScorer scorer(in.shape, scoring, in.q.data(), rows.data(), blocks, 0, &planes);
    for (int head = 0; head < c.kv_heads; ++head)
      for (const int64_t count : {int64_t{1}, blocks})                                // the last one may be short
        for (const int64_t tokens : {int64_t{1}, std::min<int64_t>(c.tokens, 71)}) {  // more than two panels
          const int64_t begin = c.tokens - tokens;
          const float* masses = scorer.token_masses(head, begin, begin + tokens, count);
          for (int64_t t = 0; t < tokens; t += 7) {
            const ExactScores exact = largest_keys(in, planes, c.block, begin + t, head, count);
            const double top = *std::max_element(exact.blocks.begin(), exact.blocks.end());
            double sum = 0;
            for (const double s : exact.blocks) sum += std::exp(s - top);
            for (int64_t j = 0; j < count; ++j) {
              const double expected = exact.blocks[j] - top - std::log(sum);
              EXPECT_NEAR(masses[t * count + j], expected, 1e-4 + 1e-5 * std::abs(expected) + 2 * exact.rounding)
                  << c.heads << ":" << c.kv_heads << " heads of " << c.d << " token " << t << " block " << j;
            }
          }
        }
  }
}

// Operands that bf16 holds: then nothing is rounded, and the largest key is exact whatever the processor.
TEST(BlockScorer, PlanesAreExactWhereBf16Is) {
  ThreadPool pool(1);
  Inputs in = make_inputs(8, 2, 32, 700, 13);
  for (auto* values : {&in.q, &in.k})
    for (float& x : *values) x = std::round(8.0f * std::clamp(x, -7.0f, 7.0f)) / 8.0f;
  for (int64_t t = 0; t < in.tokens; ++t)  // a group of equal queries has a mean that bf16 holds as well
    for (int h = 0; h < 8; ++h) std::copy_n(&in.q[(t * 8 + h / 4 * 4) * 32], 32, &in.q[(t * 8 + h) * 32]);
  in.shape.scale = 0.25f;
  LayerPlanes planes = some_planes(in.shape, 20);
  planes.scale = {0.25f, 0.5f};
  const BlockScoring scoring(BlockScore::planes, 64, 0, 20);
  const std::vector<float> rows = gathered(in, scoring, planes, pool);
  BlockScorer scorer(in.shape, scoring, in.q.data(), rows.data(), 11, 0, &planes);
  for (int head = 0; head < 2; ++head) {
    const float* masses = scorer.token_masses(head, 600, 700, 11);
    for (int64_t t = 0; t < 100; ++t) {
      const ExactScores exact = largest_keys(in, planes, 64, 600 + t, head, 11);
      for (int64_t j = 1; j < 11; ++j)  // differences: the sum of exponentials drops out
        EXPECT_NEAR(masses[t * 11 + j] - masses[t * 11], exact.blocks[j] - exact.blocks[0], 1e-5);
    }
  }
}

// A key or a query that is no number leaves the other blocks their order.
TEST(BlockScorer, PlanesLeaveOutWhatIsNoNumber) {
  ThreadPool pool(1);
  Inputs in = make_inputs(1, 1, 8, 64 * 4, 5);
  const LayerPlanes planes = some_planes(in.shape, 4);
  const BlockScoring scoring(BlockScore::planes, 64, 0, 4);
  const ExactScores exact = largest_keys(in, planes, 64, 255, 0, 3);
  std::fill_n(&in.k[64 * 8], 64 * 8, std::bit_cast<float>(0x7fffffffu));
  const std::vector<float> rows = gathered(in, scoring, planes, pool);
  BlockScorer scorer(in.shape, scoring, in.q.data(), rows.data(), 4, 0, &planes);
  const float* masses = scorer.token_masses(0, 255, 256, 3);
  EXPECT_EQ(masses[1], -INFINITY);
  EXPECT_NEAR(masses[2] - masses[0], exact.blocks[2] - exact.blocks[0], 2 * exact.rounding);
}

TEST(BlockScorer, PlanesThatAreMissingOrOfAnotherShapeAreRefused) {
  ThreadPool pool(1);
  Exec exec;
  exec.pool = &pool;
  const Inputs in = make_inputs(4, 2, 16, 100, 5);
  const BlockScoring scoring(BlockScore::planes, 64, 0, 8);
  std::vector<float> rows(BlockStatistics::floats(scoring, in.shape, 2));
  const LayerPlanes fewer = some_planes(in.shape, 6), one_head = some_planes({2, 1, 16, 1.0f}, 8);
  for (const LayerPlanes* planes : {static_cast<const LayerPlanes*>(nullptr), &fewer, &one_head}) {
    EXPECT_THROW(BlockStatistics::fill(exec, in.shape, scoring, in.k.data(), 100, rows.data(), planes), InternalError);
    EXPECT_THROW(BlockScorer(in.shape, scoring, in.q.data(), rows.data(), 2, 0, planes), InternalError);
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

    // By planes the same is held; what the score decides is the curve.
    const LayerPlanes planes = some_planes(in.shape, 8);
    const BlockScoring by_planes(BlockScore::planes, 64, 0, 8);
    const std::vector<float> keys = gathered(in, by_planes, planes, pool);
    const CoverageRequest plane_request{in.q.data(), in.k.data(), keys.data(), by_planes, 500, &index, 0, &planes};
    const CoverageSample plane_sample = measure_coverage(exec, in.shape, tiles, plane_request);
    EXPECT_EQ(plane_sample.held, sample.held);
    EXPECT_TRUE(std::is_sorted(plane_sample.curve.begin(), plane_sample.curve.end()));
    EXPECT_NEAR(plane_sample.curve.back(), 1.0, 1e-5);
    EXPECT_NE(plane_sample.curve, sample.curve);

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
