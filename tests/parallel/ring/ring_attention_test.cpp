#include "parallel/ring/ring_attention.h"

#include <gtest/gtest.h>

#include <atomic>

#include "attention/cpu/dense_attention.h"
#include "attention/forwarding_attention.h"
#include "comm/thread_communicator.h"
#include "core/random.h"
#include "tests/attention/sparse_cases.h"
#include "tests/parallel/ring/placements.h"

namespace sb {
namespace {

using Pattern = SelectionPattern;

SelectionConfig dense_config(int block) {
  SelectionConfig config;
  config.pattern = Pattern::dense;
  config.block = block;
  return config;
}

// Rows of `width` numbers that a rank holds, and back.
template <typename T>
std::vector<T> taken(const std::vector<T>& whole, const std::vector<int32_t>& tokens, int64_t width) {
  std::vector<T> part;
  for (const int32_t token : tokens)
    part.insert(part.end(), whole.begin() + token * width, whole.begin() + (token + 1) * width);
  return part;
}

struct RingRun {
  RingAttention::Options options;
  int ranks = 2;
  int threads = 1;
  const BlockIndex* given = nullptr;            // replayed instead of selecting
  std::vector<BlockIndex>* selected = nullptr;  // what every rank selected
  std::vector<int32_t> budgets = {};
  int steps = 1;                      // forward that often before backward
  AttentionReport* report = nullptr;  // of the first rank
};

// Shares the operands out, runs forward and backward on thread ranks, puts the results together again.
AttentionResults<float> run_ring(const AttentionCase& c, const RingRun& run) {
  const AttentionShape& s = c.shape;
  const int64_t query_width = s.heads * s.head_dim, key_width = s.kv_heads * s.head_dim;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  AttentionResults<float> whole;
  whole.out.assign(c.q.size(), nan);
  whole.dq.assign(c.q.size(), nan);
  whole.dk.assign(c.k.size(), nan);
  whole.dv.assign(c.k.size(), nan);
  whole.lse.assign(c.tokens() * s.heads, nan);
  if (run.selected) run.selected->resize(run.ranks);
  run_thread_ranks(run.ranks, [&](Communicator& world) {
    const auto group = world.split(0, world.rank(), "cp");
    RingAttention ring(*group, run.options);
    const ContextLayout layout = ring.layout(c.cu_seqlens);
    const std::vector<int32_t> tokens = layout.tokens(world.rank()), local = layout.local_cu_seqlens(world.rank());
    const auto count = static_cast<int64_t>(tokens.size());
    int64_t most = 0;
    for (int r = 0; r < run.ranks; ++r) most = std::max(most, std::ssize(layout.tokens(r)));
    std::vector<float> q = taken(c.q, tokens, query_width), k = taken(c.k, tokens, key_width);
    std::vector<float> v = taken(c.v, tokens, key_width), dout = taken(c.dout, tokens, query_width);
    std::vector<float> out(q.size(), nan), lse(count * s.heads, nan), dq(q.size(), nan), dk(k.size(), nan), dv(dk);
    ThreadPool pool(run.threads);
    // An index that was made up may have more gathered columns than a pattern would.
    const int64_t bytes = ring.scratch_bytes(s, run.given ? 3 * c.tokens() : most, run.threads);
    Arena scratch("scratch", bytes);
    std::fill_n(scratch.allocate_array<float>(bytes / 4), bytes / 4, nan);
    scratch.release(0);
    const Exec exec{DeviceKind::cpu, &pool, nullptr, &scratch};
    const Shape queries = {count, s.heads, s.head_dim}, keys = {count, s.kv_heads, s.head_dim};
    const AttentionOperands operands = {
        {q.data(), queries}, {k.data(), keys}, {v.data(), keys}, {out.data(), queries}, {lse.data(), {s.heads, count}}};
    const auto state = ring.make_state();
    if (run.given) RingAttention::index(*state) = *run.given;
    const PackedSequences sequences{local, run.budgets, c.cu_seqlens};
    for (int step = 0; step < run.steps; ++step)
      ring.forward(exec, 0, s, sequences, operands, *state, run.given != nullptr);
    if (run.selected) (*run.selected)[world.rank()] = RingAttention::index(*state);
    if (run.report && world.rank() == 0) *run.report = ring.take_report();
    const AttentionGradients gradients = {
        {dout.data(), queries}, {dq.data(), queries}, {dk.data(), keys}, {dv.data(), keys}};
    ring.backward(exec, 0, s, sequences, operands, gradients, *state);
    for (int64_t i = 0; i < count; ++i) {
      std::copy_n(out.data() + i * query_width, query_width, whole.out.data() + tokens[i] * query_width);
      std::copy_n(dq.data() + i * query_width, query_width, whole.dq.data() + tokens[i] * query_width);
      std::copy_n(dk.data() + i * key_width, key_width, whole.dk.data() + tokens[i] * key_width);
      std::copy_n(dv.data() + i * key_width, key_width, whole.dv.data() + tokens[i] * key_width);
      for (int head = 0; head < s.heads; ++head) whole.lse[head * c.tokens() + tokens[i]] = lse[head * count + i];
    }
  });
  return whole;
}

RingAttention::Options options_of(const SelectionConfig& config, ContextPlacement placement, int node_size = 0) {
  return {config, 1, placement, node_size};
}

TEST(RingAttention, DenseEqualsTheDefinition) {
  const AttentionCase cases[] = {{shape_of(4, 2, 16), {777}, 1},
                                 {shape_of(3, 1, 32), {1, 64, 65, 300, 7, 129}, 2},
                                 {shape_of(2, 2, 16), {5}, 3},  // most ranks have nothing
                                 {shape_of(2, 1, 16), {512}, 4}};
  for (const AttentionCase& c : cases) {
    const AttentionResults<double> expected = reference_attention(c, sees_everything);
    for (const int ranks : {1, 2, 3, 4, 8})
      for (const ContextPlacement placement : kPlacements) {
        SCOPED_TRACE(testing::Message() << ranks << " ranks, placement " << static_cast<int>(placement));
        expect_close(run_ring(c, {options_of(dense_config(64), placement), ranks, 1 + ranks % 2}), expected);
      }
  }
}

TEST(RingAttention, NodesChangeNothing) {
  const AttentionCase c(shape_of(4, 1, 16), {900, 130}, 5);
  const AttentionResults<double> expected = reference_attention(c, sees_everything);
  for (const auto& [ranks, node] :
       {std::pair(4, 2), std::pair(6, 3), std::pair(6, 2), std::pair(8, 4), std::pair(4, 1)})
    expect_close(run_ring(c, {options_of(dense_config(64), ContextPlacement::triangular, node), ranks}), expected);
}

// Random rows: staircases, missing diagonals, empty rows, single columns.
BlockIndex random_index(const AttentionCase& c, const BlockIndexShape& shape, const std::vector<uint8_t>& dense,
                        bool columns) {
  RowMaker rows;
  rows.first = [](Random& random, int, int tokens, int, int) {
    return random.below(3) == 0 ? static_cast<int>(random.below(tokens)) : -1;
  };
  if (columns) rows.gathered = [](Random& random, int) { return random.below(9) == 0; };
  return build_index(c, shape, rows, dense);
}

TEST(RingAttention, ReplayedIndexEqualsTheDefinition) {
  const AttentionCase c(shape_of(4, 2, 16), {500, 64, 333, 1}, 7);
  for (const int list_heads : {2, 4})
    for (const int query_block : {16, 64})
      for (const bool columns : {false, true}) {
        const BlockIndex index = random_index(c, {64, query_block, list_heads}, {0, 0, list_heads == 2, 0}, columns);
        const AttentionResults<double> expected = reference_attention(c, sees_by(index, c.shape));
        SelectionConfig config;
        config.block = 64;
        config.query_block = query_block;
        for (const int ranks : {1, 2, 3, 4, 8})
          for (const int sinks : {0, 1, 2}) {
            config.sink_blocks = sinks;
            const auto placement = kPlacements[(ranks + sinks) % 4];
            SCOPED_TRACE(testing::Message() << ranks << " ranks, " << sinks << " sinks, columns " << columns);
            RingRun run{options_of(config, placement, ranks == 4 ? 2 : 0), ranks};
            run.given = &index;
            expect_close(run_ring(c, run), expected);
          }
      }
}

TEST(RingAttention, SameBitsWhateverTheThreads) {
  const AttentionCase c(shape_of(4, 2, 16), {700}, 8);
  SelectionConfig config = dense_config(64);
  const RingRun one{options_of(config, ContextPlacement::triangular), 3, 1};
  RingRun two = one;
  two.threads = 2;
  EXPECT_TRUE(run_ring(c, one) == run_ring(c, two));
}

// What one rank alone selects, selected together.
struct RingSelectCase {
  Pattern pattern;
  SelectionOrder order;
  int score_tokens = 0;
};
class RingSelects : public testing::TestWithParam<std::tuple<RingSelectCase, int>> {};

class KeepLastIndex final : public ForwardingAttention {
 public:
  KeepLastIndex(SparseAttention& inner, std::vector<int32_t> budgets, int steps)
      : ForwardingAttention(inner), budgets_(std::move(budgets)), steps_(steps) {}
  void forward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
               const AttentionOperands& operands, AttentionState& state, bool replay) override {
    for (int i = 0; i < steps_; ++i)
      ForwardingAttention::forward(exec, layer, shape, {sequences.cu_seqlens, budgets_}, operands, state, replay);
    index = SparseAttention::index(state);
  }
  BlockIndex index;

