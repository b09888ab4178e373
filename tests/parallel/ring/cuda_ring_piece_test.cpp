// Sequences that GPUs share and that come in pieces, by ranks that are threads and share one: what the definition gives
// on the lists that one CPU selects for the whole sequence.
#include <gtest/gtest.h>

#include <mutex>

#include "attention/forwarding_attention.h"
#include "comm/device/device_communicator.h"
#include "comm/thread_communicator.h"
#include "device/context.h"
#include "device/cuda.h"
#include "parallel/ring/gpu/cuda_ring_attention.h"
#include "tests/device/software_device.h"
#include "tests/parallel/ring/cuda_ring_case.h"

namespace sb {
namespace {

struct PieceRun {
  SelectionConfig selection;
  DType dtype = DType::f32;
  int ranks = 2;
  int64_t piece = 128;
  int coverage_rows = 0;
};

struct PieceResults {
  AttentionResults<float> whole;
  int64_t pairs = 0, causal_pairs = 0;
  std::vector<MeasuredCoverage> samples;  // of the first rank, which has them all
};

// What one rank has and does.
class RankRun {
 public:
  RankRun(Communicator& world, const AttentionCase& c, const PieceRun& run)
      : c_(c),
        run_(run),
        rank_(world.rank()),
        context_(DeviceKind::cuda, pool_),
        group_(world.split(0, world.rank(), "cp")),
        data_(make_staged_communicator(world, {DeviceKind::cuda, context_.exec().stream}, 1 << 16)) {
    RingAttention::Options options{run.selection, 1, ContextPlacement::triangular, 0};
    options.coverage_rows = run.coverage_rows;
    options.dtype = run.dtype;
    ring_ = make_cuda_ring_attention(*group_, *data_, options);
    EXPECT_EQ(ring_->refuses_pieces(), "");
    ring_->use(learned_of(c.shape));
    int64_t most = 0;
    for (int r = 0; r < run.ranks; ++r)
      for (int64_t begin = 0; begin < c.tokens(); begin += run.piece)
        most = std::max(most, std::ssize(tokens_of(r, begin)));
    const AttentionShape& s = c.shape;
    const int64_t width = int64_t{s.kv_heads} * s.head_dim;
    const int pieces = static_cast<int>((c.tokens() + run.piece - 1) / run.piece), places = pieces | 1;
    // Pages neither in order nor side by side.
    std::vector<float> k(static_cast<size_t>(places * most * width)), v = k;
    int64_t held = 0;
    for (int i = 0; i < pieces; ++i) {
      const std::vector<int32_t> tokens = tokens_of(rank_, i * run.piece);
      pages_.push_back({held, 2 * i % places * most});
      std::ranges::copy(taken(c.k, tokens, width), k.begin() + pages_.back().row * width);
      std::ranges::copy(taken(c.v, tokens, width), v.begin() + pages_.back().row * width);
      held += std::ssize(tokens);
      states_.push_back(ring_->make_state());
    }
    const Shape keys{places * most, s.kv_heads, s.head_dim}, sums{std::max<int64_t>(held, 1), s.kv_heads, s.head_dim};
    k_ = std::make_unique<DeviceTensor>(run.dtype, keys, k);
    v_ = std::make_unique<DeviceTensor>(run.dtype, keys, v);
    const std::vector<float> zeros(static_cast<size_t>(sums.elements()));
    dk_ = std::make_unique<DeviceTensor>(DType::f32, sums, zeros);
    dv_ = std::make_unique<DeviceTensor>(DType::f32, sums, zeros);
    const Attention::PieceLimits limits{most, c.tokens(), run.dtype, pieces, 0, 1};
    scratch_ = make_arena("scratch", ring_->piece_bytes(s, limits, 1).scratch, DeviceKind::cuda);
  }

  void run(PieceResults& results) {
    const int pieces = static_cast<int>(states_.size());
    for (int i = 0; i < pieces; ++i) call(i, results.whole, false, false);
    // Once more, as where the forward of a piece was not kept: nothing of it is counted.
    call(pieces - 1, results.whole, false, true);
    for (int i = pieces - 1; i >= 0; --i) call(i, results.whole, true, false);
    EXPECT_EQ(scratch_.used(), 0);
    const int64_t width = int64_t{c_.shape.kv_heads} * c_.shape.head_dim;
    const std::vector<float> dk = dk_->values(), dv = dv_->values();
    for (int64_t row = 0; const int32_t token : tokens_of(rank_, 0, c_.tokens())) {
      std::copy_n(dk.begin() + row * width, width, results.whole.dk.begin() + token * width);
      std::copy_n(dv.begin() + row++ * width, width, results.whole.dv.begin() + token * width);
    }
    data_->barrier();
  }
  AttentionReport report() { return ring_->take_report(); }

