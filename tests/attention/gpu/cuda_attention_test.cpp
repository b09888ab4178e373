#include "attention/gpu/cuda_attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "tests/attention/gpu/cuda_attention_fixture.h"

namespace sb {
namespace {

TEST_F(CudaAttentionTest, EqualsTheCpuOnTheSameLists) {
  struct Case {
    SelectionPattern pattern;
    int heads, kv_heads, d, block;
    std::vector<int32_t> cu;
    SelectionOrder order = SelectionOrder::causal;
  };
  const auto ahead = SelectionOrder::lookahead;
  const auto packed = sized<std::vector<int32_t>>({0, 1500, 1501, 1501, 2300, 3333}, {0, 330, 331, 331, 470, 780});
  const auto one = [](int32_t tokens, int32_t fewer) { return std::vector<int32_t>{0, sized(tokens, fewer)}; };
  const Case cases[] = {
      {SelectionPattern::dense, 8, 2, 64, 128, packed},        {SelectionPattern::dense, 7, 1, 128, 128, one(777, 300)},
      {SelectionPattern::topk, 8, 1, 64, 128, packed},         {SelectionPattern::topk, 14, 2, 128, 128, packed},
      {SelectionPattern::topk, 4, 2, 64, 256, one(4100, 900)}, {SelectionPattern::topk, 4, 4, 64, 64, packed},
      {SelectionPattern::topp, 8, 2, 64, 128, packed},         {SelectionPattern::mass, 8, 2, 128, 128, packed},
      {SelectionPattern::window, 2, 2, 64, 128, packed},       {SelectionPattern::topk, 4, 2, 16, 128, packed},
      {SelectionPattern::topk, 40, 2, 64, 128, packed},        {SelectionPattern::topk, 66, 1, 64, 128, one(1300, 300)},
      {SelectionPattern::mass, 8, 2, 64, 128, packed, ahead},  {SelectionPattern::topk, 8, 2, 64, 128, packed, ahead},
  };
  for (const Case& c : cases) {
    BlockIndex known;
    DType known_dtype = DType::f32;
    CudaResults want;
    const AttentionShape shape{c.heads, c.kv_heads, c.d, 1.f / std::sqrt(static_cast<float>(c.d))};
    const CudaOperands drawn(shape, c.cu.back(), DType::f32, 7);
    for (const DType dtype : {DType::bf16, DType::f32}) {
      const CudaOperands in(shape, drawn.tokens, dtype, drawn.q, drawn.k, drawn.v, drawn.dout);
      for (const bool portable : {false, true})
        for (const bool deterministic : {false, true}) {
          if (portable && deterministic) continue;
          if (dtype == DType::f32 && (portable || deterministic)) continue;
          SCOPED_TRACE(fmt::format("pattern {} {}:{} d{} block {} {} portable {} deterministic {}",
                                   static_cast<int>(c.pattern), c.heads, c.kv_heads, c.d, c.block, dtype_name(dtype),
                                   portable, deterministic));
          CudaAttentionOptions options = options_of(c.pattern, sized(700, 256));
          options.attention.selection.block = c.block;
          options.attention.selection.order = c.order;
          options.portable = portable;
          options.deterministic = deterministic;
          const auto attention = make_cuda_attention(options);
          BlockIndex index;
          const CudaResults got = run(*attention, in, {c.cu, {}}, dtype, &index);
          if (c.pattern != SelectionPattern::dense) {
            EXPECT_GT(index.entries(), 0);
          }
          // The same lists mostly come again.
          if (!(index == known) || dtype != known_dtype) {
            known = index;
            known_dtype = dtype;
            want = on_cpu(cpu_exec(), in, index);
          }
          expect_close(got, want, dtype);
          const AttentionReport report = attention->take_report();
          EXPECT_EQ(report.layers[0].pairs, index.token_pairs());
          EXPECT_EQ(report.layers[0].causal_pairs, index.causal_token_pairs());
          EXPECT_EQ(attention->take_report().layers[0].pairs, 0);
        }
    }
  }
}

TEST_F(CudaAttentionTest, TheFutureDoesNotShowInASingleBit) {
  // Scores far apart, so that rows are rescaled on the way: a neighbour's future must not show there either.
  struct Case {
    SelectionPattern pattern;
    int heads, d;
    float scale;
    DType dtype;
    BlockScore score = BlockScore::moments;
  };
  for (const Case& c : {Case{SelectionPattern::topk, 8, 64, 0.125f, DType::bf16},
                        {SelectionPattern::topk, 8, 64, 0.5f, DType::bf16, BlockScore::planes},
                        {SelectionPattern::mass, 14, 128, 4.0f, DType::bf16, BlockScore::planes},
                        {SelectionPattern::topk, 8, 64, 2.0f, DType::f32, BlockScore::planes},
                        {SelectionPattern::topk, 14, 64, 4.0f, DType::bf16},
                        {SelectionPattern::dense, 8, 128, 3.0f, DType::bf16},
                        {SelectionPattern::topp, 16, 128, 3.0f, DType::bf16},
                        {SelectionPattern::topk, 8, 64, 4.0f, DType::f32}}) {
    SCOPED_TRACE(
        fmt::format("pattern {} heads {} d {} {}", static_cast<int>(c.pattern), c.heads, c.d, dtype_name(c.dtype)));
    CudaAttentionOptions options = options_of(c.pattern, sized(700, 400));
    options.attention.selection.score = c.score;
    const auto attention = make_cuda_attention(options);
    const AttentionShape shape{c.heads, 2, c.d, c.scale};
    attention->use(made_up_energies(shape, 3));
    const std::vector<int32_t> cu{0, sized(3000, 1000)};
    CudaOperands in(shape, cu.back(), c.dtype, 5);
    const CudaResults before = run(*attention, in, {cu, {}}, c.dtype);
    const int64_t known = sized(1803, 603);  // inside a query block and inside a key block
    const auto change = [&](std::vector<float>& x, int heads) {
      for (size_t i = known * heads * c.d; i < x.size(); ++i) x[i] = rounded(-3.0f * x[i] + 0.5f, c.dtype);
    };
    change(in.q, c.heads);
    change(in.k, 2);
    change(in.v, 2);
    const CudaResults after = run(*attention, in, {cu, {}}, c.dtype);
    const auto end = static_cast<ptrdiff_t>(known * c.heads * c.d);
    EXPECT_TRUE(std::equal(before.out.begin(), before.out.begin() + end, after.out.begin()));
    EXPECT_NE(before.out, after.out);
  }
}

TEST_F(CudaAttentionTest, BudgetsAndDenseLayersCount) {
  const auto attention = make_cuda_attention(options_of(SelectionPattern::topk, sized(900, 400)));
  const AttentionShape shape{8, 2, 64, 0.125f};
  const auto cu = sized<std::vector<int32_t>>({0, 3000, 5000}, {0, 1200, 2000}),
             budgets = sized<std::vector<int32_t>>({1300, 5000}, {600, 2000});
  const CudaOperands in(shape, cu.back(), DType::bf16, 3);
  BlockIndex index;
  run(*attention, in, {cu, budgets}, DType::bf16, &index);
  EXPECT_FALSE(index.sequences()[0].dense);
  EXPECT_TRUE(index.sequences()[1].dense);
  const int64_t entries = index.entries();
  run(*attention, in, {cu, {}}, DType::bf16, &index);
  EXPECT_FALSE(index.sequences()[1].dense);
  EXPECT_NE(index.entries(), entries);
  run(*attention, in, {cu, {}}, DType::bf16, &index, 2);
  EXPECT_TRUE(index.sequences()[0].dense && index.sequences()[1].dense);
}

TEST_F(CudaAttentionTest, ManyMicroBatchesInTurn) {
  // More kinds than plans are kept, states held over others' steps.
  const auto attention = make_cuda_attention(options_of(SelectionPattern::topk, sized(300, 256)));
  const AttentionShape shape{4, 2, 64, 0.125f};
  std::vector<CudaOperands> operands;
  std::vector<CudaResults> first;
  for (int round = 0; round < 2; ++round)
    for (int i = 0; i < 80; ++i) {
      const std::vector<int32_t> cu{0, sized(400, 270) + i, sized(900, 400)};
      if (round == 0) operands.emplace_back(shape, cu.back(), DType::bf16, i);
      const CudaOperands& in = operands[i];
      BlockIndex index;
      const CudaResults got = run(*attention, in, {cu, {}}, DType::bf16, &index);
      if (round == 0 && i % 16 == 0) expect_close(got, on_cpu(cpu_exec(), in, index), DType::bf16);
      if (round == 0)
        first.push_back(got);
      else
        EXPECT_EQ(got.out, first[i].out);
    }
}

TEST_F(CudaAttentionTest, WhatIsReservedHoldsPlansOfAnyBudgets) {
  // Sequences that the configured budget covers select under lower ones, however short they are.
  const int64_t tokens = sized(4096, 2048);
  const AttentionShape shape{8, 2, 64, 0.125f};
  const CudaOperands in(shape, tokens, DType::bf16, 3);
  const Shape wide{tokens, 8, 64}, narrow{tokens, 2, 64};
  const DeviceTensor q(in.q, wide, DType::bf16), k(in.k, narrow, DType::bf16), v(in.v, narrow, DType::bf16);
  DeviceTensor out(wide, DType::bf16), lse({8, tokens}, DType::f32);
  for (const SelectionPattern pattern : {SelectionPattern::topk, SelectionPattern::vertical_slash}) {
    SCOPED_TRACE(static_cast<int>(pattern));
    CudaAttentionOptions options = options_of(pattern, tokens);
    options.attention.selection.dense_below = 0;
    options.attention.selection.query_block = 4;
    options.attention.largest_budget = tokens;
    if (pattern == SelectionPattern::vertical_slash) options.attention.selection.order = SelectionOrder::lookahead;
    const auto attention = make_cuda_attention(options);
    std::vector<std::unique_ptr<AttentionState>> states;
    states.push_back(attention->make_state());
    attention->reserve(shape, tokens, DType::bf16, states);
    Arena scratch = make_arena("scratch", attention->scratch_bytes(shape, tokens, 1), DeviceKind::cuda);
    const Exec exec{.device = DeviceKind::cuda, .pool = &pool_, .stream = stream_.get(), .scratch = &scratch};
    const cuda::Allocations before = cuda::allocations();
    for (const int64_t length : {tokens, int64_t{700}, int64_t{33}}) {
      std::vector<int32_t> cu{0};
      while (cu.back() < tokens) cu.push_back(static_cast<int32_t>(std::min(tokens, cu.back() + length)));
      const std::vector<int32_t> budgets(cu.size() - 1, static_cast<int32_t>(length / 4));
      attention->forward(exec, 0, shape, {cu, budgets}, {q.view(), k.view(), v.view(), out.view(), lse.view()},
                         *states[0], false);
      EXPECT_TRUE(cuda::allocations() == before) << "sequences of " << length;
    }
    cuda::synchronize(stream_.get());
  }
}

TEST_F(CudaAttentionTest, ThresholdsMeetTheQuotaAndTravel) {
  CudaAttentionOptions options = options_of(SelectionPattern::mass, sized(900, 400));
  const auto attention = make_cuda_attention(options);
  const AttentionShape shape{8, 2, 64, 0.125f};
  const std::vector<int32_t> cu{0, sized(5000, 2000)};
  const CudaOperands in(shape, cu.back(), DType::bf16, 3);
  LearnedSelection learned;
  double density = 0;
  for (int step = 0; step < 12; ++step) {
    attention->use(learned);
    run(*attention, in, {cu, {}}, DType::bf16);
    density = attention->take_report().layers[0].density();
    learned = learn(learned, attention->take_observations());
  }
  const auto topk = make_cuda_attention(options_of(SelectionPattern::topk, sized(900, 400)));
  run(*topk, in, {cu, {}}, DType::bf16);
  EXPECT_NEAR(density, topk->take_report().layers[0].density(), 0.08);
  ASSERT_EQ(learned.thresholds.size(), 1u);
  // Another one that is told the same selects the same, as often as it is asked.
  BlockIndex one, two;
  attention->use(learned);
  run(*attention, in, {cu, {}}, DType::bf16, &one);
  const auto other = make_cuda_attention(options);
  other->use(learned);
  for (int i = 0; i < 2; ++i) {
    run(*other, in, {cu, {}}, DType::bf16, &two);
    EXPECT_TRUE(one == two);
  }
}

CudaAttentionOptions vertical_slash_options() {
  CudaAttentionOptions options = options_of(SelectionPattern::vertical_slash, 600);
  options.attention.selection.order = SelectionOrder::lookahead;
  options.attention.selection.vertical_cap = 200;
  options.attention.selection.slash_cap = 4;
  options.attention.selection.vertical_coverage = 0.7;
  options.attention.selection.slash_coverage = 0.8;
  options.attention.coverage_rows = 5;
  return options;
}

TEST_F(CudaAttentionTest, VerticalSlashEqualsTheCpuOnTheSameLists) {
  for (const auto& [block, query_block, heads] : {std::tuple{128, 16, 4}, {64, 128, 14}, {256, 128, 2}, {64, 16, 4}})
    for (const DType dtype : {DType::f32, DType::bf16}) {
      SCOPED_TRACE(fmt::format("block {} query block {} heads {} {}", block, query_block, heads, dtype_name(dtype)));
      CudaAttentionOptions options = vertical_slash_options();
      options.attention.selection.block = block;
      options.attention.selection.query_block = query_block;
      const auto attention = make_cuda_attention(options);
      const AttentionShape shape{heads, 2, 64, 0.125f};
      const std::vector<int32_t> cu{0, 1500, 1501, 1501, 2300, 3333};
      const CudaOperands in(shape, cu.back(), dtype, 7);
      BlockIndex index;
      const CudaResults got = run(*attention, in, {cu, {}}, dtype, &index);
      EXPECT_TRUE(index.has_gathered_columns());
      expect_close(got, on_cpu(cpu_exec(), in, index), dtype);
      const AttentionReport report = attention->take_report();
      EXPECT_EQ(report.layers[0].pairs, index.token_pairs());
      EXPECT_EQ(report.layers[0].causal_pairs, index.causal_token_pairs());
      const SequenceTiles tiles = sequence_tiles(options.attention.selection, cu[1], 600);
      const BlockScoring scoring(BlockScore::moments, block);
      std::vector<float> statistics(BlockStatistics::floats(scoring, shape, tiles.blocks()));
      const Exec exec = cpu_exec();
      BlockStatistics::fill(exec, shape, scoring, in.k.data(), cu[1], statistics.data());
      const CoverageSample want =
          measure_coverage(exec, shape, tiles, {in.q.data(), in.k.data(), statistics.data(), scoring, 5, &index, 0});
      EXPECT_NEAR(report.samples[0].sample.held, want.held, 2e-4);
    }
}

TEST_F(CudaAttentionTest, VerticalSlashFindsWhatTheCpuFinds) {
  const auto cu = sized<std::vector<int32_t>>({0, 2000, 2900}, {0, 1000, 1700});
  const AttentionShape shapes[] = {{4, 2, 64, 0.125f}, {2, 2, 64, 0.125f}, {6, 2, 128, 0.09f}};
  for (const AttentionShape& shape : shapes)
    // Mostly the caps decide; few enough; the caps alone.
    for (const auto& [dtype, coverage] : {std::pair{DType::f32, 0.7},
                                          {DType::f32, 0.02},
                                          {DType::f32, 1.0},
                                          {DType::bf16, 0.7},
                                          {DType::bf16, 0.02},
                                          {DType::bf16, 1.0}}) {
      SCOPED_TRACE(fmt::format("{}:{} {} {}", shape.heads, shape.kv_heads, dtype_name(dtype), coverage));
      CudaAttentionOptions options = vertical_slash_options();
      options.attention.selection.vertical_coverage = coverage;
      const auto attention = make_cuda_attention(options);
      const CudaOperands in(shape, cu.back(), dtype, 3);
      BlockIndex index;
      run(*attention, in, {cu, {}}, dtype, &index);
      const BlockIndex want = selected_by_cpu(options, in, cu);
      ASSERT_EQ(index.rows(), want.rows());
      size_t all = 0;
      for (int64_t row = 0; row < want.rows(); ++row) {
        const BlockIndex::Row a = index.row(row), b = want.row(row);
        EXPECT_TRUE(std::ranges::equal(a.blocks, b.blocks)) << "row " << row;
        size_t same = 0;
        for (const int32_t column : b.columns) same += std::ranges::binary_search(a.columns, column);
        // Sums of another order: the last columns may be others.
        EXPECT_GE(same + 2, b.columns.size()) << "row " << row;
        EXPECT_LE(a.columns.size(), b.columns.size() + 1) << "row " << row;
        all += b.columns.size();
      }
      EXPECT_GT(all, 0u);
    }
}

TEST_F(CudaAttentionTest, RefusesWhatItCannotDo) {
  CudaAttentionOptions options = options_of(SelectionPattern::topk, 900);
  options.attention.selection.score_tokens = 48;  // does not divide the block
  EXPECT_THROW(make_cuda_attention(options), UserError);
  options = options_of(SelectionPattern::topk, 900);
  options.attention.selection.dense_layers = {3};
  EXPECT_THROW(make_cuda_attention(options), UserError);
}

}  // namespace
}  // namespace sb
