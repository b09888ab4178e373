// A sequence that comes to the device piece by piece: what attention of the whole gives there, on the same lists.
#include <algorithm>
#include <memory>

#include "attention/gpu/cuda_attention.h"
#include "tests/attention/gpu/cuda_case.h"
#include "tests/device/software_device.h"

namespace sb {
namespace {

CudaAttentionOptions options_of(SelectionPattern pattern, BlockScore score, int block) {
  CudaAttentionOptions options;
  options.attention.layers = 2;
  options.attention.coverage_rows = 9;
  options.attention.selection.pattern = pattern;
  options.attention.selection.score = score;
  options.attention.selection.block = block;
  options.attention.selection.budget = 5 * block;
  options.attention.selection.dense_below = 0;
  options.attention.selection.local_blocks = 1;
  options.attention.selection.coverage = 0.7;
  options.attention.selection.dense_layers = {0};
  return options;
}

class CudaPieceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::problem().empty()) GTEST_SKIP() << cuda::problem();
    stream_ = cuda::make_stream();
  }

  // Places of the pages: in order, or every other one first.
  enum class Pages { in_order, scattered };
  struct Run {
    CudaResults results;
    std::vector<BlockIndex> lists;
    AttentionReport report;
  };

  // Forward of all pieces, then backward in reverse.
  Run run(SelectingAttention& attention, const CudaOperands& in, DType dtype, int64_t piece, Pages placed, int layer) {
    const AttentionShape& shape = in.shape;
    const int64_t n = in.tokens, count = (n + piece - 1) / piece, places = count | 1, d = shape.head_dim;
    const int64_t query = shape.heads * d, key = shape.kv_heads * d;
    const auto part = [](const std::vector<float>& all, int64_t begin, int64_t end) {
      return std::vector<float>(all.begin() + begin, all.begin() + end);
    };
    std::vector<KeyPage> pages;
    std::vector<float> k(static_cast<size_t>(places * piece * key)), v = k;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t end = std::min(n, (i + 1) * piece);
      pages.push_back({i * piece, (placed == Pages::in_order ? i : 2 * i % places) * piece});
      std::copy(in.k.begin() + i * piece * key, in.k.begin() + end * key, k.begin() + pages.back().row * key);
      std::copy(in.v.begin() + i * piece * key, in.v.begin() + end * key, v.begin() + pages.back().row * key);
    }
    const Shape stored{places * piece, shape.kv_heads, d};
    const DeviceTensor device_k(k, stored, dtype), device_v(v, stored, dtype);
    const std::vector<float> zeros(static_cast<size_t>(n * key));
    const DeviceTensor dk(zeros, {n, shape.kv_heads, d}, DType::f32), dv(zeros, {n, shape.kv_heads, d}, DType::f32);
    struct OnDevice {
      DeviceTensor q, dout, out, lse, dq;
    };
    std::vector<std::unique_ptr<OnDevice>> tensors;
    std::vector<std::unique_ptr<AttentionState>> states;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t begin = i * piece, end = std::min(n, begin + piece);
      const Shape wide{end - begin, shape.heads, d};
      tensors.push_back(std::make_unique<OnDevice>(
          OnDevice{DeviceTensor(part(in.q, begin * query, end * query), wide, dtype),
                   DeviceTensor(part(in.dout, begin * query, end * query), wide, dtype), DeviceTensor(wide, dtype),
                   DeviceTensor({shape.heads, end - begin}, DType::f32), DeviceTensor(wide, dtype)}));
      states.push_back(attention.make_state());
    }
    const Attention::PieceLimits limits{piece, n, dtype, count * 2, 0, 2};
    attention.reserve(shape, piece, dtype, states);
    attention.reserve_pieces(shape, limits, states);
    Arena scratch = make_arena("scratch", attention.piece_bytes(shape, limits, 1).scratch, DeviceKind::cuda);
    const auto taken = cuda::allocations();
    const Exec exec{.device = DeviceKind::cuda, .pool = &pool_, .stream = stream_.get(), .scratch = &scratch};
    const auto call = [&](int64_t i, bool backward) {
      const OnDevice& x = *tensors[static_cast<size_t>(i)];
      const int64_t begin = i * piece, end = std::min(n, begin + piece);
      const int32_t cu_seqlens[] = {0, static_cast<int32_t>(end - begin)};
      PackedSequences sequences{cu_seqlens, {}};
      sequences.piece = {begin, n, std::span(pages).first(static_cast<size_t>(i) + 1)};
      const AttentionOperands operands{x.q.view(), device_k.view(), device_v.view(), x.out.view(), x.lse.view()};
      AttentionState& state = *states[static_cast<size_t>(i)];
      if (!backward) return attention.forward(exec, layer, shape, sequences, operands, state, false);
      attention.backward(exec, layer, shape, sequences, operands,
                         {x.dout.view(), x.dq.view(), dk.view().rows(0, end), dv.view().rows(0, end)}, state);
    };
    for (int64_t i = 0; i < count; ++i) call(i, false);
    for (int64_t i = count - 1; i >= 0; --i) call(i, true);
    cuda::synchronize(stream_.get());
    EXPECT_EQ(scratch.used(), 0);
    EXPECT_EQ(cuda::allocations(), taken) << "memory was taken in a step";
    Run done;
    CudaResults& r = done.results;
    r.lse.resize(static_cast<size_t>(shape.heads * n));
    const auto append = [](std::vector<float>& to, const DeviceTensor& from) {
      const std::vector<float> host = from.host();
      to.insert(to.end(), host.begin(), host.end());
    };
    for (int64_t i = 0; i < count; ++i) {
      const OnDevice& x = *tensors[static_cast<size_t>(i)];
      append(r.out, x.out);
      append(r.dq, x.dq);
      const std::vector<float> lse = x.lse.host();
      const int64_t tokens = x.q.view().dim(0);
      for (int head = 0; head < shape.heads; ++head)
        std::copy_n(lse.begin() + head * tokens, tokens, r.lse.begin() + head * n + i * piece);
      done.lists.push_back(read_block_index(*states[static_cast<size_t>(i)], pool_));
    }
    r.dk = dk.host();
    r.dv = dv.host();
    done.report = attention.take_report();
    return done;
  }

  std::shared_ptr<void> stream_;
  ThreadPool pool_{std::min(8, available_cores())};
};

