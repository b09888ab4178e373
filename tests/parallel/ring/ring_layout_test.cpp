#include <gtest/gtest.h>

#include "core/random.h"
#include "parallel/ring/context_layout.h"
#include "tests/parallel/ring/placements.h"

namespace sb {
namespace {

TEST(ContextOwner, IsAsDescribed) {
  for (int64_t b = 0; b < 100; ++b) {
    EXPECT_EQ(context_owner(ContextPlacement::striped, 4, 100, b), b % 4);
    EXPECT_EQ(context_owner(ContextPlacement::shifted, 4, 100, b), (b + b / 4) % 4);
    int64_t shift = 0;
    for (int64_t turn = 1; turn <= b / 4; ++turn) shift += turn;
    EXPECT_EQ(context_owner(ContextPlacement::triangular, 4, 100, b), (b + shift) % 4);
  }
  const int zigzag[] = {0, 0, 1, 1, 2, 2, 2, 2, 1, 1, 0, 0};  // three ranks, two blocks per run
  for (int64_t b = 0; b < 12; ++b) EXPECT_EQ(context_owner(ContextPlacement::zigzag, 3, 12, b), zigzag[b]);
}

TEST(ContextLayout, HoldsEveryTokenOnce) {
  const std::vector<int32_t> packings[] = {{0},      {0, 0}, {0, 1}, {0, 8}, {0, 8, 17}, {0, 3, 3, 100, 228, 229},
                                           {0, 1000}};
  for (const auto& cu_seqlens : packings)
    for (const ContextPlacement placement : kPlacements)
      for (const int ranks : {1, 2, 3, 4, 8}) {
        const ContextLayout layout(placement, ranks, 8, cu_seqlens);
        std::vector<int> seen(cu_seqlens.back());
        for (int r = 0; r < ranks; ++r) {
          const std::vector<int32_t> tokens = layout.tokens(r), local = layout.local_cu_seqlens(r);
          ASSERT_EQ(local.size(), cu_seqlens.size());
          ASSERT_EQ(local.back(), static_cast<int32_t>(tokens.size()));
          EXPECT_TRUE(std::is_sorted(tokens.begin(), tokens.end()));
          for (int s = 0; s < layout.sequences(); ++s)
            for (int32_t i = local[s]; i < local[s + 1]; ++i) {
              const int32_t token = tokens[i];
              ++seen[token];
              ASSERT_TRUE(token >= cu_seqlens[s] && token < cu_seqlens[s + 1]);
              const int64_t b = (token - cu_seqlens[s]) / 8;
              EXPECT_EQ(layout.owner(s, b), r);
              EXPECT_EQ(local[s] + layout.place(s, b) * 8 + (token - cu_seqlens[s]) % 8, i);
            }
        }
        for (const int count : seen) ASSERT_EQ(count, 1);
      }
}

TEST(ContextLayout, MostTokensIsABound) {
  Random rng(9);
  for (int round = 0; round < 300; ++round) {
    std::vector<int32_t> cu_seqlens = {0};
    const auto sequences = static_cast<int64_t>(1 + rng.below(round % 3 == 0 ? 60 : 6));
    for (int64_t i = 0; i < sequences; ++i)
      cu_seqlens.push_back(cu_seqlens.back() + static_cast<int32_t>(rng.below(round % 2 == 0 ? 40 : 700)));
    const int ranks = 1 + static_cast<int>(rng.below(9));
    const int64_t most = ContextLayout::most_tokens(ranks, 8, cu_seqlens.back(), sequences);
    for (const ContextPlacement placement : kPlacements) {
      const ContextLayout layout(placement, ranks, 8, cu_seqlens);
      for (int r = 0; r < ranks; ++r) ASSERT_LE(std::ssize(layout.tokens(r)), most) << ranks;
    }
  }
}

TEST(ContextLayout, SpreadsShortSequences) {
  std::vector<int32_t> cu_seqlens = {0};
  for (int i = 0; i < 40; ++i) cu_seqlens.push_back(cu_seqlens.back() + 128);  // one block each
  for (const ContextPlacement placement : kPlacements) {
    const ContextLayout layout(placement, 8, 128, cu_seqlens);
    for (int r = 0; r < 8; ++r) EXPECT_EQ(layout.tokens(r).size(), 5u * 128);
  }
}

// A few blocks too many for the ranks, again and again: the remainders do not pile up on one of them.
TEST(ContextLayout, RemaindersOfEqualSequencesEvenOut) {
  for (const ContextPlacement placement : kPlacements)
    for (const int ranks : {2, 3, 4, 5, 8})
      for (const int length : {1, 130, 338, 640, 1024, 1500}) {
        constexpr int kSequences = 120;  // a multiple of every number of ranks
        std::vector<int32_t> cu_seqlens = {0};
        for (int i = 0; i < kSequences; ++i) cu_seqlens.push_back(cu_seqlens.back() + length);
        const ContextLayout layout(placement, ranks, 128, cu_seqlens);
        for (int r = 0; r < ranks; ++r)
          EXPECT_LE(std::ssize(layout.tokens(r)), kSequences * length / ranks + 2 * 128)
              << static_cast<int>(placement) << " of " << ranks << " ranks, " << length << " tokens";
      }
}

// Pairs counted one by one.
RingWork counted_one_by_one(const ContextLayout& layout, const BlockIndex& index, int replicated) {
  RingWork work{layout.ranks(), std::vector<int64_t>(layout.ranks() * layout.ranks()),
                std::vector<int64_t>(layout.ranks())};
  const int block = layout.block();
  for (int s = 0; s < layout.sequences(); ++s)
    for (int head = 0; head < index.shape().list_heads; ++head)
      for (int64_t q = 0; q < layout.length(s); ++q)
        for (int64_t k = 0; k <= q; ++k) {
          bool selected = index.sequences()[s].dense, copied = false;
          if (!selected) {
            const int tile = static_cast<int>(q / index.shape().query_block);
            const BlockIndex::Row row = index.row(BlockIndex::row_id(index.sequences()[s], head, tile));
            for (size_t n = 0; n < row.blocks.size(); ++n)
              if (row.blocks[n] == k / block && q % index.shape().query_block >= row.first[n]) selected = true;
            copied = selected && k / block < replicated;
            for (const int32_t column : row.columns)
              if (column == k) selected = copied = true;
          }
          if (!selected) continue;
          const int w = layout.owner(s, q / block), c = layout.owner(s, k / block);
          if (copied)
            ++work.outside[w];
          else
            ++work.ring[w * layout.ranks() + (w - c + layout.ranks()) % layout.ranks()];
        }
  return work;
}

TEST(RingWork, EqualsABruteForceCount) {
  ThreadPool pool(1);
  Random rng(5);
  const std::vector<int32_t> cu_seqlens = {0, 300, 300, 437, 1200};
  for (const int query_block : {16, 64}) {
    BlockIndex index;
    BlockIndexBuilder builder;
    const std::vector<uint8_t> dense = {0, 0, 1, 0};
    builder.begin(index, {64, query_block, 2}, cu_seqlens, dense, 1);
    for (const BlockIndex::Sequence& sequence : index.sequences())
      for (int head = 0; head < 2 && !sequence.dense; ++head)
        for (int tile = 0; tile < sequence.query_blocks; ++tile) {
          std::vector<IndexEntry> entries;
          std::vector<int32_t> columns;
          const int last = std::min((tile + 1) * query_block, sequence.length) - 1,
                    rows = last + 1 - tile * query_block;
          for (int j = 0; j <= last / 64; ++j) {
            if (rng.uniform() < 0.5)
              entries.push_back({static_cast<uint16_t>(j), static_cast<uint8_t>(rng.below(rows))});
            else if (rng.uniform() < 0.5 && j < last / 64)
              columns.push_back(j * 64 + static_cast<int32_t>(rng.below(64)));
          }
          builder.set_row(0, BlockIndex::row_id(sequence, head, tile), entries, columns);
        }
    builder.finish(pool);
    for (const ContextPlacement placement : kPlacements)
      for (const int ranks : {1, 3, 4}) {
        const ContextLayout layout(placement, ranks, 64, cu_seqlens);
        for (const int replicated : {0, 1}) {
          const RingWork work = count_ring_work(layout, index, replicated);
          const RingWork expected = counted_one_by_one(layout, index, replicated);
          EXPECT_EQ(work.ring, expected.ring);
          EXPECT_EQ(work.outside, expected.outside);
          EXPECT_EQ(work.total(), index.token_pairs());
        }
      }
  }
}

TEST(RingWork, ImbalanceOfAHandMadeCase) {
  const RingWork work{2, {4, 0, 1, 3}, {2, 2}};
  EXPECT_DOUBLE_EQ(work.worker_imbalance(), 1.0);            // 6 and 6
  EXPECT_DOUBLE_EQ(work.step_imbalance(), (2.0 + 1.5) / 2);  // 4 of mean 2; 3 of mean 2
  EXPECT_DOUBLE_EQ(work.lock_step_over_ideal(), (2.0 + 4 + 3) / 6);
  const RingWork nothing{2, {0, 0, 0, 0}, {0, 0}};
  EXPECT_DOUBLE_EQ(nothing.worker_imbalance(), 1.0);
  EXPECT_DOUBLE_EQ(nothing.step_imbalance(), 1.0);
  EXPECT_DOUBLE_EQ(nothing.lock_step_over_ideal(), 1.0);
}

// Slashes at multiples of the number of ranks: plain stripes compute all of them in one step, shifted ones do not.
TEST(RingWork, ShiftKeepsRegularSlashesApart) {
  const int ranks = 8, blocks = 256;
  const std::vector<int32_t> cu_seqlens = {0, blocks * 64};
  ThreadPool pool(1);
  BlockIndex index;
  BlockIndexBuilder builder;
  builder.begin(index, {64, 64, 1}, cu_seqlens, {}, 1);
  for (int i = 0; i < blocks; ++i) {
    std::vector<IndexEntry> entries;
    for (int j = i % ranks; j <= i; j += ranks) entries.push_back({static_cast<uint16_t>(j), 0});
    builder.set_row(0, i, entries);
  }
  builder.finish(pool);
  const RingWork striped = count_ring_work(ContextLayout(ContextPlacement::striped, ranks, 64, cu_seqlens), index, 0);
  EXPECT_DOUBLE_EQ(striped.step_imbalance(), ranks);
  for (const ContextPlacement placement : {ContextPlacement::shifted, ContextPlacement::triangular}) {
    const RingWork work = count_ring_work(ContextLayout(placement, ranks, 64, cu_seqlens), index, 0);
    EXPECT_LT(work.step_imbalance(), 1.6);
    EXPECT_LT(work.lock_step_over_ideal(), 1.6);
  }
}

}  // namespace
}  // namespace sb