 private:
  std::vector<int32_t> budgets_;
  int steps_;
};

TEST_P(RingSelects, WhatOneRankDoes) {
  const auto& [param, ranks] = GetParam();
  const AttentionCase c(shape_of(4, 2, 16), {1500, 64, 100, 901}, 11, 2.0);
  SelectionConfig config;
  config.pattern = param.pattern;
  config.order = param.order;
  config.score_tokens = param.score_tokens;
  config.block = 64;
  config.budget = 384;
  config.dense_below = 128;
  config.local_blocks = 1;
  config.vertical_cap = 40;
  config.slash_cap = 5;
  const std::vector<int32_t> budgets = {384, 384, 384, 448};
  const int coverage_rows = param.pattern == Pattern::dense ? 0 : 7;
  SparseAttention alone({config, 1, coverage_rows});
  KeepLastIndex keeper(alone, budgets, 3);  // several times: nothing is carried on from call to call
  const AttentionResults<float> expected = run_attention(keeper, c, 1);

  std::vector<BlockIndex> selected;
  RingRun run{options_of(config, ContextPlacement::triangular), ranks};
  run.selected = &selected;
  run.budgets = budgets;
  run.steps = 3;
  run.options.coverage_rows = coverage_rows;
  AttentionReport report;
  run.report = &report;
  const AttentionResults<float> results = run_ring(c, run);

  // Every row on the rank that holds it, nothing elsewhere.
  const ContextLayout layout(ContextPlacement::triangular, ranks, 64, c.cu_seqlens);
  for (int64_t id = 0; id < keeper.index.rows(); ++id) {
    const auto place = keeper.index.place_of(id);
    const auto sequence = static_cast<int>(place.sequence - keeper.index.sequences().data());
    const int owner = layout.owner(sequence, place.query_block * config.query_block / 64);
    const BlockIndex::Row row = keeper.index.row(id);
    for (int r = 0; r < ranks; ++r) {
      const BlockIndex::Row other = selected[r].row(id);
      ASSERT_TRUE(r != owner
                      ? other.blocks.empty() && other.columns.empty()
                      : std::ranges::equal(row.blocks, other.blocks) && std::ranges::equal(row.first, other.first) &&
                            std::ranges::equal(row.columns, other.columns))
          << "row " << id << " rank " << r;
    }
  }
  // True coverage, whoever holds the sampled rows.
  const AttentionReport expected_report = alone.take_report();
  ASSERT_EQ(report.samples.size(), expected_report.samples.size());
  for (size_t i = 0; i < report.samples.size(); ++i) {
    const MeasuredCoverage &got = report.samples[i], &want = expected_report.samples[i];
    EXPECT_EQ(got.tokens, want.tokens);
    EXPECT_EQ(got.sample.rows, want.sample.rows);
    EXPECT_NEAR(got.sample.held, want.sample.held, 1e-5);
    ASSERT_EQ(got.sample.curve.size(), want.sample.curve.size());
    for (size_t j = 0; j < got.sample.curve.size(); ++j)
      EXPECT_NEAR(got.sample.curve[j], want.sample.curve[j], 1e-5) << i << " " << j;
  }
  EXPECT_EQ(report.total().covered_tokens, expected_report.total().covered_tokens);
  EXPECT_NEAR(report.total().coverage, expected_report.total().coverage, 1e-5 * (1 + expected_report.total().coverage));
  AttentionResults<double> wide;
  for (const auto& [from, to] :
       {std::pair(&expected.out, &wide.out), std::pair(&expected.lse, &wide.lse), std::pair(&expected.dq, &wide.dq),
        std::pair(&expected.dk, &wide.dk), std::pair(&expected.dv, &wide.dv)})
    to->assign(from->begin(), from->end());
  expect_close(results, wide);
}

constexpr SelectionOrder kCausal = SelectionOrder::causal, kLookahead = SelectionOrder::lookahead;
INSTANTIATE_TEST_SUITE_P(
    Ring, RingSelects,
    testing::Combine(
        testing::Values(RingSelectCase{Pattern::topk, kCausal}, RingSelectCase{Pattern::topk, kLookahead},
                        RingSelectCase{Pattern::topp, kCausal}, RingSelectCase{Pattern::mass, kCausal},
                        RingSelectCase{Pattern::topk, kCausal, 8}, RingSelectCase{Pattern::mass, kCausal, 1},
                        RingSelectCase{Pattern::mass, kLookahead}, RingSelectCase{Pattern::window, kCausal},
                        RingSelectCase{Pattern::vertical_slash, kLookahead}, RingSelectCase{Pattern::dense, kCausal}),
        testing::Values(1, 2, 3, 4, 8)));

// The least mass that is selected is that of many pairs: the earlier query blocks have them, whichever ranks these are
// on.
TEST(RingAttention, BestPairsOfASequenceWithTies) {
  for (const bool all_alike : {true, false}) {
    AttentionCase c(shape_of(4, 2, 16), {900, 70, 1300}, 5);
    // All blocks of a kind look the same to all queries: of every second block, or of all.
    const int64_t key_width = 2 * 16, query_width = 4 * 16;
    for (int64_t t = 0; t < c.tokens(); ++t) {
      for (int64_t i = 0; i < key_width; ++i) c.k[t * key_width + i] = all_alike || t / 64 % 2 == 0 ? 0.5f : 0.25f;
      for (int64_t i = 0; i < query_width; ++i) c.q[t * query_width + i] = 0.125f * static_cast<float>(1 + i % 3);
    }
    SelectionConfig config;
    config.pattern = Pattern::mass;
    config.order = kLookahead;
    config.block = 64;
    config.query_block = 16;
    config.budget = 300;
    config.dense_below = 0;
    SparseAttention alone({config, 1, 0});
    KeepLastIndex keeper(alone, {300, 300, 300}, 1);
    run_attention(keeper, c, 1);
    const BlockIndex& expected = keeper.index;
    ASSERT_LT(expected.token_pairs(), expected.causal_token_pairs() * 9 / 10);
    for (const int ranks : {1, 2, 3, 5}) {
      std::vector<BlockIndex> selected;
      run_ring(c, {options_of(config, ContextPlacement::triangular), ranks, 1, nullptr, &selected});
      const ContextLayout layout(ContextPlacement::triangular, ranks, 64, c.cu_seqlens);
      for (int s = 0; s < layout.sequences(); ++s)
        for (int head = 0; head < 2 && !expected.sequences()[s].dense; ++head)
          for (int tile = 0; tile < expected.sequences()[s].query_blocks; ++tile) {
            const int64_t row = BlockIndex::row_id(expected.sequences()[s], head, tile);
            EXPECT_TRUE(
                std::ranges::equal(selected[layout.owner(s, tile / 4)].row(row).blocks, expected.row(row).blocks))
                << ranks << " ranks, sequence " << s << ", head " << head << ", tile " << tile;
          }
    }
  }
}

TEST(RingAttention, CountsItsPairs) {
  const AttentionCase c(shape_of(2, 1, 16), {600}, 3);
  SelectionConfig config;
  config.block = 64;
  config.budget = 320;
  config.dense_below = 0;
  SparseAttention alone({config, 1, 0});
  run_attention(alone, c, 1);
  const LayerAttention expected = alone.take_report().total();
  std::atomic<int64_t> pairs = 0, causal = 0;
  run_thread_ranks(3, [&](Communicator& world) {
    RingAttention ring(world, options_of(config, ContextPlacement::triangular));
    const ContextLayout layout = ring.layout(c.cu_seqlens);
    const std::vector<int32_t> tokens = layout.tokens(world.rank()), local = layout.local_cu_seqlens(world.rank());
    const auto count = static_cast<int64_t>(tokens.size());
    std::vector<float> q = taken(c.q, tokens, 32), k = taken(c.k, tokens, 16), v(k), out(q), lse(count * 2);
    ThreadPool pool(1);
    Arena scratch("scratch", ring.scratch_bytes(c.shape, 256, 1));
    const auto state = ring.make_state();
    ring.forward({DeviceKind::cpu, &pool, nullptr, &scratch}, 0, c.shape, {local, {}, c.cu_seqlens},
                 {{q.data(), {count, 2, 16}},
                  {k.data(), {count, 1, 16}},
                  {v.data(), {count, 1, 16}},
                  {out.data(), {count, 2, 16}},
                  {lse.data(), {2, count}}},
                 *state, false);
    const LayerAttention report = ring.take_report().total();
    pairs += report.pairs;
    causal += report.causal_pairs;
  });
  EXPECT_EQ(pairs, expected.pairs);
  EXPECT_EQ(causal, expected.causal_pairs);
}

TEST(RingAttention, RefusesWhatItCannotShare) {
  run_thread_ranks(1, [](Communicator& world) {
    SelectionConfig config;
    config.query_block = 48;
    EXPECT_THROW(RingAttention(world, options_of(config, ContextPlacement::shifted)), UserError);
  });
}

}  // namespace
}  // namespace sb
