// What attention on a GPU selects and measures, against the CPU.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "tests/attention/gpu/cuda_attention_fixture.h"

namespace sb {
namespace {

TEST_F(CudaAttentionTest, SelectsWhatTheCpuSelects) {
  // In fp32 masses differ by rounding to 16 bits only (the CPU's by rounding to bf16, where parts are judged), so most
  // entries agree.
  for (const auto& [score_tokens, dtype, heads, order] : {std::tuple{0, DType::f32, 8, SelectionOrder::causal},
                                                          {16, DType::f32, 8, SelectionOrder::causal},
                                                          {1, DType::f32, 8, SelectionOrder::causal},
                                                          {32, DType::bf16, 14, SelectionOrder::causal},
                                                          {1, DType::bf16, 8, SelectionOrder::causal},
                                                          {8, DType::bf16, 2, SelectionOrder::lookahead}}) {
    SCOPED_TRACE(fmt::format("score_tokens {} {} heads {}", score_tokens, dtype_name(dtype), heads));
    CudaAttentionOptions options = options_of(SelectionPattern::topk, sized(900, 400));
    options.attention.selection.score_tokens = score_tokens;
    options.attention.selection.order = order;
    const auto attention = make_cuda_attention(options);
    const AttentionShape shape{heads, 2, 64, 0.125f};
    const auto cu = sized<std::vector<int32_t>>({0, 3000, 5000}, {0, 1200, 2000});
    const CudaOperands in(shape, cu.back(), dtype, 3);
    BlockIndex index;
    run(*attention, in, {cu, {}}, dtype, &index);

    const BlockIndex want = selected_by_cpu(options, in, cu);
    ASSERT_EQ(index.rows(), want.rows());
    int64_t same = 0;
    for (int64_t row = 0; row < want.rows(); ++row) {
      const BlockIndex::Row a = index.row(row), b = want.row(row);
      ASSERT_EQ(a.blocks.size(), b.blocks.size());
      for (size_t i = 0; i < a.blocks.size(); ++i) same += std::ranges::binary_search(b.blocks, a.blocks[i]);
    }
    EXPECT_GT(static_cast<double>(same), 0.97 * static_cast<double>(want.entries()));
  }
}

TEST_F(CudaAttentionTest, SelectsByPlanesWhatTheCpuSelects) {
  struct Case {
    SelectionPattern pattern;
    int heads, kv_heads, d, block;
    DType dtype;
    int channels = 32;
    SelectionOrder order = SelectionOrder::causal;
    bool portable = false;
  };
  const auto ahead = SelectionOrder::lookahead;
  for (const Case& c : {Case{SelectionPattern::topk, 8, 2, 64, 128, DType::f32},
                        {SelectionPattern::topk, 4, 2, 32, 128, DType::f32, 10},
                        {SelectionPattern::topk, 8, 2, 64, 128, DType::bf16},
                        {SelectionPattern::topk, 14, 2, 128, 128, DType::bf16},
                        {SelectionPattern::topk, 14, 2, 128, 64, DType::bf16, 16},
                        {SelectionPattern::topk, 2, 2, 64, 256, DType::bf16, 64},
                        {SelectionPattern::topk, 16, 2, 128, 128, DType::bf16, 128},
                        {SelectionPattern::topk, 8, 2, 64, 128, DType::bf16, 32, ahead},
                        {SelectionPattern::topk, 8, 2, 64, 128, DType::bf16, 32, SelectionOrder::causal, true},
                        {SelectionPattern::mass, 8, 2, 64, 128, DType::f32},
                        {SelectionPattern::mass, 14, 2, 64, 128, DType::bf16},
                        {SelectionPattern::mass, 8, 2, 64, 128, DType::bf16, 32, ahead}}) {
    SCOPED_TRACE(fmt::format("pattern {} {}:{} d{} block {} {} {} channels", static_cast<int>(c.pattern), c.heads,
                             c.kv_heads, c.d, c.block, dtype_name(c.dtype), c.channels));
    CudaAttentionOptions options = planes_options(c.pattern, sized(900, 400));
    options.attention.selection.block = c.block;
    options.attention.selection.score_channels = c.channels;
    options.attention.selection.order = c.order;
    options.portable = c.portable;
    // Mean queries are short: a large scale sets blocks apart.
    const AttentionShape shape{c.heads, c.kv_heads, c.d, 0.7f};
    const auto cu = sized<std::vector<int32_t>>({0, 3000, 5000}, {0, 1200, 2000});
    const CudaOperands in(shape, cu.back(), c.dtype, 3);
    const LearnedSelection learned = made_up_energies(shape, 3);
    const auto attention = make_cuda_attention(options);
    attention->use(learned);
    BlockIndex index;
    run(*attention, in, {cu, {}}, c.dtype, &index);
    const BlockIndex want = selected_by_cpu(options, in, cu, learned);
    ASSERT_EQ(index.rows(), want.rows());
    int64_t same = 0;
    for (int64_t row = 0; row < want.rows(); ++row) {
      const BlockIndex::Row a = index.row(row), b = want.row(row);
      for (size_t i = 0; i < a.blocks.size(); ++i) same += std::ranges::binary_search(b.blocks, a.blocks[i]);
    }
    const double listed = static_cast<double>(std::max(want.entries(), index.entries()));
    EXPECT_GT(static_cast<double>(same), 0.97 * listed);
  }
}

TEST_F(CudaAttentionTest, ObservesEnergiesAndSelections) {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    SCOPED_TRACE(dtype_name(dtype));
    const CudaAttentionOptions options = planes_options(SelectionPattern::mass, sized(900, 400));
    const AttentionShape shape{6, 2, 64, 0.7f};
    const auto cu = sized<std::vector<int32_t>>({0, 3000, 3000, 3517, 6000}, {0, 1200, 1200, 1417, 2000});
    const CudaOperands in(shape, cu.back(), dtype, 3);
    const auto attention = make_cuda_attention(options);
    attention->use(made_up_energies(shape, 3));
    BlockIndex index;
    run(*attention, in, {cu, {}}, dtype, &index, 1);
    run(*attention, in, {cu, {}}, dtype, nullptr, 2);  // dense
    const SelectionObservations seen = attention->take_observations();
    ASSERT_EQ(seen.planes.size(), 3u);
    EXPECT_EQ(seen.planes[0].tokens, 0);
    EXPECT_EQ(seen.planes[1], seen.planes[2]);

    PlaneSums want;
    want.query_squares.assign(2 * 64, 0.0);
    want.key_sums = want.key_squares = want.query_squares;
    for (size_t s = 0; s + 1 < cu.size(); ++s)
      for (int64_t token = cu[s]; token < cu[s + 1]; token += 16) {
        want.tokens += 1;
        for (size_t i = 0; i < 2 * 64; ++i) {
          double query = 0;
          for (size_t h = 0; h < 3; ++h)
            query += in.q[static_cast<size_t>(token) * 6 * 64 + (i / 64 * 3 + h) * 64 + i % 64];
          const double key = in.k[static_cast<size_t>(token) * 2 * 64 + i];
          want.query_squares[i] += query / 3 * query / 3;
          want.key_sums[i] += key;
          want.key_squares[i] += key * key;
        }
      }
    EXPECT_EQ(seen.planes[1].tokens, want.tokens);
    for (size_t i = 0; i < 2 * 64; ++i) {
      EXPECT_NEAR(seen.planes[1].query_squares[i], want.query_squares[i], 1e-4 * want.query_squares[i]);
      EXPECT_NEAR(seen.planes[1].key_sums[i], want.key_sums[i], 1e-4);
      EXPECT_NEAR(seen.planes[1].key_squares[i], want.key_squares[i], 1e-4 * want.key_squares[i]);
    }
    // Selections of the sparse layer alone: two sequences, of classes of their own; the third runs dense.
    std::map<MassKey, MassCounts> masses;
    int64_t given = 0;
    for (const size_t s : {0u, 3u}) {
      const SequenceTiles tiles = sequence_tiles(options.attention.selection, cu[s + 1] - cu[s], sized(900, 400));
      masses[mass_key(1, tiles)] += {0, 2 * wanted_blocks(tiles)};
      given += 2 * given_blocks(tiles);
    }
    ASSERT_EQ(seen.masses.size(), masses.size());
    int64_t selected = 0;
    for (const auto& [key, counts] : seen.masses) {
      ASSERT_TRUE(masses.contains(key));
      EXPECT_EQ(counts.wanted, masses[key].wanted);
      selected += counts.selected;
    }
    EXPECT_EQ(selected, index.entries() - given);
    const SelectionObservations nothing = attention->take_observations();
    EXPECT_TRUE(nothing.masses.empty());
    for (const PlaneSums& sums : nothing.planes) EXPECT_EQ(sums.tokens, 0);
  }
}

TEST_F(CudaAttentionTest, SingleKeysFindTheNeedle) {
  // One key far back holds most of what a token attends to, the last of its query block, which has one block to add.
  for (const DType dtype : {DType::bf16, DType::f32}) {
    SCOPED_TRACE(dtype_name(dtype));
    const AttentionShape shape{8, 2, 64, 0.125f};
    const std::vector<int32_t> cu{0, sized(6000, 3000)};
    CudaOperands in(shape, cu.back(), dtype, 3);
    const int64_t needle = sized(1000, 500), asks = sized(4991, 2495);
    for (int c = 0; c < 64; ++c) {
      const float sign = c % 2 == 0 ? 1.0f : -1.0f;
      for (int h = 0; h < 2; ++h) in.k[(needle * 2 + h) * 64 + c] = 2.0f * sign;
      for (int h = 0; h < 8; ++h) in.q[(asks * 8 + h) * 64 + c] = 0.625f * sign;
    }
    CudaAttentionOptions options = options_of(SelectionPattern::topk, sized(1300, 900));
    options.attention.selection.score_tokens = 1;
    const auto attention = make_cuda_attention(options);
    BlockIndex index;
    run(*attention, in, {cu, {}}, dtype, &index);
    for (int head = 0; head < 2; ++head) {
      const auto row = index.row(BlockIndex::row_id(index.sequences()[0], head, asks / 16));
      EXPECT_TRUE(std::ranges::binary_search(row.blocks, needle / 128)) << "head " << head;
    }
  }
}

TEST_F(CudaAttentionTest, MeasuresCoverageLikeTheCpu) {
  struct Case {
    SelectionPattern pattern;
    SelectionOrder order;
    int block, heads;
    DType dtype;
    int score_tokens = 0;
  };
  for (const Case& c : {Case{SelectionPattern::topk, SelectionOrder::causal, 128, 8, DType::f32},
                        {SelectionPattern::topk, SelectionOrder::causal, 128, 8, DType::f32, 16},
                        {SelectionPattern::topk, SelectionOrder::causal, 256, 4, DType::f32, 1},
                        {SelectionPattern::topk, SelectionOrder::causal, 128, 8, DType::bf16, 16},
                        {SelectionPattern::topk, SelectionOrder::causal, 256, 14, DType::bf16, 2},
                        {SelectionPattern::topk, SelectionOrder::causal, 128, 14, DType::bf16, 1},
                        {SelectionPattern::topk, SelectionOrder::causal, 64, 14, DType::f32},
                        {SelectionPattern::topp, SelectionOrder::causal, 256, 2, DType::f32},
                        {SelectionPattern::mass, SelectionOrder::lookahead, 128, 8, DType::bf16},
                        {SelectionPattern::window, SelectionOrder::causal, 128, 8, DType::bf16}}) {
    SCOPED_TRACE(fmt::format("pattern {} block {} heads {}", static_cast<int>(c.pattern), c.block, c.heads));
    CudaAttentionOptions options = options_of(c.pattern, sized(900, 400));
    options.attention.selection.order = c.order;
    options.attention.selection.block = c.block;
    options.attention.selection.score_tokens = c.score_tokens;
    options.attention.coverage_rows = 7;
    const auto attention = make_cuda_attention(options);
    const AttentionShape shape{c.heads, 2, 64, 0.125f};
    const auto cu =
        sized<std::vector<int32_t>>({0, 3001, 3001, 3004, 3600, 6600},
                                    {0, 601, 601, 604, 900, 1600});  // the empty one is not measured, short ones dense
    const CudaOperands in(shape, cu.back(), c.dtype, 3);
    BlockIndex index;
    run(*attention, in, {cu, {}}, c.dtype, &index, 1);
    const AttentionReport report = attention->take_report();
    ASSERT_EQ(report.samples.size(), 4u);
    double held = 0;
    size_t at = 0;
    for (int s = 0; s < 5; ++s) {
      if (cu[s] == cu[s + 1]) continue;
      const SequenceTiles tiles = sequence_tiles(options.attention.selection, cu[s + 1] - cu[s], sized(900, 400));
      const float* k = in.k.data() + int64_t{cu[s]} * 2 * 64;
      const BlockScoring scoring(BlockScore::moments, c.block, c.score_tokens);
      std::vector<float> statistics(BlockStatistics::floats(scoring, shape, tiles.blocks()));
      const Exec exec = cpu_exec();
      BlockStatistics::fill(exec, shape, scoring, k, tiles.tokens, statistics.data());
      const CoverageSample want =
          measure_coverage(exec, shape, tiles,
                           {in.q.data() + int64_t{cu[s]} * c.heads * 64, k, statistics.data(), scoring, 7, &index, s});
      const MeasuredCoverage& got = report.samples[at++];
      EXPECT_EQ(got.layer, 1);
      EXPECT_EQ(got.tokens, tiles.tokens);
      EXPECT_EQ(got.sample.rows, want.rows);
      EXPECT_NEAR(got.sample.held, want.held, 2e-4);
      ASSERT_EQ(got.sample.curve.size(), want.curve.size());
      // Blocks of nearly the same estimate may change places.
      for (size_t i = 0; i < want.curve.size(); ++i) EXPECT_NEAR(got.sample.curve[i], want.curve[i], 2e-3);
      held += want.held * static_cast<double>(tiles.tokens);
    }
    EXPECT_EQ(report.layers[1].covered_tokens, cu.back());
    EXPECT_NEAR(report.layers[1].coverage, held, 2e-4 * cu.back());
    EXPECT_TRUE(attention->take_report().samples.empty());
  }
}

// On a dense layer, so that only the estimates decide.
TEST_F(CudaAttentionTest, MeasuresCoverageByPlanesLikeTheCpu) {
  for (const auto& [dtype, heads, block] :
       {std::tuple{DType::f32, 8, 128}, {DType::bf16, 14, 64}, {DType::bf16, 2, 256}}) {
    SCOPED_TRACE(fmt::format("{} heads {} block {}", dtype_name(dtype), heads, block));
    CudaAttentionOptions options = planes_options(SelectionPattern::topk, sized(900, 400));
    options.attention.selection.block = block;
    options.attention.coverage_rows = 7;
    const AttentionShape shape{heads, 2, 64, 0.4f};
    const auto cu = sized<std::vector<int32_t>>({0, 3001, 3001, 6600}, {0, 1101, 1101, 2600});
    const CudaOperands in(shape, cu.back(), dtype, 3);
    const LearnedSelection learned = made_up_energies(shape, 3);
    const auto attention = make_cuda_attention(options);
    attention->use(learned);
    run(*attention, in, {cu, {}}, dtype, nullptr, 2);
    SparseAttention cpu(options.attention);
    run_on_cpu(cpu, in, cu, learned, 2);
    const AttentionReport got = attention->take_report(), want = cpu.take_report();
    ASSERT_EQ(got.samples.size(), want.samples.size());
    for (size_t s = 0; s < want.samples.size(); ++s) {
      const CoverageSample &x = got.samples[s].sample, &y = want.samples[s].sample;
      EXPECT_NEAR(x.held, y.held, 2e-4);
      ASSERT_EQ(x.curve.size(), y.curve.size());
      for (size_t i = 0; i < y.curve.size(); ++i) EXPECT_NEAR(x.curve[i], y.curve[i], 5e-3);
    }
  }
}

}  // namespace
}  // namespace sb