 private:
  std::vector<int32_t> tokens_of(int rank, int64_t begin) const { return tokens_of(rank, begin, begin + run_.piece); }
  // Tokens from `begin` to `end` that a rank holds.
  std::vector<int32_t> tokens_of(int rank, int64_t begin, int64_t end) const {
    const int32_t cu_seqlens[] = {0, static_cast<int32_t>(std::min(end, c_.tokens()))};
    const ContextLayout layout(ContextPlacement::triangular, run_.ranks, run_.selection.block, cu_seqlens);
    std::vector<int32_t> tokens = layout.tokens(rank);
    std::erase_if(tokens, [&](int32_t token) { return token < begin; });
    return tokens;
  }

  void call(int i, AttentionResults<float>& whole, bool backward, bool again) {
    const AttentionShape& s = c_.shape;
    const int64_t begin = i * run_.piece, n = c_.tokens(), width = int64_t{s.heads} * s.head_dim;
    const std::vector<int32_t> tokens = tokens_of(rank_, begin);
    const auto count = std::ssize(tokens);
    const Shape queries{count, s.heads, s.head_dim};
    std::vector<float> lse(static_cast<size_t>(count * s.heads), std::nanf(""));
    for (int64_t t = 0; t < count && backward; ++t)
      for (int head = 0; head < s.heads; ++head)
        lse[static_cast<size_t>(head * count + t)] =
            whole.lse[static_cast<size_t>(head * n + tokens[static_cast<size_t>(t)])];
    const DeviceTensor q(run_.dtype, queries, taken(c_.q, tokens, width)),
        dout(run_.dtype, queries, taken(c_.dout, tokens, width)), dq(run_.dtype, queries),
        out(run_.dtype, queries, backward ? taken(whole.out, tokens, width) : std::vector<float>()),
        device_lse(DType::f32, {s.heads, count}, lse);
    const int32_t own[] = {0, static_cast<int32_t>(count)},
                  all[] = {0, static_cast<int32_t>(std::min(run_.piece, n - begin))};
    PackedSequences sequences{own, {}, all};
    sequences.piece = {begin, n, std::span(pages_).first(static_cast<size_t>(i) + 1)};
    sequences.again = again;
    Exec exec = context_.exec();
    exec.scratch = &scratch_;
    const AttentionOperands x{q.view(), k_->view(), v_->view(), out.view(), device_lse.view()};
    AttentionState& state = *states_[static_cast<size_t>(i)];
    if (!backward) {
      ring_->forward(exec, 0, s, sequences, x, state, false);
      ring_->forward(exec, 0, s, sequences, x, state, true);  // as recompute does
    } else {
      const int64_t seen = pages_[static_cast<size_t>(i)].begin + count;
      ring_->backward(exec, 0, s, sequences, x,
                      {dout.view(), dq.view(), dk_->view().rows(0, seen), dv_->view().rows(0, seen)}, state);
    }
    context_.synchronize();
    const std::vector<float> values = (backward ? dq : out).values(), got = device_lse.values();
    for (int64_t t = 0; t < count; ++t) {
      const int32_t token = tokens[static_cast<size_t>(t)];
      std::copy_n(values.begin() + t * width, width, (backward ? whole.dq : whole.out).begin() + token * width);
      for (int head = 0; head < s.heads && !backward; ++head)
        whole.lse[static_cast<size_t>(head * n + token)] = got[static_cast<size_t>(head * count + t)];
    }
  }

