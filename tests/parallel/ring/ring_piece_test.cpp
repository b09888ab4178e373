// A sequence that several ranks share and that comes in pieces: what attention of the whole gives on one rank.
#include <gtest/gtest.h>

#include <mutex>

#include "attention/cpu/sparse_attention.h"
#include "attention/forwarding_attention.h"
#include "comm/thread_communicator.h"
#include "parallel/ring/ring_attention.h"
#include "tests/attention/sparse_cases.h"

namespace sb {
namespace {

constexpr float kUnset = std::numeric_limits<float>::quiet_NaN();
constexpr int kBlock = 64, kLayer = 1, kLayers = 2;

struct PieceRun {
  AttentionResults<float> results;
  std::vector<std::vector<BlockIndex>> lists;  // [rank][piece]
  AttentionReport report;                      // pairs of all ranks; coverage, which the first one has
  SelectionObservations observations;          // of all ranks
};

SelectionConfig selection_of(SelectionPattern pattern, BlockScore score = BlockScore::moments) {
  SelectionConfig selection;
  selection.pattern = pattern;
  selection.score = score;
  selection.score_channels = 8;
  selection.block = kBlock;
  selection.budget = 5 * kBlock;
  selection.dense_below = 0;
  selection.local_blocks = 1;
  selection.coverage = 0.7;
  return selection;
}

// What one rank has and does.
class RankRun {
 public:
  RankRun(Communicator& world, const AttentionCase& c, const RingAttention::Options& options, int64_t piece,
          const LearnedSelection& learned)
      : c_(c), rank_(world.rank()), ring_(world, options), piece_(piece) {
    ring_.use(learned);
    const AttentionShape& s = c.shape;
    const int64_t key = int64_t{s.kv_heads} * s.head_dim, n = c.tokens();
    for (int r = 0; r < world.size(); ++r)
      for (int64_t begin = 0; begin < n; begin += piece) most_ = std::max(most_, std::ssize(tokens_of(r, begin)));
    pieces_ = static_cast<int>((n + piece - 1) / piece);
    // Pages neither in order nor side by side.
    places_ = pieces_ | 1;
    k_.assign(static_cast<size_t>(places_ * most_ * key), kUnset);
    v_ = k_;
    int64_t held = 0;
    for (int i = 0; i < pieces_; ++i) {
      const std::vector<int32_t> tokens = tokens_of(rank_, i * piece);
      pages_.push_back({held, 2 * i % places_ * most_});
      for (size_t t = 0; t < tokens.size(); ++t) {
        std::copy_n(c.k.begin() + tokens[t] * key, key,
                    k_.begin() + (pages_.back().row + static_cast<int64_t>(t)) * key);
        std::copy_n(c.v.begin() + tokens[t] * key, key,
                    v_.begin() + (pages_.back().row + static_cast<int64_t>(t)) * key);
      }
      held += std::ssize(tokens);
      states_.push_back(ring_.make_state());
    }
    dk_.assign(static_cast<size_t>(held * key), 0.0f);
    dv_ = dk_;
    limits_ = {most_, n, DType::f32, pieces_, 0, kLayers};
    scratch_ = Arena("scratch", ring_.piece_bytes(s, limits_, 1).scratch);
  }

  // Forward of all pieces, then backward in reverse; results go to their places in `whole`.
  void run(AttentionResults<float>& whole) {
    for (int i = 0; i < pieces_; ++i) call(i, whole, false, false);
    // Once more, as where the forward of a piece was not kept: nothing of it is counted.
    call(pieces_ - 1, whole, false, true);
    for (int i = pieces_ - 1; i >= 0; --i) call(i, whole, true, false);
    const int64_t key = int64_t{c_.shape.kv_heads} * c_.shape.head_dim;
    for (int64_t row = 0; const int32_t token : tokens_of(rank_, 0, c_.tokens())) {
      std::copy_n(dk_.begin() + row * key, key, whole.dk.begin() + token * key);
      std::copy_n(dv_.begin() + row * key, key, whole.dv.begin() + token * key);
      ++row;
    }
    EXPECT_EQ(scratch_.used(), 0);
    const PieceBytes planned = ring_.piece_bytes(c_.shape, limits_, 1);
    for (const auto& state : states_) EXPECT_LE(RingAttention::bytes(*state), planned.state);
    EXPECT_LE(ring_.call_bytes_used(), planned.call);
    EXPECT_EQ(ring_.layer_bytes_used(), planned.layer);
    EXPECT_GT(static_cast<double>(scratch_.high_water()), 0.9 * static_cast<double>(planned.scratch));
  }

