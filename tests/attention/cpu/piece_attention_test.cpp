// A sequence that comes piece by piece, its keys scattered over a store: what attention of the whole gives.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "attention/cpu/dense_attention.h"
#include "attention/cpu/sparse_attention.h"
#include "core/arena.h"
#include "tests/attention/reference.h"

namespace sb {
namespace {

constexpr float kUnset = std::numeric_limits<float>::quiet_NaN();

struct PieceRun {
  AttentionResults<float> results;
  std::vector<BlockIndex> lists;  // of every piece; with sparse attention
};

// Forward of all pieces, then backward in reverse. `cuts`: where pieces begin, and the sequence's length.
PieceRun run_pieces(Attention& attention, const AttentionCase& c, const std::vector<int64_t>& cuts, int layer,
                    int threads, std::vector<int32_t> budgets = {}) {
  const AttentionShape& shape = c.shape;
  const int64_t n = c.tokens(), query = int64_t{shape.heads} * shape.head_dim,
                key = int64_t{shape.kv_heads} * shape.head_dim;
  const auto pieces = static_cast<int>(cuts.size()) - 1;
  int64_t room = 0;
  for (int i = 0; i < pieces; ++i) room = std::max(room, cuts[i + 1] - cuts[i]);
  // Page i in place 2 i modulo an odd number of places: neither in order nor side by side.
  const int64_t places = pieces | 1;
  std::vector<float> k(places * room * key, kUnset), v = k;
  std::vector<KeyPage> pages;
  for (int i = 0; i < pieces; ++i) {
    pages.push_back({cuts[i], 2 * i % places * room});
    std::copy(c.k.begin() + cuts[i] * key, c.k.begin() + cuts[i + 1] * key, k.begin() + pages[i].row * key);
    std::copy(c.v.begin() + cuts[i] * key, c.v.begin() + cuts[i + 1] * key, v.begin() + pages[i].row * key);
  }
  const PieceBytes bytes = attention.piece_bytes(shape, {room, n}, threads);
  const int64_t row_floats = bytes.page / 4;
  std::vector<float> packed(places * room * row_floats, kUnset);
  ThreadPool pool(threads);
  Arena scratch("scratch", bytes.scratch);
  const Exec exec{.pool = &pool, .scratch = &scratch};
  PieceRun run;
  AttentionResults<float>& r = run.results;
  r.out.assign(n * query, kUnset);
  r.dq = r.out;
  r.lse.assign(shape.heads * n, kUnset);
  r.dk.assign(n * key, 0.0f);
  r.dv = r.dk;
  std::vector<std::unique_ptr<AttentionState>> states;
  std::vector<std::vector<float>> lse(pieces);
  const auto call = [&](int i, bool backward) {
    const int64_t begin = cuts[i], tokens = cuts[i + 1] - begin;
    const int32_t cu_seqlens[] = {0, static_cast<int32_t>(tokens)};
    PackedSequences sequences{cu_seqlens, budgets};
    sequences.piece = {begin, n, std::span(pages).first(i + 1)};
    const Shape queries{tokens, shape.heads, shape.head_dim}, keys{places * room, shape.kv_heads, shape.head_dim};
    const AttentionOperands x{TensorView(c.q.data() + begin * query, queries),
                              TensorView(k.data(), keys),
                              TensorView(v.data(), keys),
                              TensorView(r.out.data() + begin * query, queries),
                              TensorView(lse[i].data(), {shape.heads, tokens}),
                              TensorView(packed.data(), {places * room, row_floats})};
    if (!backward) return attention.forward(exec, layer, shape, sequences, x, *states[i], false);
    const Shape before{cuts[i + 1], shape.kv_heads, shape.head_dim};
    attention.backward(
        exec, layer, shape, sequences, x,
        {TensorView(c.dout.data() + begin * query, queries), TensorView(r.dq.data() + begin * query, queries),
         TensorView(r.dk.data(), before), TensorView(r.dv.data(), before)},
        *states[i]);
  };
  for (int i = 0; i < pieces; ++i) {
    states.push_back(attention.make_state());
    const int64_t begin = cuts[i], tokens = cuts[i + 1] - begin;
    lse[i].assign(shape.heads * tokens, kUnset);
    call(i, false);
    for (int head = 0; head < shape.heads; ++head)
      std::copy_n(lse[i].begin() + head * tokens, tokens, r.lse.begin() + head * n + begin);
  }
  for (int i = pieces - 1; i >= 0; --i) call(i, true);
  if (dynamic_cast<SparseAttention*>(&attention))
    for (const auto& state : states) run.lists.push_back(SparseAttention::index(*state));
  return run;
}

void expect_near(const AttentionResults<float>& got, const AttentionResults<float>& expected) {
  AttentionResults<double> reference;
  const auto convert = [](const std::vector<float>& from, std::vector<double>& to) {
    to.assign(from.begin(), from.end());
  };
  convert(expected.out, reference.out);
  convert(expected.lse, reference.lse);
  convert(expected.dq, reference.dq);
  convert(expected.dk, reference.dk);
  convert(expected.dv, reference.dv);
  expect_close(got, reference, 2e-6);
}

std::vector<int64_t> even_cuts(int64_t length, int64_t piece) {
  std::vector<int64_t> cuts;
  for (int64_t begin = 0; begin < length; begin += piece) cuts.push_back(begin);
  cuts.push_back(length);
  return cuts;
}

TEST(PieceAttention, DenseIsThatOfTheWhole) {
  struct Heads {
    int heads, kv_heads, d;
  };
  for (const Heads& h : std::vector<Heads>{{2, 2, 16}, {7, 1, 64}, {6, 3, 20}}) {
    for (const int32_t length : {1, 64, 65, 200, 700}) {
      const AttentionCase c({h.heads, h.kv_heads, h.d, 0.3f}, {length}, 3);
      DenseAttention attention;
      const AttentionResults<float> whole = run_attention(attention, c, 2);
      for (const int64_t piece : {64, 128, 320}) {
        SCOPED_TRACE(testing::Message() << h.heads << " heads, " << length << " tokens, pieces of " << piece);
        const PieceRun run = run_pieces(attention, c, even_cuts(length, piece), 0, 2);
        expect_near(run.results, whole);
        EXPECT_TRUE(run_pieces(attention, c, even_cuts(length, piece), 0, 1).results == run.results)
            << "1 and 2 threads differ";
      }
    }
  }
}

SparseAttention::Options options_for(SelectionPattern pattern, int block = 64, int query_block = 16) {
  SparseAttention::Options options;
  options.layers = 3;
  options.coverage_rows = 9;
  options.selection.pattern = pattern;
  options.selection.block = block;
  options.selection.query_block = query_block;
  options.selection.budget = 5 * block;
  options.selection.dense_below = 0;
  options.selection.local_blocks = 1;
  options.selection.coverage = 0.7;
  return options;
}

constexpr SelectionPattern kCausal[] = {SelectionPattern::topk, SelectionPattern::topp, SelectionPattern::mass,
                                        SelectionPattern::window};

// The rows of all pieces' lists are those of the whole sequence.
void expect_same_lists(const std::vector<BlockIndex>& pieces, const std::vector<int64_t>& cuts,
                       const BlockIndex& whole) {
  const BlockIndex::Sequence& all = whole.sequences().front();
  for (size_t i = 0; i < pieces.size(); ++i) {
    const BlockIndex::Sequence& own = pieces[i].sequences().front();
    ASSERT_EQ(own.length, cuts[i + 1]);
    ASSERT_EQ(own.dense, all.dense);
    for (int head = 0; head < whole.shape().list_heads; ++head) {
      for (int block = 0; block < own.query_blocks; ++block) {
        const BlockIndex::Row got = pieces[i].row(BlockIndex::row_id(own, head, block));
        if (block * whole.shape().query_block < cuts[i]) {
          EXPECT_TRUE(got.blocks.empty());
          continue;
        }
        const BlockIndex::Row expected = whole.row(BlockIndex::row_id(all, head, block));
        EXPECT_TRUE(std::ranges::equal(got.blocks, expected.blocks) && std::ranges::equal(got.first, expected.first))
            << "piece " << i << ", head " << head << ", query block " << block;
      }
    }
  }
}

void expect_same_report(AttentionReport got, AttentionReport expected) {
  const LayerAttention &a = got.layers[1], &b = expected.layers[1];
  EXPECT_EQ(a.pairs, b.pairs);
  EXPECT_EQ(a.causal_pairs, b.causal_pairs);
  EXPECT_EQ(a.covered_tokens, b.covered_tokens);
  EXPECT_NEAR(a.coverage, b.coverage, 1e-4 * b.coverage);
  ASSERT_EQ(got.samples.size(), 1u);
  ASSERT_EQ(expected.samples.size(), 1u);
  EXPECT_EQ(got.samples[0].tokens, expected.samples[0].tokens);
  EXPECT_EQ(got.samples[0].sample.rows, expected.samples[0].sample.rows);
  ASSERT_EQ(got.samples[0].sample.curve.size(), expected.samples[0].sample.curve.size());
  for (size_t i = 0; i < expected.samples[0].sample.curve.size(); ++i)
    EXPECT_NEAR(got.samples[0].sample.curve[i], expected.samples[0].sample.curve[i], 1e-4);
}

constexpr std::pair<SelectionPattern, BlockScore> kSelections[] = {
    {SelectionPattern::topk, BlockScore::moments}, {SelectionPattern::topp, BlockScore::moments},
    {SelectionPattern::mass, BlockScore::moments}, {SelectionPattern::window, BlockScore::moments},
    {SelectionPattern::topk, BlockScore::planes},  {SelectionPattern::topp, BlockScore::planes},
    {SelectionPattern::mass, BlockScore::planes}};

// What earlier steps would have seen, where planes are selected by it.
LearnedSelection first_statistics(const AttentionCase& c, const SparseAttention::Options& options) {
  LearnedSelection learned;
  if (!options.selection.judges_by_planes()) return learned;
  ThreadPool pool(1);
  const Exec exec{.pool = &pool};
  learned.planes.assign(static_cast<size_t>(options.layers),
                        measure_planes(exec, c.shape, c.q.data(), c.k.data(), c.tokens()));
  return learned;
}

void expect_near_energies(const LearnedSelection& got, const LearnedSelection& expected) {
  ASSERT_EQ(got.planes.size(), expected.planes.size());
  for (size_t layer = 0; layer < got.planes.size(); ++layer) {
    ASSERT_EQ(got.planes[layer].query_squares.size(), expected.planes[layer].query_squares.size());
    EXPECT_EQ(got.planes[layer].tokens, expected.planes[layer].tokens);
    for (size_t i = 0; i < got.planes[layer].query_squares.size(); ++i) {
      EXPECT_NEAR(got.planes[layer].query_squares[i], expected.planes[layer].query_squares[i], 1e-3);
      EXPECT_NEAR(got.planes[layer].key_squares[i], expected.planes[layer].key_squares[i], 1e-3);
    }
  }
}

TEST(PieceAttention, SelectsMeasuresAndComputesAsForTheWhole) {
  struct Size {
    int block, query_block;
    int32_t length;
    std::vector<int64_t> pieces;
  };
  for (const Size& size : std::vector<Size>{{64, 16, 1100, {64, 192, 512, 1100}},
                                            {64, 128, 900, {128, 384}},
                                            {128, 1, 1200, {256}},
                                            {256, 32, 2600, {512, 768}}}) {
    const AttentionCase c({6, 2, 16, 0.5f}, {size.length}, 7);
    for (const auto& [pattern, score] : kSelections) {
      SparseAttention::Options options = options_for(pattern, size.block, size.query_block);
      options.selection.score = score;
      options.selection.score_channels = 8;
      // Two steps, so that `mass` has learned from the first; in the layer that the pieces run in.
      const auto two_steps = [&](SparseAttention& attention, const std::vector<int64_t>& cuts,
                                 LearnedSelection& learned) {
        PieceRun run;
        for (int step = 0; step < 2; ++step) {
          attention.take_report();
          attention.use(learned);
          run = run_pieces(attention, c, cuts, 1, 2);
          learned = learn(learned, attention.take_observations());
        }
        return run;
      };
      SparseAttention whole(options);
      LearnedSelection learned_whole = first_statistics(c, options);
      const PieceRun expected = two_steps(whole, {0, size.length}, learned_whole);
      const AttentionReport report = whole.take_report();
      EXPECT_LT(report.total().density(), 0.95);
      for (const int64_t piece : size.pieces) {
        SCOPED_TRACE(testing::Message() << "pattern " << static_cast<int>(pattern) << ", score "
                                        << static_cast<int>(score) << ", block " << size.block << ", query block "
                                        << size.query_block << ", pieces of " << piece);
        SparseAttention attention(options);
        const std::vector<int64_t> cuts = even_cuts(size.length, piece);
        LearnedSelection learned = first_statistics(c, options);
        const PieceRun run = two_steps(attention, cuts, learned);
        expect_near(run.results, expected.results);
        expect_same_lists(run.lists, cuts, expected.lists.front());
        expect_same_report(attention.take_report(), report);
        EXPECT_EQ(learned.thresholds, learned_whole.thresholds);
        expect_near_energies(learned, learned_whole);
        EXPECT_LE(attention.layer_bytes_used(), 3 * attention.piece_bytes(c.shape, {piece, size.length}, 2).layer);
        EXPECT_LE(attention.call_bytes_used(), attention.piece_bytes(c.shape, {piece, size.length}, 2).call);
        for (const BlockIndex& lists : run.lists)
          EXPECT_LE(lists.bytes(), attention.piece_bytes(c.shape, {piece, size.length}, 2).state + 128);
      }
    }
  }
}

// The one piece that is all of a sequence is the sequence itself, to the bit.
TEST(PieceAttention, OnePieceHasTheBitsOfTheWhole) {
  const AttentionCase c({4, 2, 16, 0.3f}, {777}, 9);
  for (const SelectionPattern pattern : kCausal) {
    SparseAttention whole(options_for(pattern)), pieces(options_for(pattern));
    EXPECT_TRUE(run_pieces(pieces, c, {0, 777}, 0, 2).results == run_attention(whole, c, 2));
  }
}

// Pieces are cut for the sums of dK and dV as their sequence is: where the cuts meet, the sums have the same order.
TEST(PieceAttention, PiecesOfALongSequenceAddUpAsTheWhole) {
  const int32_t length = 48 * 256;
  const AttentionCase c({2, 1, 16, 0.3f}, {length}, 13);
  for (const SelectionPattern pattern : {SelectionPattern::topk, SelectionPattern::window}) {
    SparseAttention whole(options_for(pattern)), pieces(options_for(pattern));
    EXPECT_TRUE(run_pieces(pieces, c, even_cuts(length, 1024), 0, 2).results == run_attention(whole, c, 2));
  }
}

// Whether a piece runs dense is a matter of the whole sequence's length and budget, not of the piece's.
TEST(PieceAttention, TheWholeLengthDecidesWhatRunsDense) {
  const AttentionCase c({4, 2, 16, 0.3f}, {640}, 5);
  SparseAttention::Options options = options_for(SelectionPattern::topk);
  options.selection.dense_below = 320;  // longer than any piece
  SparseAttention attention(options);
  for (const BlockIndex& lists : run_pieces(attention, c, even_cuts(640, 128), 0, 1).lists)
    EXPECT_FALSE(lists.sequences().front().dense);
  options.selection.dense_below = 640;
  SparseAttention dense(options);
  const PieceRun run = run_pieces(dense, c, even_cuts(640, 128), 0, 1);
  for (const BlockIndex& lists : run.lists) EXPECT_TRUE(lists.sequences().front().dense);
  DenseAttention exact;
  expect_near(run.results, run_attention(exact, c, 1));
  EXPECT_EQ(dense.take_report().total().density(), 1.0);
  // A budget of all tokens.
  SparseAttention covered(options_for(SelectionPattern::topk));
  expect_near(run_pieces(covered, c, even_cuts(640, 128), 0, 1, {640}).results, run_attention(exact, c, 1));
}

TEST(PieceAttention, LaterTokensChangeNothingInEarlierPieces) {
  const AttentionCase c({4, 2, 16, 0.5f}, {800}, 11);
  AttentionCase changed = c;
  for (std::vector<float>* values : {&changed.q, &changed.k, &changed.v}) values->back() += 3.0f;
  const std::vector<int64_t> cuts = even_cuts(800, 192);
  for (const SelectionPattern pattern : kCausal) {
    SparseAttention a(options_for(pattern)), b(options_for(pattern));
    const PieceRun first = run_pieces(a, c, cuts, 0, 2), second = run_pieces(b, changed, cuts, 0, 2);
    const int64_t before = cuts[cuts.size() - 2] * 4 * 16;
    EXPECT_TRUE(std::equal(first.results.out.begin(), first.results.out.begin() + before, second.results.out.begin()));
    for (size_t i = 0; i + 1 < first.lists.size(); ++i) EXPECT_TRUE(first.lists[i] == second.lists[i]);
  }
}

TEST(PieceAttention, PatternsThatLookAheadAreRefusedByName) {
  const auto refusal = [](SelectionPattern pattern, SelectionOrder order) {
    SparseAttention::Options options = options_for(pattern);
    options.selection.order = order;
    return SparseAttention(options).refuses_pieces();
  };
  for (const SelectionPattern pattern : kCausal) EXPECT_EQ(refusal(pattern, SelectionOrder::causal), "");
  EXPECT_EQ(refusal(SelectionPattern::window, SelectionOrder::lookahead), "");
  for (const SelectionPattern pattern : {SelectionPattern::topk, SelectionPattern::topp, SelectionPattern::mass})
    EXPECT_NE(refusal(pattern, SelectionOrder::lookahead).find("attention.selection"), std::string::npos);
  EXPECT_NE(refusal(SelectionPattern::vertical_slash, SelectionOrder::lookahead).find("vertical_slash"),
            std::string::npos);
  EXPECT_EQ(DenseAttention().refuses_pieces(), "");
}

}  // namespace
}  // namespace sb