  const AttentionCase& c_;
  const PieceRun& run_;
  const int rank_;
  ThreadPool pool_{1};
  const DeviceContext context_;
  std::unique_ptr<Communicator> group_, data_;
  std::unique_ptr<SelectingAttention> ring_;
  std::vector<KeyPage> pages_;
  std::vector<std::unique_ptr<AttentionState>> states_;
  std::unique_ptr<DeviceTensor> k_, v_, dk_, dv_;
  Arena scratch_{"none", 0};
};

PieceResults run_pieces(const AttentionCase& c, const PieceRun& run) {
  PieceResults results;
  results.whole.out.assign(c.q.size(), std::nanf(""));
  results.whole.dq = results.whole.out;
  results.whole.dk.assign(c.k.size(), std::nanf(""));
  results.whole.dv = results.whole.dk;
  results.whole.lse.assign(static_cast<size_t>(c.tokens() * c.shape.heads), std::nanf(""));
  std::mutex mutex;
  run_thread_ranks(run.ranks, [&](Communicator& world) {
    RankRun own(world, c, run);
    own.run(results);
    const std::lock_guard lock(mutex);
    const AttentionReport report = own.report();
    results.pairs += report.layers[0].pairs;
    results.causal_pairs += report.layers[0].causal_pairs;
    if (world.rank() == 0) results.samples = report.samples;
  });
  return results;
}

// The lists of one CPU.
class KeepIndex final : public ForwardingAttention {
 public:
  explicit KeepIndex(SparseAttention& inner) : ForwardingAttention(inner) {}
  void forward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
               const AttentionOperands& operands, AttentionState& state, bool replay) override {
    ForwardingAttention::forward(exec, layer, shape, sequences, operands, state, replay);
    index = SparseAttention::index(state);
  }
  BlockIndex index;
};

class CudaRingPieces : public testing::TestWithParam<DType> {
 protected:
  void SetUp() override {
    if (!cuda::problem().empty()) GTEST_SKIP() << cuda::problem();
  }
  double tolerance() const { return GetParam() == DType::f32 ? 1e-5 : 1e-2; }
};

INSTANTIATE_TEST_SUITE_P(Types, CudaRingPieces, testing::Values(DType::f32, DType::bf16),
                         [](const auto& given) { return std::string(dtype_name(given.param)); });

// Pieces of one block, of which all ranks but one hold nothing, to pieces of several; odd lengths.
TEST_P(CudaRingPieces, GiveWhatTheWholeGives) {
  const AttentionCase c = rounded({shape_of(4, 2, 64), {test::sized(1333, 900)}, 11, 2.0});
  const auto divisions =
      test::sized<std::vector<std::pair<int, int>>>({{2, 128}, {2, 384}, {3, 640}, {1, 256}}, {{2, 128}, {3, 640}});
  struct Case {
    SelectionPattern pattern;
    BlockScore score = BlockScore::moments;
    int block = 128;
  };
  for (const Case& one : {Case{SelectionPattern::dense}, Case{SelectionPattern::topk}, Case{SelectionPattern::topp},
                          Case{SelectionPattern::window}, Case{SelectionPattern::mass, BlockScore::planes},
                          Case{SelectionPattern::topk, BlockScore::planes, 64}}) {
    SelectionConfig selection = config_of(one.pattern);
    selection.score = one.score;
    selection.score_channels = 16;
    selection.block = one.block;
    selection.coverage = 0.7;
    const bool dense = one.pattern == SelectionPattern::dense;
    const int rows = dense ? 0 : 9;
    SparseAttention alone({selection, 1, rows});
    alone.use(learned_of(c.shape));
    KeepIndex keeper(alone);
    run_attention(keeper, c, 1);
    ASSERT_TRUE(dense || keeper.index.token_pairs() < keeper.index.causal_token_pairs() * 9 / 10);
    const AttentionResults<double> expected =
        reference_attention(c, dense ? sees_everything : sees_by(keeper.index, c.shape));
    const AttentionReport report = alone.take_report();
    for (const auto& [ranks, piece] : divisions) {
      SCOPED_TRACE(testing::Message() << "pattern " << static_cast<int>(one.pattern) << ", blocks of " << one.block
                                      << ", " << ranks << " ranks, pieces of " << piece);
      const PieceResults got = run_pieces(c, {selection, GetParam(), ranks, piece, rows});
      expect_close(got.whole, expected, tolerance());
      EXPECT_EQ(got.pairs, report.layers[0].pairs);
      EXPECT_EQ(got.causal_pairs, report.layers[0].causal_pairs);
      ASSERT_EQ(got.samples.size(), report.samples.size());
      for (size_t i = 0; i < got.samples.size(); ++i) {
        EXPECT_EQ(got.samples[i].tokens, report.samples[i].tokens);
        EXPECT_NEAR(got.samples[i].sample.held, report.samples[i].sample.held, 1e-5);
      }
    }
  }
}

// The kernels for Hopper, where there are such: groups and dimensions that they take.
TEST_P(CudaRingPieces, HaveManyHeadsToo) {
  for (const int head_dim : {64, 128}) {
    const AttentionCase c = rounded({shape_of(16, 2, head_dim), {test::sized(3000, 900)}, 12, 2.0});
    SelectionConfig selection = config_of(SelectionPattern::topk);
    SparseAttention alone({selection, 1, 0});
    KeepIndex keeper(alone);
    run_attention(keeper, c, 1);
    const PieceResults got = run_pieces(c, {selection, GetParam(), 2, test::sized(1024, 384)});
    expect_close(got.whole, reference_attention(c, sees_by(keeper.index, c.shape)), tolerance());
  }
}

TEST_P(CudaRingPieces, ListsOfTheDeviceAreRefusedByName) {
  run_thread_ranks(2, [](Communicator& world) {
    ThreadPool pool(1);
    const DeviceContext context(DeviceKind::cuda, pool);
    const auto group = world.split(0, world.rank(), "cp");
    const auto data = make_staged_communicator(world, {DeviceKind::cuda, context.exec().stream}, 1 << 16);
    RingAttention::Options options{config_of(SelectionPattern::topk), 1, ContextPlacement::triangular, 0};
    options.lists_on_device = true;
    EXPECT_NE(make_cuda_ring_attention(*group, *data, options)->refuses_pieces().find("parallel.ring_lists"),
              std::string::npos);
  });
}

}  // namespace
}  // namespace sb
