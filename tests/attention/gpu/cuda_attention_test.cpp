#include "attention/gpu/cuda_attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "tests/attention/gpu/cuda_case.h"

namespace sb {
namespace {

class CudaAttentionTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::problem().empty()) GTEST_SKIP() << cuda::problem();
    stream_ = cuda::make_stream();
  }

  Exec cpu_exec() { return {.pool = &pool_, .scratch = &cpu_scratch_}; }

  // Forward and backward on the device; the lists in `index`.
  CudaResults run(SelectingAttention& attention, const CudaOperands& in, const PackedSequences& sequences, DType dtype,
                  BlockIndex* index = nullptr, int layer = 0) {
    const int d = in.shape.head_dim;
    const Shape wide{in.tokens, in.shape.heads, d}, narrow{in.tokens, in.shape.kv_heads, d};
    const DeviceTensor q(in.q, wide, dtype), k(in.k, narrow, dtype), v(in.v, narrow, dtype), dout(in.dout, wide, dtype);
    DeviceTensor out(wide, dtype), lse({in.shape.heads, in.tokens}, DType::f32), dq(wide, dtype), dk(narrow, dtype),
        dv(narrow, dtype);
    Arena scratch = make_arena("scratch", attention.scratch_bytes(in.shape, in.tokens, 1), DeviceKind::cuda);
    const Exec exec{.device = DeviceKind::cuda, .pool = &pool_, .stream = stream_.get(), .scratch = &scratch};
    const auto state = attention.make_state();
    const AttentionOperands operands{q.view(), k.view(), v.view(), out.view(), lse.view()};
    attention.forward(exec, layer, in.shape, sequences, operands, *state, false);
    attention.backward(exec, layer, in.shape, sequences, operands, {dout.view(), dq.view(), dk.view(), dv.view()},
                       *state);
    cuda::synchronize(stream_.get());
    EXPECT_EQ(scratch.used(), 0);
    if (index != nullptr) *index = read_block_index(*state, pool_);
    CudaResults results{out.host(), lse.host(), dq.host(), dk.host(), dv.host()};
    // The same selections again give the same.
    attention.forward(exec, layer, in.shape, sequences, operands, *state, true);
    cuda::synchronize(stream_.get());
    EXPECT_EQ(out.host(), results.out);
    return results;
  }

  BlockIndex selected_by_cpu(const CudaAttentionOptions& options, const CudaOperands& in,
                             const std::vector<int32_t>& cu, const LearnedSelection& learned = {}) {
    SparseAttention cpu(options.attention);
    return run_on_cpu(cpu, in, cu, learned);
  }
  BlockIndex run_on_cpu(SparseAttention& cpu, const CudaOperands& in, const std::vector<int32_t>& cu,
                        const LearnedSelection& learned, int layer = 0) {
    cpu.use(learned);
    const auto state = cpu.make_state();
    CudaResults r;
    r.out.resize(in.q.size());
    r.lse.resize(in.shape.heads * in.tokens);
    const Exec exec = cpu_exec();
    const Shape wide{in.tokens, in.shape.heads, in.shape.head_dim},
        narrow{in.tokens, in.shape.kv_heads, in.shape.head_dim};
    cpu.forward(exec, layer, in.shape, {cu, {}},
                {{in.q.data(), wide},
                 {in.k.data(), narrow},
                 {in.v.data(), narrow},
                 {r.out.data(), wide},
                 {r.lse.data(), {in.shape.heads, in.tokens}}},
                *state, false);
    return SparseAttention::index(*state);
  }

  std::shared_ptr<void> stream_;
  ThreadPool pool_{std::min(8, available_cores())};
  Arena cpu_scratch_{"cpu", 256 << 20};
};

CudaAttentionOptions options_of(SelectionPattern pattern, int64_t budget) {
  CudaAttentionOptions options;
  options.attention.layers = 3;
  options.attention.selection.pattern = pattern;
  options.attention.selection.score = BlockScore::moments;
  options.attention.selection.budget = budget;
  options.attention.selection.dense_layers = {2};
  return options;
}