  std::vector<BlockIndex> lists() {
    std::vector<BlockIndex> all;
    for (const auto& state : states_) all.push_back(RingAttention::index(*state));
    return all;
  }
  RingAttention& ring() { return ring_; }

 private:
  // Tokens of the piece from `begin` on that a rank holds.
  std::vector<int32_t> tokens_of(int rank, int64_t begin) const { return tokens_of(rank, begin, begin + piece_); }
  std::vector<int32_t> tokens_of(int rank, int64_t begin, int64_t end) const {
    const int32_t cu_seqlens[] = {0, static_cast<int32_t>(std::min(end, c_.tokens()))};
    std::vector<int32_t> tokens;
    for (const int32_t token : ring_.layout(cu_seqlens).tokens(rank))
      if (token >= begin) tokens.push_back(token);
    return tokens;
  }

  void call(int i, AttentionResults<float>& whole, bool backward, bool again) {
    const AttentionShape& s = c_.shape;
    const int64_t begin = i * piece_, n = c_.tokens(), query = int64_t{s.heads} * s.head_dim;
    const std::vector<int32_t> tokens = tokens_of(rank_, begin);
    const auto count = std::ssize(tokens);
    std::vector<float> q, dout, out(static_cast<size_t>(count * query), kUnset),
        dq = out, lse(static_cast<size_t>(count * s.heads), kUnset);
    for (const int32_t token : tokens) {
      q.insert(q.end(), c_.q.begin() + token * query, c_.q.begin() + (token + 1) * query);
      dout.insert(dout.end(), c_.dout.begin() + token * query, c_.dout.begin() + (token + 1) * query);
    }
    const int32_t own[] = {0, static_cast<int32_t>(count)},
                  all[] = {0, static_cast<int32_t>(std::min(piece_, n - begin))};
    PackedSequences sequences{own, {}, all};
    sequences.piece = {begin, n, std::span(pages_).first(static_cast<size_t>(i) + 1)};
    sequences.again = again;
    const Shape queries{count, s.heads, s.head_dim}, keys{places_ * most_, s.kv_heads, s.head_dim};
    if (backward)
      for (int64_t t = 0; t < count; ++t) {
        std::copy_n(whole.out.begin() + tokens[t] * query, query, out.begin() + t * query);
        for (int head = 0; head < s.heads; ++head) lse[head * count + t] = whole.lse[head * n + tokens[t]];
      }
    ThreadPool pool(1);
    const Exec exec{.pool = &pool, .scratch = &scratch_};
    const AttentionOperands x{TensorView(q.data(), queries), TensorView(k_.data(), keys), TensorView(v_.data(), keys),
                              TensorView(out.data(), queries), TensorView(lse.data(), {s.heads, count})};
    AttentionState& state = *states_[static_cast<size_t>(i)];
    if (!backward) {
      ring_.forward(exec, kLayer, s, sequences, x, state, false);
    } else {
      const Shape seen{pages_[static_cast<size_t>(i)].begin + count, s.kv_heads, s.head_dim};
      ring_.backward(exec, kLayer, s, sequences, x,
                     {TensorView(dout.data(), queries), TensorView(dq.data(), queries), TensorView(dk_.data(), seen),
                      TensorView(dv_.data(), seen)},
                     state);
    }
    for (int64_t t = 0; t < count; ++t) {
      std::copy_n((backward ? dq : out).begin() + t * query, query,
                  (backward ? whole.dq : whole.out).begin() + tokens[t] * query);
      for (int head = 0; head < s.heads && !backward; ++head) whole.lse[head * n + tokens[t]] = lse[head * count + t];
    }
  }