void expect_same_lists(const std::vector<BlockIndex>& pieces, int64_t piece, const BlockIndex& whole) {
  const BlockIndex::Sequence& all = whole.sequences().front();
  for (size_t i = 0; i < pieces.size(); ++i) {
    const BlockIndex::Sequence& own = pieces[i].sequences().front();
    ASSERT_EQ(own.dense, all.dense);
    if (all.dense) continue;
    const auto first = static_cast<int>(static_cast<int64_t>(i) * piece / whole.shape().query_block);
    for (int head = 0; head < whole.shape().list_heads; ++head)
      for (int block = first; block < own.query_blocks; ++block) {
        const BlockIndex::Row got = pieces[i].row(BlockIndex::row_id(own, head, block)),
                              expected = whole.row(BlockIndex::row_id(all, head, block));
        ASSERT_TRUE(std::ranges::equal(got.blocks, expected.blocks) && std::ranges::equal(got.first, expected.first))
            << "piece " << i << ", head " << head << ", query block " << block;
      }
  }
}

void expect_same_report(const AttentionReport& got, const AttentionReport& expected, int layer) {
  const LayerAttention &a = got.layers[static_cast<size_t>(layer)], &b = expected.layers[static_cast<size_t>(layer)];
  EXPECT_EQ(a.pairs, b.pairs);
  EXPECT_EQ(a.causal_pairs, b.causal_pairs);
  EXPECT_EQ(a.covered_tokens, b.covered_tokens);
  EXPECT_NEAR(a.coverage, b.coverage, 1e-4 * b.coverage);
  ASSERT_EQ(got.samples.size(), 1u);
  ASSERT_EQ(expected.samples.size(), 1u);
  EXPECT_EQ(got.samples[0].sample.rows, expected.samples[0].sample.rows);
  ASSERT_EQ(got.samples[0].sample.curve.size(), expected.samples[0].sample.curve.size());
  for (size_t i = 0; i < expected.samples[0].sample.curve.size(); ++i)
    EXPECT_NEAR(got.samples[0].sample.curve[i], expected.samples[0].sample.curve[i], 1e-4);
}

