#include "attention/cpu/sparse_attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "attention/cpu/dense_attention.h"
#include "attention/forwarding_attention.h"
#include "core/errors.h"
#include "tests/attention/reference.h"

namespace sb {
namespace {

using Pattern = SelectionPattern;
using Order = SelectionOrder;

// Passes calls on, hands given budgets in, and keeps a copy of the index that was used.
class Recording final : public ForwardingAttention {
 public:
  Recording(Attention& inner, std::vector<int32_t> budgets = {}, int layer = 0)
      : ForwardingAttention(inner), budgets_(std::move(budgets)), layer_(layer) {}
  void forward(const Exec& exec, int, const AttentionShape& shape, const PackedSequences& sequences,
               const AttentionOperands& operands, AttentionState& state, bool replay) override {
    ForwardingAttention::forward(exec, layer_, shape, {sequences.cu_seqlens, budgets_}, operands, state, replay);
    index = SparseAttention::index(state);
  }
  void backward(const Exec& exec, int, const AttentionShape& shape, const PackedSequences& sequences,
                const AttentionOperands& operands, const AttentionGradients& gradients,
                AttentionState& state) override {
    ForwardingAttention::backward(exec, layer_, shape, {sequences.cu_seqlens, budgets_}, operands, gradients, state);
  }

  BlockIndex index;

