// Scores by planes where several ranks share the sequences: the lists and the coverage of one rank alone.
#include <gtest/gtest.h>

#include "attention/select/planes.h"
#include "comm/thread_communicator.h"
#include "parallel/ring/ring_selection.h"
#include "tests/attention/sparse_cases.h"

namespace sb {
namespace {

using Pattern = SelectionPattern;
using Order = SelectionOrder;

struct RingPlanesCase {
  Pattern pattern;
  Order order;
};
class RingPlanes : public testing::TestWithParam<std::tuple<RingPlanesCase, int>> {
 protected:
  RingPlanes() {
    config_.pattern = std::get<0>(GetParam()).pattern;
    config_.order = std::get<0>(GetParam()).order;
    config_.score = BlockScore::planes;
    config_.score_channels = 6;
    config_.block = 64;
    config_.budget = 384;
    config_.dense_below = 128;
    config_.local_blocks = 1;
    Exec exec;
    exec.pool = &pool_;
    earlier_.planes = {measure_planes(exec, case_.shape, case_.q.data(), case_.k.data(), case_.tokens())};
    planes_ = select_planes(case_.shape, earlier_.planes[0], 6);
  }

  SequenceTiles tiles(int s) const {
    return sequence_tiles(config_, case_.cu_seqlens[s + 1] - case_.cu_seqlens[s], config_.budget);
  }

  // Lists and coverage of one rank alone.
  void select_alone() {
    Exec exec;
    exec.pool = &pool_;
    Selector selector(config_);
    BlockIndexBuilder builder;
    const int sequences = static_cast<int>(case_.cu_seqlens.size()) - 1;
    std::vector<uint8_t> dense(sequences);
    for (int s = 0; s < sequences; ++s) dense[s] = runs_dense(config_, 0, tiles(s));
    builder.begin(alone_, {config_.block, config_.query_block, case_.shape.kv_heads}, case_.cu_seqlens, dense, 2);
    for (int s = 0; s < sequences; ++s) {
      if (dense[s]) continue;
      const std::vector<float> statistics = statistics_of(exec, s);
      SelectionRequest request = request_of(s);
      request.statistics = statistics.data();
      request.place = alone_.sequences()[s];
      selector.select(exec, request, builder);
    }
    builder.finish(pool_);
    for (int s = 0; s < sequences; ++s) {
      const std::vector<float> statistics = statistics_of(exec, s);
      const SelectionRequest request = request_of(s);
      coverage_.push_back(
          measure_coverage(exec, case_.shape, tiles(s),
                           {request.q, request.k, statistics.data(), BlockScoring(config_), 7, &alone_, s, &planes_}));
    }
  }

  SelectionRequest request_of(int s) const {
    SelectionRequest request;
    request.shape = case_.shape;
    request.tiles = tiles(s);
    request.q = case_.q.data() + case_.cu_seqlens[s] * case_.shape.heads * case_.shape.head_dim;
    request.k = case_.k.data() + case_.cu_seqlens[s] * case_.shape.kv_heads * case_.shape.head_dim;
    request.planes = &planes_;
    request.threshold = start_threshold(request.tiles);
    return request;
  }
  std::vector<float> statistics_of(const Exec& exec, int s) const {
    const BlockScoring scoring(config_);
    std::vector<float> rows(BlockStatistics::floats(scoring, case_.shape, tiles(s).blocks()));
    BlockStatistics::fill(exec, case_.shape, scoring, request_of(s).k, tiles(s).tokens, rows.data(), &planes_);
    return rows;
  }

  AttentionCase case_{shape_of(4, 2, 16), {1500, 64, 100, 901}, 11, 2.0};
  SelectionConfig config_;
  ThreadPool pool_{2};
  LearnedSelection earlier_;
  LayerPlanes planes_;
  BlockIndex alone_;
  std::vector<CoverageSample> coverage_;
};

std::vector<float> taken(const std::vector<float>& whole, const std::vector<int32_t>& tokens, int64_t width) {
  std::vector<float> part;
  for (const int32_t token : tokens)
    part.insert(part.end(), whole.begin() + token * width, whole.begin() + (token + 1) * width);
  return part;
}

TEST_P(RingPlanes, SelectAndMeasureAsOneRankDoes) {
  select_alone();
  const int ranks = std::get<1>(GetParam());
  const AttentionShape& shape = case_.shape;
  const ContextLayout layout(ContextPlacement::triangular, ranks, 64, case_.cu_seqlens);
  std::vector<BlockIndex> selected(ranks);
  std::vector<std::vector<CoverageSample>> coverage(ranks);
  run_thread_ranks(ranks, [&](Communicator& world) {
    const int rank = world.rank();
    const auto group = world.split(0, rank, "cp");
    const std::vector<int32_t> tokens = layout.tokens(rank);
    const std::vector<float> q = taken(case_.q, tokens, shape.heads * shape.head_dim);
    const std::vector<float> k = taken(case_.k, tokens, shape.kv_heads * shape.head_dim);
    int64_t most = 0;
    for (int r = 0; r < ranks; ++r) most = std::max(most, std::ssize(layout.tokens(r)));
    RingSelection selection(config_, 1);
    selection.step().use(earlier_);
    Arena scratch("scratch", selection.scratch_bytes(shape, most, ranks));
    ThreadPool pool(1);
    const Exec exec{DeviceKind::cpu, &pool, nullptr, &scratch};
    selection.select(exec, *group, 0, shape, layout, {}, q.data(), k.data(), selected[rank]);
    coverage[rank] = selection.measure(exec, *group, 0, shape, layout, {}, q.data(), k.data(), selected[rank], 7);
  });
  int64_t compared = 0;
  for (int64_t id = 0; id < alone_.rows(); ++id) {
    const auto place = alone_.place_of(id);
    const auto sequence = static_cast<int>(place.sequence - alone_.sequences().data());
    const int owner = layout.owner(sequence, place.query_block * config_.query_block / 64);
    const BlockIndex::Row row = alone_.row(id), other = selected[owner].row(id);
    ASSERT_TRUE(std::ranges::equal(row.blocks, other.blocks) && std::ranges::equal(row.first, other.first))
        << "row " << id << " rank " << owner;
    compared += std::ssize(row.blocks);
  }
  EXPECT_GT(compared, 1000);
  for (int r = 0; r < ranks; ++r)
    for (size_t s = 0; s < coverage_.size(); ++s) {
      EXPECT_NEAR(coverage[r][s].held, coverage_[s].held, 1e-5);
      ASSERT_EQ(coverage[r][s].curve.size(), coverage_[s].curve.size());
      for (size_t i = 0; i < coverage_[s].curve.size(); ++i)
        EXPECT_NEAR(coverage[r][s].curve[i], coverage_[s].curve[i], 1e-5);
    }
}

INSTANTIATE_TEST_SUITE_P(Ring, RingPlanes,
                         testing::Combine(testing::Values(RingPlanesCase{Pattern::topk, Order::causal},
                                                          RingPlanesCase{Pattern::topk, Order::lookahead},
                                                          RingPlanesCase{Pattern::topp, Order::causal},
                                                          RingPlanesCase{Pattern::mass, Order::causal},
                                                          RingPlanesCase{Pattern::mass, Order::lookahead}),
                                          testing::Values(1, 2, 4)));

}  // namespace
}  // namespace sb