TEST_F(CudaPieceTest, PiecesGiveWhatTheWholeGives) {
  struct Case {
    SelectionPattern pattern;
    BlockScore score;
    int heads, kv_heads, d, block;
    int64_t tokens, piece;
  };
  using enum SelectionPattern;
  constexpr BlockScore kMoments = BlockScore::moments, kPlanes = BlockScore::planes;
  const Case cases[] = {
      {dense, kMoments, 8, 2, 64, 128, 1500, 256},  {dense, kMoments, 7, 1, 128, 128, 777, 128},
      {topk, kMoments, 8, 1, 64, 128, 3300, 512},   {topk, kMoments, 14, 2, 128, 128, 3333, 640},
      {topk, kMoments, 4, 2, 64, 256, 4100, 1024},  {topk, kMoments, 4, 4, 64, 64, 1700, 192},
      {topp, kMoments, 8, 2, 64, 128, 2300, 384},   {mass, kMoments, 8, 2, 128, 128, 2300, 512},
      {window, kMoments, 2, 2, 64, 128, 2300, 512}, {topk, kPlanes, 16, 2, 128, 128, 4000, 1024},
      {topk, kMoments, 66, 1, 64, 128, 1300, 256},  {mass, kPlanes, 8, 2, 64, 128, 2300, 512},
  };
  const bool software = test::smaller_on_software_device(
      "a quarter of the tokens; portable and deterministic kernels and fp32 in the second layer and scattered pages "
      "only");
  for (Case c : cases) {
    // A software device has a quarter of the tokens, in as many pieces where these are whole blocks.
    if (software) {
      c.piece = std::max<int64_t>(c.piece / 4 / c.block, 1) * c.block;
      c.tokens = std::max<int64_t>(c.tokens / 4, 2 * c.piece + 1);
    }
    const AttentionShape shape{c.heads, c.kv_heads, c.d, 1.f / std::sqrt(static_cast<float>(c.d))};
    const CudaOperands drawn(shape, c.tokens, DType::f32, 7);
    for (const DType dtype : {DType::bf16, DType::f32}) {
      const CudaOperands in(shape, drawn.tokens, dtype, drawn.q, drawn.k, drawn.v, drawn.dout);
      for (const auto& [portable, deterministic] : {std::pair{false, false}, {true, false}, {false, true}}) {
        if (dtype == DType::f32 && (portable || deterministic)) continue;
        CudaAttentionOptions options = options_of(c.pattern, c.score, c.block);
        options.portable = portable;
        options.deterministic = deterministic;
        LearnedSelection learned;
        if (options.attention.selection.judges_by_planes()) {
          const Exec exec{.pool = &pool_};
          learned.planes.assign(2, measure_planes(exec, shape, in.q.data(), in.k.data(), c.tokens));
        }
        for (const int layer : {0, 1}) {
          const bool fewer = software && (portable || deterministic || dtype == DType::f32);
          if (fewer && layer == 0) continue;
          const auto whole = make_cuda_attention(options);
          whole->use(learned);
          const Run expected = run(*whole, in, dtype, c.tokens, Pages::in_order, layer);
          const SelectionObservations learns_from = whole->take_observations();
          for (const Pages pages : {Pages::in_order, Pages::scattered}) {
            if (fewer && pages == Pages::in_order) continue;
            SCOPED_TRACE(
                fmt::format("pattern {} score {} {}:{} d{} block {} {} portable {} deterministic {} layer {} "
                            "scattered {}",
                            static_cast<int>(c.pattern), static_cast<int>(c.score), c.heads, c.kv_heads, c.d, c.block,
                            dtype_name(dtype), portable, deterministic, layer, pages == Pages::scattered));
            const auto attention = make_cuda_attention(options);
            attention->use(learned);
            const Run got = run(*attention, in, dtype, c.piece, pages, layer);
            expect_same_lists(got.lists, c.piece, expected.lists.front());
            expect_close(got.results, expected.results, dtype);
            expect_same_report(got.report, expected.report, layer);
            const SelectionObservations seen = attention->take_observations();
            ASSERT_EQ(seen.masses.size(), learns_from.masses.size());
            for (const auto& [key, counts] : learns_from.masses) {
              EXPECT_EQ(seen.masses.at(key).selected, counts.selected);
              EXPECT_EQ(seen.masses.at(key).wanted, counts.wanted);
            }
          }
        }
      }
    }
  }
}

// The whole sequence as one piece is the sequence itself, and that is what the CPU computes on the same lists.
TEST_F(CudaPieceTest, OnePieceIsTheWholeSequence) {
  const AttentionShape shape{8, 2, 64, 0.125f};
  const CudaOperands in(shape, 1500, DType::bf16, 3);
  const auto attention = make_cuda_attention(options_of(SelectionPattern::topk, BlockScore::moments, 128));
  const Run got = run(*attention, in, DType::bf16, in.tokens, Pages::in_order, 1);
  Arena scratch("cpu", 256 << 20);
  expect_close(got.results, on_cpu({.pool = &pool_, .scratch = &scratch}, in, got.lists.front()), DType::bf16);
}

TEST_F(CudaPieceTest, LaterTokensChangeNothingInEarlierPieces) {
  const AttentionShape shape{8, 2, 64, 0.125f};
  const CudaOperands in(shape, 1600, DType::bf16, 11);
  CudaOperands changed = in;
  for (std::vector<float>* values : {&changed.q, &changed.k, &changed.v}) values->back() += 3.0f;
  const auto one = make_cuda_attention(options_of(SelectionPattern::topk, BlockScore::moments, 128)),
             two = make_cuda_attention(options_of(SelectionPattern::topk, BlockScore::moments, 128));
  const Run first = run(*one, in, DType::bf16, 384, Pages::in_order, 1),
            second = run(*two, changed, DType::bf16, 384, Pages::in_order, 1);
  const int64_t before = 4 * 384 * 8 * 64;
  EXPECT_TRUE(std::equal(first.results.out.begin(), first.results.out.begin() + before, second.results.out.begin()));
  for (size_t i = 0; i + 1 < first.lists.size(); ++i) EXPECT_TRUE(first.lists[i] == second.lists[i]);
}

TEST_F(CudaPieceTest, PatternsThatLookAheadAreRefusedByName) {
  CudaAttentionOptions options = options_of(SelectionPattern::vertical_slash, BlockScore::moments, 128);
  options.attention.selection.order = SelectionOrder::lookahead;
  EXPECT_NE(make_cuda_attention(options)->refuses_pieces().find("vertical_slash"), std::string::npos);
  EXPECT_EQ(make_cuda_attention(options_of(SelectionPattern::mass, BlockScore::moments, 128))->refuses_pieces(), "");
}

}  // namespace
}  // namespace sb
