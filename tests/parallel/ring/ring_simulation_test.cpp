#include "parallel/ring/ring_simulation.h"

#include <gtest/gtest.h>

#include <set>

#include "tests/parallel/ring/placements.h"

namespace sb {
namespace {

// Four nodes of eight, times as published for one attention call (milliseconds).
TEST(RingSimulation, HidesTheOuterRing) {
  const RingTimes times{0.51, 0.13, 0.98};
  EXPECT_NEAR(simulate_ring(RingShape(32, 32), 8, times), 31 * 0.98 + 0.51, 1e-9);
  EXPECT_NEAR(simulate_ring(RingShape(32, 8), 8, times), 32 * 0.51, 1e-9);
  EXPECT_NEAR(simulate_ring(RingShape(8, 8), 8, times), 8 * 0.51, 1e-9);  // one node: nothing to hide
  // An outer link slower than a whole turn shows: 3 transfers, then the last turn.
  EXPECT_NEAR(simulate_ring(RingShape(32, 8), 8, {0.51, 0.13, 5.0}), 3 * 5.0 + 8 * 0.51, 1e-9);
}

RingWork even_work(int ranks, int64_t each, int64_t outside) {
  RingWork work;
  work.ranks = ranks;
  work.ring.assign(int64_t{ranks} * ranks, each);
  work.outside.assign(ranks, outside);
  return work;
}

TEST(RingSimulation, FollowsTheWork) {
  const RingTimes times{0.5, 0.1, 0.8};
  // Equal steps are the simulation of equal steps.
  for (const int node : {8, 4, 2})
    EXPECT_NEAR(simulate_ring(RingShape(8, node), 4, times, even_work(8, 70, 0)),
                simulate_ring(RingShape(8, node), 4, times), 1e-9);
  // Half of the work outside: it comes first and hides nothing; the mean step stays the unit.
  EXPECT_NEAR(simulate_ring(RingShape(4, 4), 4, {1, 0, 0}, even_work(4, 10, 40)), 4.0, 1e-9);
  // One rank with twice the work of the others, transfers free: everybody waits for it at every step.
  RingWork uneven = even_work(4, 10, 0);
  for (int t = 0; t < 4; ++t) uneven.ring[t] = 20;
  EXPECT_NEAR(simulate_ring(RingShape(4, 4), 4, {1, 0, 0}, uneven), 4 * 20 / 12.5, 1e-9);
  EXPECT_EQ(simulate_ring(RingShape(4, 4), 4, {1, 0, 0}, even_work(4, 0, 0)), 0);
}

TEST(DrawnPattern, IsWhatItSays) {
  DrawnPattern pattern;
  pattern.tokens = 64 * 1024 - 5;
  pattern.heads = 3;
  pattern.verticals = 40;
  pattern.slash_density = 0.1;
  const BlockIndex index = draw_pattern(pattern);
  EXPECT_TRUE(index == draw_pattern(pattern));
  pattern.seed = 2;
  EXPECT_FALSE(index == draw_pattern(pattern));
  const BlockIndex::Sequence& sequence = index.sequences()[0];
  const int last = sequence.query_blocks - 1;
  ASSERT_EQ(last, 511);
  for (int head = 0; head < 3; ++head) {
    // The last row has every slash; others have those that fit.
    const BlockIndex::Row end = index.row(BlockIndex::row_id(sequence, head, last));
    std::set<int> slashes;
    double held = 0;
    for (const uint16_t j : end.blocks) slashes.insert(last - j);
    for (const int slash : slashes) held += 512 - slash;
    EXPECT_NEAR(held / (512 * 513 / 2.0), 0.1, 0.005);
    EXPECT_LE(end.columns.size(), 40u);
    EXPECT_GT(end.columns.size(), 20u);
    const BlockIndex::Row row = index.row(BlockIndex::row_id(sequence, head, 300));
    std::set<int> expected = {0};
    for (const int slash : slashes)
      if (slash <= 300) expected.insert(300 - slash);
    EXPECT_EQ(std::set<int>(row.blocks.begin(), row.blocks.end()), expected);
  }
  pattern.every = 32;
  const BlockIndex regular = draw_pattern(pattern);
  const BlockIndex::Row row = regular.row(BlockIndex::row_id(regular.sequences()[0], 1, 100));
  EXPECT_EQ(std::vector<int>(row.blocks.begin(), row.blocks.end()), (std::vector<int>{4, 36, 68, 100}));
  EXPECT_TRUE(row.columns.empty());
  pattern.tokens = 0;
  EXPECT_THROW(draw_pattern(pattern), UserError);
}

// The bounds that the placements are made for, on a pattern an eighth as long as published ones.
TEST(RingComparison, SpreadsTheWork) {
  DrawnPattern pattern;
  pattern.tokens = 128 * 1024;
  pattern.heads = 8;
  pattern.verticals = 125;
  RingComparison comparison;
  comparison.ranks = 16;
  comparison.machine_node = 4;
  comparison.placements.assign(std::begin(kPlacements), std::end(kPlacements));
  const std::vector<RingRow> rows = compare_placements(draw_pattern(pattern), comparison);
  ASSERT_EQ(rows.size(), 8u);
  for (const RingRow& row : rows) {
    EXPECT_GE(row.worker, 1);
    EXPECT_GE(row.computing, row.ideal - 1e-9);
    EXPECT_GE(row.plain_exposed(), -1e-9);
  }
  const RingRow& zigzag = rows[1];
  const RingRow& triangular = rows[7];
  EXPECT_EQ(triangular.placement, ContextPlacement::triangular);
  EXPECT_TRUE(triangular.copied);
  EXPECT_LT(triangular.worker, 1.05);
  EXPECT_LT(triangular.step, 1.5);
  EXPECT_LT(triangular.lock_step, 1.15);
  EXPECT_GT(zigzag.step, 2);
  EXPECT_LT(triangular.hierarchical_exposed(), 0.3 * triangular.plain_exposed());
  const std::string table = ring_table(rows);
  EXPECT_EQ(std::count(table.begin(), table.end(), '\n'), 9);

  pattern.every = 16;
  const std::vector<RingRow> regular = compare_placements(draw_pattern(pattern), comparison);
  EXPECT_GT(regular[3].step, 10);  // striped: all of a rank's work in one step
  EXPECT_LT(regular[7].step, 1.3);
}

}  // namespace
}  // namespace sb