 private:
  std::vector<int32_t> budgets_;
  int layer_;
};

SparseAttention::Options options_for(Pattern pattern, Order order, int query_block, int64_t budget, int block = 64) {
  SparseAttention::Options options;
  options.layers = 2;
  options.selection.pattern = pattern;
  options.selection.order = order;
  options.selection.block = block;
  options.selection.query_block = query_block;
  options.selection.budget = budget;
  options.selection.vertical_cap = 40;
  options.selection.slash_cap = 4;
  options.selection.slash_coverage = options.selection.vertical_coverage = 0.6;
  options.selection.coverage = 0.7;
  return options;
}

struct PatternCase {
  Pattern pattern;
  Order order;
  const char* name;
};
const std::vector<PatternCase> kPatterns = {
    {Pattern::topk, Order::causal, "topk_causal"}, {Pattern::topk, Order::lookahead, "topk_lookahead"},
    {Pattern::topp, Order::causal, "topp_causal"}, {Pattern::topp, Order::lookahead, "topp_lookahead"},
    {Pattern::mass, Order::causal, "mass_causal"}, {Pattern::mass, Order::lookahead, "mass_lookahead"},
    {Pattern::window, Order::causal, "window"},    {Pattern::vertical_slash, Order::lookahead, "vertical_slash"}};

class SparsePattern : public testing::TestWithParam<PatternCase> {};

TEST_P(SparsePattern, EqualsMaskedDense) {
  struct Shape {
    int heads, kv_heads, d, block, query_block;
    int64_t budget;
    std::vector<int32_t> lengths;
  };
  const std::vector<Shape> shapes = {{2, 2, 16, 64, 16, 64, {1, 63, 64, 65}},
                                     {4, 2, 16, 64, 16, 320, {900, 3, 511}},
                                     {7, 1, 64, 64, 16, 320, {700}},
                                     {8, 1, 16, 128, 1, 640, {800}},
                                     {2, 1, 128, 128, 64, 640, {127, 128, 129, 900}},
                                     {4, 4, 16, 64, 128, 384, {1000, 130}},
                                     {4, 2, 32, 256, 32, 1280, {2000}},
                                     {2, 1, 16, 64, 8, 448, {450, 0, 600}}};
  for (const Shape& shape : shapes) {
    SparseAttention::Options options =
        options_for(GetParam().pattern, GetParam().order, shape.query_block, shape.budget, shape.block);
    options.selection.dense_below = 0;
    const AttentionCase c({shape.heads, shape.kv_heads, shape.d, 0.3f}, shape.lengths, 7);
    SparseAttention attention(options);
    Recording recording(attention);
    const AttentionResults<float> results = run_attention(recording, c, 2);
    SCOPED_TRACE(std::string(GetParam().name) + " tokens " + std::to_string(c.tokens()) + " query_block " +
                 std::to_string(shape.query_block));
    expect_close(results, reference_attention(c, sees_by(recording.index, c.shape)));
    SparseAttention again(options);
    Recording one_thread(again);
    EXPECT_TRUE(run_attention(one_thread, c, 1) == results) << "1 and 2 threads differ";
    EXPECT_TRUE(one_thread.index == recording.index);
  }
}

// Tokens after `cut` get other queries, keys and values.
AttentionCase changed_after(const AttentionCase& c, int cut) {
  AttentionCase other = c;
  const AttentionCase fresh(c.shape, {static_cast<int32_t>(c.tokens())}, 999);
  const auto splice = [&](std::vector<float>& into, const std::vector<float>& from, int heads) {
    const int64_t at = int64_t{cut + 1} * heads * c.shape.head_dim;
    std::copy(from.begin() + at, from.end(), into.begin() + at);
  };
  splice(other.q, fresh.q, c.shape.heads);
  splice(other.k, fresh.k, c.shape.kv_heads);
  splice(other.v, fresh.v, c.shape.kv_heads);
  return other;
}

// What scores by planes know of earlier steps, for both layers: operands of another sequence.
LearnedSelection earlier_steps(const AttentionShape& shape) {
  const AttentionCase c(shape, {700}, 99);
  ThreadPool pool(1);
  Exec exec;
  exec.pool = &pool;
  const PlaneSums sums = measure_planes(exec, shape, c.q.data(), c.k.data(), c.tokens());
  return {{sums, sums}, {}};
}

// Whether changing the future after each of several cuts leaves every output and log-sum-exp up to the cut bit-equal.
bool past_is_untouched(const SparseAttention::Options& options) {
  const AttentionCase c({4, 2, 16, 1.0f}, {1000}, 5);
  SparseAttention attention(options);
  attention.use(earlier_steps(c.shape));
  const AttentionResults<float> before = run_attention(attention, c, 2);
  bool equal = true;
  for (const int cut : {0, 15, 16, 100, 127, 128, 500, 511, 777, 901, 998}) {
    SparseAttention fresh(options);
    fresh.use(earlier_steps(c.shape));
    const AttentionResults<float> after = run_attention(fresh, changed_after(c, cut), 2);
    for (int t = 0; t <= cut; ++t) {
      equal = equal &&
              std::equal(before.out.begin() + t * 64, before.out.begin() + (t + 1) * 64, after.out.begin() + t * 64);
      for (int h = 0; h < 4; ++h) equal = equal && before.lse[h * 1000 + t] == after.lse[h * 1000 + t];
    }
  }
  return equal;
}

TEST_P(SparsePattern, CausalOrderIsCausalAndLookaheadLeaks) {
  for (const int query_block : {1, 16, 64, 128}) {
    SparseAttention::Options options = options_for(GetParam().pattern, GetParam().order, query_block, 384);
    options.selection.dense_below = 0;
    if (GetParam().order == Order::causal) {
      EXPECT_TRUE(past_is_untouched(options)) << "query_block " << query_block;
    } else if (query_block == 16 ||
               query_block == 64) {  // longer tiles of random queries agree whatever the future holds
      EXPECT_FALSE(past_is_untouched(options))
          << "a look-ahead pattern that does not leak: the test is blind, query_block " << query_block;
    }
  }
}

TEST_P(SparsePattern, PlanesKeepTheOrder) {
  if (GetParam().pattern == Pattern::window || GetParam().pattern == Pattern::vertical_slash) return;  // no scores
  SparseAttention::Options options = options_for(GetParam().pattern, GetParam().order, 16, 384);
  options.selection.dense_below = 0;
  options.selection.score = BlockScore::planes;
  options.selection.score_channels = 8;
  options.coverage_rows = 5;
  EXPECT_EQ(past_is_untouched(options), GetParam().order == Order::causal);

  const AttentionCase c({4, 2, 16, 0.3f}, {900, 3, 511, 64}, 7);
  SparseAttention two(options), one(options);
  two.use(earlier_steps(c.shape));
  one.use(earlier_steps(c.shape));
  Recording two_threads(two), one_thread(one);
  const AttentionResults<float> results = run_attention(two_threads, c, 2);
  expect_close(results, reference_attention(c, sees_by(two_threads.index, c.shape)));
  EXPECT_TRUE(run_attention(one_thread, c, 1) == results) << "1 and 2 threads differ";
  const AttentionReport report = two.take_report();
  EXPECT_EQ(report.samples.size(), 4u);
  EXPECT_GT(report.layers[0].mean_coverage(), report.layers[0].density());
}

TEST(SparseAttention, PlanesThatNothingIsKnownOfAreAnError) {
  SparseAttention::Options options = options_for(Pattern::topk, Order::causal, 16, 384);
  options.selection.score = BlockScore::planes;
  options.selection.score_channels = 8;
  const AttentionCase c({4, 2, 16, 0.3f}, {900}, 7);
  SparseAttention unknown(options);
  EXPECT_THROW(run_attention(unknown, c, 1), InternalError);
  options.selection.score_channels = 18;
  SparseAttention wide(options);
  wide.use(earlier_steps(c.shape));
  EXPECT_THROW(run_attention(wide, c, 1), UserError);
}

TEST_P(SparsePattern, PartsOfBlocksKeepTheOrder) {
  if (GetParam().pattern == Pattern::window || GetParam().pattern == Pattern::vertical_slash) return;  // no scores
  for (const int score_tokens : {1, 8}) {
    SparseAttention::Options options = options_for(GetParam().pattern, GetParam().order, 16, 384);
    options.selection.dense_below = 0;
    options.selection.score_tokens = score_tokens;
    EXPECT_EQ(past_is_untouched(options), GetParam().order == Order::causal) << "score_tokens " << score_tokens;

    const AttentionCase c({4, 2, 16, 0.3f}, {900, 3, 511, 64}, 7);
    SparseAttention two(options), one(options);
    Recording two_threads(two), one_thread(one);
    const AttentionResults<float> results = run_attention(two_threads, c, 2);
    expect_close(results, reference_attention(c, sees_by(two_threads.index, c.shape)));
    EXPECT_TRUE(run_attention(one_thread, c, 1) == results) << "1 and 2 threads differ";
    EXPECT_TRUE(one_thread.index == two_threads.index);
  }
}

TEST_P(SparsePattern, ReplayUsesTheSameSelections) {
  const SparseAttention::Options options = options_for(GetParam().pattern, GetParam().order, 16, 320);
  const AttentionCase c({4, 2, 16, 0.5f}, {900, 40}, 3);
  SparseAttention attention(options);
  ThreadPool pool(2);
  std::vector<char> memory(attention.scratch_bytes(c.shape, c.tokens(), 2));
  Arena scratch("scratch", static_cast<int64_t>(memory.size()));
  const Exec exec{DeviceKind::cpu, &pool, nullptr, &scratch};
  std::vector<float> out(c.q.size()), lse(c.tokens() * 4);
  const int64_t tokens = c.tokens();
  const AttentionOperands operands{{c.q.data(), {tokens, 4, 16}},
                                   {c.k.data(), {tokens, 2, 16}},
                                   {c.v.data(), {tokens, 2, 16}},
                                   {out.data(), {tokens, 4, 16}},
                                   {lse.data(), {4, tokens}}};
  const auto state = attention.make_state();
  attention.forward(exec, 0, c.shape, c.sequences(), operands, *state, false);
  const std::vector<float> first = out;
  const AttentionReport report = attention.take_report();
  std::fill(out.begin(), out.end(), -1.0f);
  attention.forward(exec, 0, c.shape, c.sequences(), operands, *state, true);
  EXPECT_EQ(out, first);
  EXPECT_GT(report.layers[0].pairs, 0);
  EXPECT_EQ(attention.take_report().layers[0].pairs, 0) << "a replay is not counted again";
}

INSTANTIATE_TEST_SUITE_P(Patterns, SparsePattern, testing::ValuesIn(kPatterns),
                         [](const auto& pattern) { return pattern.param.name; });

TEST(SparseAttention, CallsTakeTheMemoryThatWasPlanned) {
  const AttentionShape shape{4, 2, 16, 0.3f};
  for (const Pattern pattern : {Pattern::topk, Pattern::topp, Pattern::mass, Pattern::window, Pattern::dense})
    for (const int score_tokens : {0, 8, 1, -1})  // -1: by planes
      for (const int coverage_rows : {0, 3}) {
        SparseAttention::Options options = options_for(pattern, Order::causal, 16, 384);
        options.selection.dense_below = 0;
        options.selection.score_tokens = std::max(0, score_tokens);
        options.selection.score = score_tokens < 0 ? BlockScore::planes : BlockScore::moments;
        options.selection.score_channels = 8;
        options.coverage_rows = coverage_rows;
        SparseAttention attention(options);
        attention.use(earlier_steps(shape));
        // Ever longer ones: memory that grew by doubling would be more than the last asks for.
        for (const int32_t tokens : {500, 700, 900}) run_attention(attention, AttentionCase(shape, {tokens}, 7), 1);
        const bool judges = pattern != Pattern::window && pattern != Pattern::dense;
        // 900 tokens are 15 blocks of 64; mean and variance a part, of single keys the keys, by planes a quarter.
        // Where nothing is judged, planes have none, and coverage is measured by moments.
        const int64_t rows = score_tokens == 0 || (score_tokens < 0 && !judges) ? 15 * 2
                             : score_tokens == 8                                ? 15 * 8 * 2
                             : score_tokens == 1                                ? 15 * 64
                                                                                : 15 * 64 / 4;
        const int64_t statistics = judges || coverage_rows > 0 ? rows * 2 * 16 * 4 : 0;
        // 57 query blocks of two heads, of at most 15 entries of four bytes: they fit into one piece of 4096.
        const int64_t lists = pattern == Pattern::dense ? 0 : 57 * 2 * 32 + 4096 * 4;
        EXPECT_EQ(attention.call_bytes(shape, 900, 1), statistics + lists);
        EXPECT_EQ(attention.call_bytes_used(), statistics + lists)
            << "pattern " << static_cast<int>(pattern) << ", score_tokens " << score_tokens;
      }
}

TEST(SparseAttention, ShortSequencesAndDenseLayersAreDense) {
  SparseAttention::Options options = options_for(Pattern::topk, Order::causal, 16, 320);
  options.selection.dense_layers = {1};
  const AttentionCase c({4, 2, 16, 0.5f}, {320, 321, 1000}, 11);
  SparseAttention attention(options);
  Recording sparse_layer(attention, {}, 0), dense_layer(attention, {}, 1);
  run_attention(sparse_layer, c, 1);
  EXPECT_TRUE(sparse_layer.index.sequences()[0].dense);
  EXPECT_FALSE(sparse_layer.index.sequences()[2].dense);
  DenseAttention dense;
  const AttentionResults<float> expected = run_attention(dense, c, 1);
  EXPECT_TRUE(run_attention(dense_layer, c, 1) == expected) << "a dense layer computes what dense attention computes";
  options.selection.dense_layers = {2};
  EXPECT_THROW(SparseAttention{options}, UserError);
}

TEST(SparseAttention, BudgetsComeFromOutside) {
  const SparseAttention::Options options = options_for(Pattern::topk, Order::causal, 16, 320);
  const AttentionCase c({4, 2, 16, 0.5f}, {1000, 1000, 1000}, 13);
  SparseAttention attention(options);
  Recording recording(attention, {320, 640, 100000});
  run_attention(recording, c, 1);
  const auto pairs = [&](int sequence) {
    int64_t entries = 0;
    const BlockIndex::Sequence& s = recording.index.sequences()[sequence];
    for (int tile = 0; tile < s.query_blocks; ++tile) {
      entries += static_cast<int64_t>(recording.index.row(BlockIndex::row_id(s, 0, tile)).blocks.size());
    }
    return entries;
  };
  EXPECT_LT(pairs(0), pairs(1));
  EXPECT_TRUE(recording.index.sequences()[2].dense);
}

TEST(SparseAttention, ReportsCoverageAndDensity) {
  SparseAttention::Options options = options_for(Pattern::topk, Order::causal, 16, 320);
  options.coverage_rows = 16;
  const AttentionCase c({4, 2, 16, 0.5f}, {1500, 100}, 17);
  SparseAttention attention(options);
  run_attention(attention, c, 2);
  const AttentionReport report = attention.take_report();
  ASSERT_EQ(report.samples.size(), 2u);
  const LayerAttention total = report.total();
  EXPECT_GT(total.density(), 0.1);
  EXPECT_LT(total.density(), 0.8);
  EXPECT_GT(total.mean_coverage(), 0.1);
  EXPECT_LT(total.mean_coverage(), 1.0);
  EXPECT_DOUBLE_EQ(report.samples[1].sample.held, 1.0) << "the short sequence runs dense";
  EXPECT_TRUE(attention.take_report().samples.empty());
}

}  // namespace
}  // namespace sb