  const AttentionCase& c_;
  int rank_;
  RingAttention ring_;
  int64_t piece_, most_ = 0, places_ = 0;
  int pieces_ = 0;
  std::vector<float> k_, v_, dk_, dv_;
  std::vector<KeyPage> pages_;
  std::vector<std::unique_ptr<AttentionState>> states_;
  Attention::PieceLimits limits_;
  Arena scratch_{"none", 0};
};

PieceRun run_pieces(const AttentionCase& c, const RingAttention::Options& options, int ranks, int64_t piece,
                    const LearnedSelection& learned = {}) {
  PieceRun run;
  run.results.out.assign(c.q.size(), kUnset);
  run.results.dq = run.results.out;
  run.results.dk.assign(c.k.size(), kUnset);
  run.results.dv = run.results.dk;
  run.results.lse.assign(static_cast<size_t>(c.tokens() * c.shape.heads), kUnset);
  run.lists.resize(static_cast<size_t>(ranks));
  run.report.layers.resize(kLayers);
  std::mutex mutex;
  run_thread_ranks(ranks, [&](Communicator& world) {
    RankRun own(world, c, options, piece, learned);
    own.run(run.results);
    const std::lock_guard lock(mutex);
    run.lists[static_cast<size_t>(world.rank())] = own.lists();
    AttentionReport report = own.ring().take_report();
    run.report.layers[kLayer].pairs += report.layers[kLayer].pairs;
    run.report.layers[kLayer].causal_pairs += report.layers[kLayer].causal_pairs;
    if (world.rank() == 0) run.report.samples = report.samples;
    const SelectionObservations seen = own.ring().take_observations();
    for (const auto& [where, counts] : seen.masses) {
      run.observations.masses[where].selected += counts.selected;
      run.observations.masses[where].wanted += counts.wanted;
    }
  });
  return run;
}

class KeepIndex final : public ForwardingAttention {
 public:
  explicit KeepIndex(SparseAttention& inner) : ForwardingAttention(inner) {}
  void forward(const Exec& exec, int, const AttentionShape& shape, const PackedSequences& sequences,
               const AttentionOperands& operands, AttentionState& state, bool replay) override {
    ForwardingAttention::forward(exec, kLayer, shape, sequences, operands, state, replay);
    index = SparseAttention::index(state);
  }
  BlockIndex index;
};

// Every row of a piece on the rank that holds it, nothing anywhere else.
void expect_same_lists(const PieceRun& run, const BlockIndex& whole, const ContextLayout& layout, int64_t piece) {
  const BlockIndex::Sequence& all = whole.sequences().front();
  for (size_t r = 0; r < run.lists.size(); ++r)
    for (size_t i = 0; i < run.lists[r].size(); ++i) {
      const BlockIndex& own = run.lists[r][i];
      const BlockIndex::Sequence& part = own.sequences().front();
      ASSERT_EQ(part.dense, all.dense);
      for (int head = 0; !all.dense && head < whole.shape().list_heads; ++head)
        for (int tile = 0; tile < part.query_blocks; ++tile) {
          const int64_t token = int64_t{tile} * whole.shape().query_block;
          const bool here =
              token >= static_cast<int64_t>(i) * piece && layout.owner(0, token / kBlock) == static_cast<int>(r);
          const BlockIndex::Row got = own.row(BlockIndex::row_id(part, head, tile)),
                                expected = whole.row(BlockIndex::row_id(all, head, tile));
          ASSERT_TRUE(here ? std::ranges::equal(got.blocks, expected.blocks) &&
                                 std::ranges::equal(got.first, expected.first)
                           : got.blocks.empty())
              << "rank " << r << ", piece " << i << ", head " << head << ", query block " << tile;
        }
    }
}

void expect_same(const AttentionCase& c, const SelectionConfig& selection, int ranks, int64_t piece,
                 const LearnedSelection& learned = {}) {
  SCOPED_TRACE(testing::Message() << c.tokens() << " tokens, pattern " << static_cast<int>(selection.pattern)
                                  << ", score " << static_cast<int>(selection.score) << ", " << ranks
                                  << " ranks, pieces of " << piece);
  const int rows = selection.pattern == SelectionPattern::dense ? 0 : 9;
  SparseAttention alone({selection, kLayers, rows});
  alone.use(learned);
  KeepIndex keeper(alone);
  const AttentionResults<float> whole = run_attention(keeper, c, 1);
  RingAttention::Options options{selection, kLayers, ContextPlacement::triangular, 0};
  options.coverage_rows = rows;
  const PieceRun run = run_pieces(c, options, ranks, piece, learned);
  expect_same_lists(run, keeper.index, {ContextPlacement::triangular, ranks, kBlock, c.cu_seqlens}, piece);
  AttentionResults<double> wide;
  for (const auto& [from, to] :
       {std::pair(&whole.out, &wide.out), std::pair(&whole.lse, &wide.lse), std::pair(&whole.dq, &wide.dq),
        std::pair(&whole.dk, &wide.dk), std::pair(&whole.dv, &wide.dv)})
    to->assign(from->begin(), from->end());
  expect_close(run.results, wide, 2e-6);
  const AttentionReport expected = alone.take_report();
  EXPECT_EQ(run.report.layers[kLayer].pairs, expected.layers[kLayer].pairs);
  EXPECT_EQ(run.report.layers[kLayer].causal_pairs, expected.layers[kLayer].causal_pairs);
  ASSERT_EQ(run.report.samples.size(), expected.samples.size());
  for (size_t i = 0; i < expected.samples.size(); ++i) {
    const MeasuredCoverage &got = run.report.samples[i], &want = expected.samples[i];
    EXPECT_EQ(got.tokens, want.tokens);
    EXPECT_EQ(got.sample.rows, want.sample.rows);
    EXPECT_NEAR(got.sample.held, want.sample.held, 1e-5);
    ASSERT_EQ(got.sample.curve.size(), want.sample.curve.size());
    for (size_t j = 0; j < want.sample.curve.size(); ++j) EXPECT_NEAR(got.sample.curve[j], want.sample.curve[j], 1e-5);
  }
  const SelectionObservations seen = alone.take_observations();
  ASSERT_EQ(run.observations.masses.size(), seen.masses.size());
  for (const auto& [where, counts] : seen.masses) {
    EXPECT_EQ(run.observations.masses.at(where).selected, counts.selected);
    EXPECT_EQ(run.observations.masses.at(where).wanted, counts.wanted);
  }
}

constexpr SelectionPattern kPatterns[] = {SelectionPattern::dense, SelectionPattern::topk, SelectionPattern::topp,
                                          SelectionPattern::mass, SelectionPattern::window};

// Pieces of one block, of which all ranks but one hold nothing, to pieces of several; odd lengths.
TEST(RingPieces, GiveWhatTheWholeGives) {
  for (const SelectionPattern pattern : kPatterns) {
    const SelectionConfig selection = selection_of(pattern);
    const AttentionCase c(shape_of(4, 2, 16), {1333}, 11, 2.0), shorter(shape_of(3, 1, 20), {449}, 12, 2.0);
    for (const auto& [ranks, piece] : {std::pair(2, 64), {2, 192}, {2, 640}, {3, 128}, {4, 448}})
      expect_same(c, selection, ranks, piece);
    for (const int ranks : {1, 2, 4}) expect_same(shorter, selection, ranks, 128);
  }
}

TEST(RingPieces, SelectByPlanesToo) {
  for (const SelectionPattern pattern : {SelectionPattern::topk, SelectionPattern::topp, SelectionPattern::mass}) {
    const AttentionCase c(shape_of(4, 2, 16), {1333}, 13, 2.0);
    ThreadPool pool(1);
    LearnedSelection learned;
    learned.planes.assign(kLayers, measure_planes({.pool = &pool}, c.shape, c.q.data(), c.k.data(), c.tokens()));
    for (const auto& [ranks, piece] : {std::pair(2, 64), {2, 320}, {3, 192}})
      expect_same(c, selection_of(pattern, BlockScore::planes), ranks, piece, learned);
  }
}

TEST(RingPieces, PlacementsByLengthAreRefused) {
  run_thread_ranks(2, [](Communicator& world) {
    const auto refusal = [&](SelectionPattern pattern, ContextPlacement placement) {
      SelectionConfig selection = selection_of(pattern);
      if (pattern == SelectionPattern::vertical_slash) selection.order = SelectionOrder::lookahead;
      return RingAttention(world, {selection, kLayers, placement, 0}).refuses_pieces();
    };
    EXPECT_NE(refusal(SelectionPattern::topk, ContextPlacement::zigzag).find("zigzag"), std::string::npos);
    EXPECT_NE(refusal(SelectionPattern::vertical_slash, ContextPlacement::triangular).find("vertical_slash"),
              std::string::npos);
    for (const auto placement : {ContextPlacement::striped, ContextPlacement::shifted, ContextPlacement::triangular})
      EXPECT_EQ(refusal(SelectionPattern::mass, placement), "");
  });
}

}  // namespace
}  // namespace sb