CudaAttentionOptions planes_options(SelectionPattern pattern, int64_t budget) {
  CudaAttentionOptions options = options_of(pattern, budget);
  options.attention.selection.score = BlockScore::planes;
  return options;
}

// Energies that make every layer and head take other planes.
LearnedSelection made_up_energies(const AttentionShape& shape, int layers) {
  LearnedSelection learned;
  const size_t width = static_cast<size_t>(shape.kv_heads) * static_cast<size_t>(shape.head_dim);
  for (int layer = 0; layer < layers; ++layer) {
    PlaneSums& sums = learned.planes.emplace_back();
    sums.tokens = 16;
    for (size_t i = 0; i < width; ++i)
      sums.query_squares.push_back(1.0 + static_cast<double>((i * 37 + 5 * layer) % 101));
    sums.key_sums.assign(width, 0.0);
    sums.key_squares.assign(width, 16.0);
  }
  return learned;
}

TEST_F(CudaAttentionTest, EqualsTheCpuOnTheSameLists) {
  struct Case {
    SelectionPattern pattern;
    int heads, kv_heads, d, block;
    std::vector<int32_t> cu;
    SelectionOrder order = SelectionOrder::causal;
  };
  const auto ahead = SelectionOrder::lookahead;
  const std::vector<int32_t> packed{0, 1500, 1501, 1501, 2300, 3333};
  const Case cases[] = {
      {SelectionPattern::dense, 8, 2, 64, 128, packed},       {SelectionPattern::dense, 7, 1, 128, 128, {0, 777}},
      {SelectionPattern::topk, 8, 1, 64, 128, packed},        {SelectionPattern::topk, 14, 2, 128, 128, packed},
      {SelectionPattern::topk, 4, 2, 64, 256, {0, 4100}},     {SelectionPattern::topk, 4, 4, 64, 64, packed},
      {SelectionPattern::topp, 8, 2, 64, 128, packed},        {SelectionPattern::mass, 8, 2, 128, 128, packed},
      {SelectionPattern::window, 2, 2, 64, 128, packed},      {SelectionPattern::topk, 4, 2, 16, 128, packed},
      {SelectionPattern::topk, 40, 2, 64, 128, packed},       {SelectionPattern::topk, 66, 1, 64, 128, {0, 1300}},
      {SelectionPattern::mass, 8, 2, 64, 128, packed, ahead}, {SelectionPattern::topk, 8, 2, 64, 128, packed, ahead},
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
          CudaAttentionOptions options = options_of(c.pattern, 700);
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
    CudaAttentionOptions options = options_of(SelectionPattern::topk, 900);
    options.attention.selection.score_tokens = score_tokens;
    options.attention.selection.order = order;
    const auto attention = make_cuda_attention(options);
    const AttentionShape shape{heads, 2, 64, 0.125f};
    const std::vector<int32_t> cu{0, 3000, 5000};
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
    CudaAttentionOptions options = planes_options(c.pattern, 900);
    options.attention.selection.block = c.block;
    options.attention.selection.score_channels = c.channels;
    options.attention.selection.order = c.order;
    options.portable = c.portable;
    // Mean queries are short: a large scale sets blocks apart.
    const AttentionShape shape{c.heads, c.kv_heads, c.d, 0.7f};
    const std::vector<int32_t> cu{0, 3000, 5000};
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
    const CudaAttentionOptions options = planes_options(SelectionPattern::mass, 900);
    const AttentionShape shape{6, 2, 64, 0.7f};
    const std::vector<int32_t> cu{0, 3000, 3000, 3517, 6000};
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
      const SequenceTiles tiles = sequence_tiles(options.attention.selection, cu[s + 1] - cu[s], 900);
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
    const std::vector<int32_t> cu{0, 6000};
    CudaOperands in(shape, cu.back(), dtype, 3);
    const int64_t needle = 1000, asks = 4991;
    for (int c = 0; c < 64; ++c) {
      const float sign = c % 2 == 0 ? 1.0f : -1.0f;
      for (int h = 0; h < 2; ++h) in.k[(needle * 2 + h) * 64 + c] = 2.0f * sign;
      for (int h = 0; h < 8; ++h) in.q[(asks * 8 + h) * 64 + c] = 0.625f * sign;
    }
    CudaAttentionOptions options = options_of(SelectionPattern::topk, 1300);
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
    CudaAttentionOptions options = options_of(c.pattern, 900);
    options.attention.selection.order = c.order;
    options.attention.selection.block = c.block;
    options.attention.selection.score_tokens = c.score_tokens;
    options.attention.coverage_rows = 7;
    const auto attention = make_cuda_attention(options);
    const AttentionShape shape{c.heads, 2, 64, 0.125f};
    const std::vector<int32_t> cu{0, 3001, 3001, 3004, 3600, 6600};  // the empty one is not measured, short ones dense
    const CudaOperands in(shape, cu.back(), c.dtype, 3);
    BlockIndex index;
    run(*attention, in, {cu, {}}, c.dtype, &index, 1);
    const AttentionReport report = attention->take_report();
    ASSERT_EQ(report.samples.size(), 4u);
    double held = 0;
    size_t at = 0;
    for (int s = 0; s < 5; ++s) {
      if (cu[s] == cu[s + 1]) continue;
      const SequenceTiles tiles = sequence_tiles(options.attention.selection, cu[s + 1] - cu[s], 900);
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
    EXPECT_EQ(report.layers[1].covered_tokens, 6600);
    EXPECT_NEAR(report.layers[1].coverage, held, 2e-4 * 6600);
    EXPECT_TRUE(attention->take_report().samples.empty());
  }
}

// On a dense layer, so that only the estimates decide.
TEST_F(CudaAttentionTest, MeasuresCoverageByPlanesLikeTheCpu) {
  for (const auto& [dtype, heads, block] :
       {std::tuple{DType::f32, 8, 128}, {DType::bf16, 14, 64}, {DType::bf16, 2, 256}}) {
    SCOPED_TRACE(fmt::format("{} heads {} block {}", dtype_name(dtype), heads, block));
    CudaAttentionOptions options = planes_options(SelectionPattern::topk, 900);
    options.attention.selection.block = block;
    options.attention.coverage_rows = 7;
    const AttentionShape shape{heads, 2, 64, 0.4f};
    const std::vector<int32_t> cu{0, 3001, 3001, 6600};
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
    CudaAttentionOptions options = options_of(c.pattern, 700);
    options.attention.selection.score = c.score;
    const auto attention = make_cuda_attention(options);
    const AttentionShape shape{c.heads, 2, c.d, c.scale};
    attention->use(made_up_energies(shape, 3));
    const std::vector<int32_t> cu{0, 3000};
    CudaOperands in(shape, 3000, c.dtype, 5);
    const CudaResults before = run(*attention, in, {cu, {}}, c.dtype);
    const int64_t known = 1803;  // inside a query block and inside a key block
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
  const auto attention = make_cuda_attention(options_of(SelectionPattern::topk, 900));
  const AttentionShape shape{8, 2, 64, 0.125f};
  const std::vector<int32_t> cu{0, 3000, 5000}, budgets{1300, 5000};
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
  const auto attention = make_cuda_attention(options_of(SelectionPattern::topk, 300));
  const AttentionShape shape{4, 2, 64, 0.125f};
  std::vector<CudaOperands> operands;
  std::vector<CudaResults> first;
  for (int round = 0; round < 2; ++round)
    for (int i = 0; i < 80; ++i) {
      const std::vector<int32_t> cu{0, 400 + i, 900};
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
  constexpr int64_t kTokens = 4096;
  const AttentionShape shape{8, 2, 64, 0.125f};
  const CudaOperands in(shape, kTokens, DType::bf16, 3);
  const Shape wide{kTokens, 8, 64}, narrow{kTokens, 2, 64};
  const DeviceTensor q(in.q, wide, DType::bf16), k(in.k, narrow, DType::bf16), v(in.v, narrow, DType::bf16);
  DeviceTensor out(wide, DType::bf16), lse({8, kTokens}, DType::f32);
  for (const SelectionPattern pattern : {SelectionPattern::topk, SelectionPattern::vertical_slash}) {
    SCOPED_TRACE(static_cast<int>(pattern));
    CudaAttentionOptions options = options_of(pattern, kTokens);
    options.attention.selection.dense_below = 0;
    options.attention.selection.query_block = 4;
    options.attention.largest_budget = kTokens;
    if (pattern == SelectionPattern::vertical_slash) options.attention.selection.order = SelectionOrder::lookahead;
    const auto attention = make_cuda_attention(options);
    std::vector<std::unique_ptr<AttentionState>> states;
    states.push_back(attention->make_state());
    attention->reserve(shape, kTokens, DType::bf16, states);
    Arena scratch = make_arena("scratch", attention->scratch_bytes(shape, kTokens, 1), DeviceKind::cuda);
    const Exec exec{.device = DeviceKind::cuda, .pool = &pool_, .stream = stream_.get(), .scratch = &scratch};
    const cuda::Allocations before = cuda::allocations();
    for (const int64_t length : {kTokens, int64_t{700}, int64_t{33}}) {
      std::vector<int32_t> cu{0};
      while (cu.back() < kTokens) cu.push_back(static_cast<int32_t>(std::min(kTokens, cu.back() + length)));
      const std::vector<int32_t> budgets(cu.size() - 1, static_cast<int32_t>(length / 4));
      attention->forward(exec, 0, shape, {cu, budgets}, {q.view(), k.view(), v.view(), out.view(), lse.view()},
                         *states[0], false);
      EXPECT_TRUE(cuda::allocations() == before) << "sequences of " << length;
    }
    cuda::synchronize(stream_.get());
  }
}

TEST_F(CudaAttentionTest, ThresholdsMeetTheQuotaAndTravel) {
  CudaAttentionOptions options = options_of(SelectionPattern::mass, 900);
  const auto attention = make_cuda_attention(options);
  const AttentionShape shape{8, 2, 64, 0.125f};
  const std::vector<int32_t> cu{0, 5000};
  const CudaOperands in(shape, cu.back(), DType::bf16, 3);
  LearnedSelection learned;
  double density = 0;
  for (int step = 0; step < 12; ++step) {
    attention->use(learned);
    run(*attention, in, {cu, {}}, DType::bf16);
    density = attention->take_report().layers[0].density();
    learned = learn(learned, attention->take_observations());
  }
  const auto topk = make_cuda_attention(options_of(SelectionPattern::topk, 900));
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
      const SequenceTiles tiles = sequence_tiles(options.attention.selection, 1500, 600);
      const BlockScoring scoring(BlockScore::moments, block);
      std::vector<float> statistics(BlockStatistics::floats(scoring, shape, tiles.blocks()));
      const Exec exec = cpu_exec();
      BlockStatistics::fill(exec, shape, scoring, in.k.data(), 1500, statistics.data());
      const CoverageSample want =
          measure_coverage(exec, shape, tiles, {in.q.data(), in.k.data(), statistics.data(), scoring, 5, &index, 0});
      EXPECT_NEAR(report.samples[0].sample.held, want.held, 2e-4);
    }
}

TEST_F(CudaAttentionTest, VerticalSlashFindsWhatTheCpuFinds) {
  const std::vector<int32_t> cu{0, 2000, 2900};
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
