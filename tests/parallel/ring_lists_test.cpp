// What a ring of GPUs plans on the host for making its lists on the device: followed by hand, it gives the passes that
// the ring of CPUs builds.
#include "parallel/cuda/ring_lists.h"

#include <gtest/gtest.h>

#include <map>

#include "core/random.h"

namespace sb::gpu {
namespace {

struct RingCase {
  int ranks, block, query_block;
  std::vector<int32_t> lengths;
  int keys = kBlock;  // of an item of the backward
};

// Rows with random choices, besides those that are always chosen, for all query blocks that `rank` holds.
void choose_at_random(const ContextLayout& layout, int rank, const SelectionConfig& config, int heads,
                      const std::vector<bool>& dense, BlockIndex& index, ThreadPool& pool) {
  BlockIndexBuilder builder;
  builder.begin(index, {config.block, config.query_block, heads}, layout.cu_seqlens(),
                std::vector<uint8_t>(dense.begin(), dense.end()), 1);
  uint64_t seed = 7;
  for (int s = 0; s < layout.sequences(); ++s) {
    if (dense[s]) continue;
    for (const int32_t b : layout.held(rank, s))
      for (int head = 0; head < heads; ++head)
        for (int64_t tile = int64_t{b} * config.block / config.query_block;
             tile * config.query_block < b * config.block + layout.block_length(s, b); ++tile) {
          const int64_t tokens = b * config.block + layout.block_length(s, b) - tile * config.query_block;
          std::vector<IndexEntry> row;
          for (int32_t j = 0; j <= b; ++j) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            const auto draw = static_cast<uint32_t>(seed >> 33);
            if (j == 0 || j == b || draw % 3 == 0)
              row.push_back({static_cast<uint16_t>(j),
                             static_cast<uint8_t>(j == b ? 0 : draw / 3 % std::min<int64_t>(2, tokens))});
          }
          builder.set_row(0, BlockIndex::row_id(index.sequences()[s], head, static_cast<int>(tile)), row);
        }
  }
  builder.finish(pool);
}

class RingLists : public testing::TestWithParam<RingCase> {};

INSTANTIATE_TEST_SUITE_P(Cases, RingLists,
                         testing::Values(RingCase{2, 128, 16, {1100, 3, 129, 640, 257}},
                                         RingCase{3, 64, 16, {700, 64, 900, 0, 65}},
                                         RingCase{3, 64, 16, {700, 64, 900, 0, 65}, 64}, RingCase{4, 128, 128, {2000}},
                                         RingCase{4, 256, 32, {3000, 100, 1500}}, RingCase{8, 128, 16, {300, 1290}}));

TEST_P(RingLists, AreThoseOfThePlanOfTheCpu) {
  const RingCase& c = GetParam();
  std::vector<int32_t> cu_seqlens = {0};
  for (const int32_t length : c.lengths) cu_seqlens.push_back(cu_seqlens.back() + length);
  const ContextLayout layout(ContextPlacement::triangular, c.ranks, c.block, cu_seqlens);
  SelectionConfig config;
  config.block = c.block;
  config.query_block = c.query_block;
  config.budget = 3 * c.block;
  const AttentionShape shape{4, 2, 64, 0.125f};
  ThreadPool pool(1);
  for (const bool whole : {false, true})
    for (int rank = 0; rank < c.ranks; ++rank) {
      SCOPED_TRACE(fmt::format("rank {} of {}, {}", rank, c.ranks, whole ? "dense" : "sparse"));
      std::vector<bool> dense;
      for (const int32_t length : c.lengths) dense.push_back(whole || length <= 2 * c.block);
      BlockIndex index;
      choose_at_random(layout, rank, config, shape.kv_heads, dense, index, pool);
      const ReplicatedKeys replicated = replicated_keys(layout, index, 1, {});
      RingPlan expected;
      expected.build(layout, rank, shape.kv_heads, index, replicated, 1, pool);

      RingListRequest request;
      request.layout = &layout;
      request.rank = rank;
      request.replicated = &replicated;
      request.replicated_blocks = whole ? 0 : 1;
      const int64_t tokens = layout.local_cu_seqlens(rank).back();
      request.shape = {tokens, shape.heads, shape.kv_heads, shape.head_dim, shape.scale};
      request.config = config;
      request.config.pattern = SelectionPattern::topk;
      if (whole) request.config.query_block = std::min(c.block, kDenseQueryBlock);
      request.copies = !whole;
      request.scored = !whole;
      request.multiprocessors = 4;
      request.batch_masses = 1 << 20;
      request.keys = c.keys;
      for (int s = 0; s < layout.sequences(); ++s) {
        // More than everything: rows with room for any choice.
        request.tiles.push_back(sequence_tiles(request.config, layout.length(s), (layout.blocks(s) + 8) * c.block));
        request.left_out.push_back(dense[s] != whole);
      }
      const RingListPlan plan = make_ring_lists(request);
      const int query_block = request.config.query_block, block = std::min(c.block, kBlock), expand = c.block / block;

      // The rows as the selection would write them, of all key blocks.
      std::vector<std::vector<uint32_t>> chosen(plan.rows.size());
      std::vector<int32_t> counts(static_cast<size_t>(plan.select.columns));
      int32_t row_base = 0, column_base = 0;
      for (int s = 0; s < layout.sequences(); ++s) {
        int32_t row = row_base;
        for (const int32_t b : layout.held(rank, s))
          for (int64_t token = int64_t{b} * c.block; token < int64_t{b} * c.block + layout.block_length(s, b);
               token += query_block, ++row)
            for (int head = 0; head < shape.kv_heads && !request.left_out[s]; ++head) {
              std::vector<uint32_t>& to = chosen[head * plan.select.rows + row];
              const auto visible =
                  static_cast<uint32_t>((std::min<int64_t>(token + query_block, layout.length(s)) + block - 1) / block);
              EXPECT_EQ(plan.rows[head * plan.select.rows + row].visible, visible);
              const auto add = [&](int64_t j, int first) {
                for (int64_t fine = j * expand; fine < std::min<int64_t>((j + 1) * expand, visible); ++fine) {
                  to.push_back(list_entry(static_cast<uint32_t>(fine), static_cast<uint32_t>(first)));
                  ++counts[head * (plan.select.columns / shape.kv_heads) + column_base + fine];
                }
              };
              if (whole) {
                for (int64_t j = 0; j <= b; ++j) add(j, 0);
              } else {
                const BlockIndex::Row from =
                    index.row(BlockIndex::row_id(index.sequences()[s], head, static_cast<int>(token / query_block)));
                for (size_t i = 0; i < from.blocks.size(); ++i) add(from.blocks[i], from.first[i]);
              }
              ASSERT_LE(std::ssize(to), plan.rows[head * plan.select.rows + row].capacity);
            }
        row_base = row;
        column_base += static_cast<int32_t>((layout.length(s) + block - 1) / block);
      }

      // Cut by hand.
      int passes_found = 0;
      std::vector<int32_t> offsets = {0};
      for (const int32_t source : plan.column_sources)
        offsets.push_back(offsets.back() + (source < 0 ? 0 : counts[source]));
      for (int p = 0; p <= c.ranks; ++p) {
        const RingPassPlan& pass = plan.passes[p];
        const std::span<const RingPass> all =
            p < c.ranks ? expected.passes(p) : std::span(expected.copies(), expected.copies() == nullptr ? 0 : 1);
        const RingPass* wanted = nullptr;
        for (const RingPass& one : all)  // sparse and dense sequences have different query blocks in all cases
          if (one.index.shape().query_block == query_block) wanted = &one;
        std::map<std::tuple<int, int, int>, std::vector<uint32_t>> rows, columns;  // by sequence, head, number
        for (const ForwardItem& item : pass.work.forward) {
          const auto sequence = std::upper_bound(pass.cu_seqlens.begin(), pass.cu_seqlens.end(), item.token) -
                                pass.cu_seqlens.begin() - 1;
          EXPECT_EQ(item.token - pass.cu_seqlens[sequence], item.position);
          for (int i = 0; i < item.tokens; ++i) EXPECT_GE(pass.queries[item.token + i], 0);
          std::vector<uint32_t>& row = rows[{sequence, item.head, item.position / query_block}];
          row.clear();
          for (const uint32_t entry : chosen[item.list_begin]) {
            const RingBlock& at = plan.blocks[plan.rows[item.list_begin].block + entry_id(entry)];
            if (at.pass == p) row.push_back(list_entry(at.place, entry_first(entry)));
          }
        }
        for (const RingGroup& group : plan.groups)
          for (int i = 0; i < group.blocks; ++i) {
            const RingBlock& at = plan.blocks[group.block + i];
            EXPECT_EQ(group.column, group.head * (plan.select.columns / shape.kv_heads) + group.block);
            if (at.pass != p || at.column < 0) continue;
            const int column = at.column + group.head * plan.head_columns[p];
            EXPECT_EQ(plan.column_sources[column],
                      group.head * (plan.select.columns / shape.kv_heads) + group.block + i);
            // Its number among the blocks of the made-up sequences says which one it is.
            int number = at.column - pass.first_column, sequence = 0;
            const auto blocks_of = [&](int q) {
              return (pass.cu_seqlens[q + 1] - pass.cu_seqlens[q] + block - 1) / block;
            };
            while (number >= blocks_of(sequence)) number -= blocks_of(sequence++);
            EXPECT_EQ(number, at.place);
            std::vector<uint32_t>& to = columns[{sequence, group.head, number}];
            for (int r = 0; r < group.rows; ++r)
              for (const uint32_t entry : chosen[group.row + r])
                if (static_cast<int>(entry_id(entry)) == group.first + i)
                  to.push_back(list_entry(at.query_block + r, entry_first(entry)));
            EXPECT_EQ(std::ssize(to), offsets[column + 1] - offsets[column]);
          }
        // Items of the backward, of so many keys each, and the columns of their blocks.
        int32_t item_column = 0, keys_of_items = 0;
        for (int32_t i = 0; i < pass.work.head_places; ++i) {
          const BackwardItem& item = pass.work.places[i];
          EXPECT_EQ(item.position % c.keys, 0);
          EXPECT_LE(item.keys, c.keys);
          EXPECT_EQ(item.column, item_column);
          item_column += (item.keys + block - 1) / block;
          keys_of_items += item.keys;
        }
        EXPECT_EQ(item_column, plan.head_columns[p]);
        EXPECT_EQ(keys_of_items, pass.tokens());
        if (wanted == nullptr) {
          for (const auto& [place, row] : rows) EXPECT_TRUE(row.empty());
          continue;
        }
        ++passes_found;
        std::vector<int32_t> begin;
        for (const RingPass::Part& part : wanted->parts) begin.push_back(static_cast<int32_t>(part.begin));
        EXPECT_TRUE(std::equal(begin.begin(), begin.end(), pass.cu_seqlens.begin()));
        EXPECT_EQ(wanted->tokens(), pass.tokens());
        for (size_t q = 0; q < wanted->parts.size(); ++q)
          for (int head = 0; head < shape.kv_heads; ++head) {
            const BlockIndex::Sequence& sequence = wanted->index.sequences()[q];
            for (int tile = 0; tile < sequence.query_blocks; ++tile) {
              const BlockIndex::Row row = wanted->index.row(BlockIndex::row_id(sequence, head, tile));
              std::vector<uint32_t> fine;
              for (size_t i = 0; i < row.blocks.size(); ++i)
                for (int e = 0; e < expand; ++e) {
                  const auto id = static_cast<uint32_t>(row.blocks[i] * expand + e);
                  if (int64_t{id} * block < int64_t{tile + 1} * query_block && int64_t{id} * block < sequence.length)
                    fine.push_back(list_entry(id, row.first[i]));
                }
              const auto found = rows.find({static_cast<int>(q), head, tile});
              EXPECT_EQ(found == rows.end() ? std::vector<uint32_t>() : found->second, fine)
                  << "pass " << p << " sequence " << q << " head " << head << " tile " << tile;
            }
            for (int j = 0; j < sequence.key_blocks; ++j) {
              std::vector<uint32_t> fine;
              for (const uint32_t entry : wanted->index.column(BlockIndex::column_id(sequence, head, j)))
                fine.push_back(list_entry(BlockIndex::query_block_of(entry), BlockIndex::first_of(entry)));
              const auto found = columns.find({static_cast<int>(q), head, j * expand});
              EXPECT_EQ(found == columns.end() ? std::vector<uint32_t>() : found->second, fine)
                  << "pass " << p << " sequence " << q << " head " << head << " key block " << j;
            }
          }
      }
      bool any = false;
      for (int s = 0; s < layout.sequences(); ++s) any = any || (!request.left_out[s] && !layout.held(rank, s).empty());
      EXPECT_EQ(passes_found > 0, any);

      // Every block's statistics arrive once, where they belong.
      if (whole) continue;
      std::vector<int> arrived(static_cast<size_t>(plan.select.statistics_rows));
      for (const int32_t place : plan.statistics)
        if (place >= 0) ++arrived[place];
      EXPECT_EQ(std::count(arrived.begin(), arrived.end(), 1), std::ssize(arrived));
      for (size_t i = 0; i < plan.select.blocks.size(); ++i)
        EXPECT_GE(plan.statistics[rank * plan.piece + static_cast<int64_t>(i)], 0);
    }
}

}  // namespace
}  // namespace sb::gpu
