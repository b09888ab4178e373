// What a ring of GPUs plans on the host for making its lists on the device: followed by hand, it gives the passes that
// the ring of CPUs builds.
#include "parallel/ring/gpu/ring_lists.h"

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

// Rows with random selections, besides those that are always selected, for all query blocks that `rank` holds.
void select_at_random(const ContextLayout& layout, int rank, const SelectionConfig& config, int heads,
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

// One rank's lists of its sparse or of its dense sequences: the plan under test, and the rows that a selection would
// write by it, cut by hand.
class FollowedPlan {
 public:
  FollowedPlan(const RingCase& c, const ContextLayout& layout, int rank, bool whole)
      : case_(c), layout_(layout), rank_(rank), whole_(whole), block_(std::min(c.block, kBlock)) {
    config_.block = c.block;
    config_.query_block = c.query_block;
    config_.budget = 3 * c.block;
    for (const int32_t length : c.lengths) dense_.push_back(whole || length <= 2 * c.block);
    select_at_random(layout, rank, config_, kShape.kv_heads, dense_, index_, pool_);
    const ReplicatedKeys replicated = replicated_keys(layout, index_, 1, {});
    expected_.build(layout, rank, kShape.kv_heads, index_, replicated, 1, pool_);
    plan(replicated);
  }

  void check() {
    write_rows();
    int passes_found = 0;
    for (int p = 0; p <= case_.ranks; ++p) {
      check_items(p);
      const Lists rows = cut_rows(p), columns = cut_columns(p);
      if (const RingPass* wanted = wanted_pass(p)) {
        ++passes_found;
        compare(p, *wanted, rows, columns);
      } else {
        for (const auto& [place, row] : rows) EXPECT_TRUE(row.empty());
      }
    }
    bool any = false;
    for (int s = 0; s < layout_.sequences(); ++s) any = any || (!left_out_[s] && !layout_.held(rank_, s).empty());
    EXPECT_EQ(passes_found > 0, any);
    if (!whole_) check_statistics();
  }

 private:
  using Lists = std::map<std::tuple<int, int, int>, std::vector<uint32_t>>;  // by sequence, head, number
  static constexpr AttentionShape kShape{4, 2, 64, 0.125f};

  void plan(const ReplicatedKeys& replicated) {
    RingListRequest request;
    request.layout = &layout_;
    request.rank = rank_;
    request.replicated = &replicated;
    request.replicated_blocks = whole_ ? 0 : 1;
    const int64_t tokens = layout_.local_cu_seqlens(rank_).back();
    request.shape = {tokens, kShape.heads, kShape.kv_heads, kShape.head_dim, kShape.scale};
    request.config = config_;
    request.config.pattern = SelectionPattern::topk;
    if (whole_) request.config.query_block = std::min(case_.block, kDenseQueryBlock);
    request.copies = !whole_;
    request.scored = !whole_;
    request.multiprocessors = 4;
    request.batch_masses = 1 << 20;
    request.keys = case_.keys;
    for (int s = 0; s < layout_.sequences(); ++s) {
      // More than everything: rows with room for any selection.
      request.tiles.push_back(sequence_tiles(request.config, layout_.length(s), (layout_.blocks(s) + 8) * case_.block));
      request.left_out.push_back(dense_[s] != whole_);
    }
    plan_ = make_ring_lists(request);
    query_block_ = request.config.query_block;
    left_out_ = request.left_out;
  }

  int expand() const { return case_.block / block_; }
  int head_columns() const { return static_cast<int>(plan_.select.columns / kShape.kv_heads); }

  // The rows as the selection would write them, of all key blocks.
  void write_rows() {
    selected_.resize(plan_.rows.size());
    counts_.resize(static_cast<size_t>(plan_.select.columns));
    int32_t row = 0, column_base = 0;
    for (int s = 0; s < layout_.sequences(); ++s) {
      for (const int32_t b : layout_.held(rank_, s))
        for (int64_t token = int64_t{b} * case_.block; token < int64_t{b} * case_.block + layout_.block_length(s, b);
             token += query_block_, ++row)
          for (int head = 0; head < kShape.kv_heads && !left_out_[s]; ++head)
            write_row(s, b, token, head, head * plan_.select.rows + row, column_base);
      column_base += static_cast<int32_t>((layout_.length(s) + block_ - 1) / block_);
    }
    offsets_ = {0};
    for (const int32_t source : plan_.column_sources)
      offsets_.push_back(offsets_.back() + (source < 0 ? 0 : counts_[source]));
  }

  void write_row(int s, int32_t own, int64_t token, int head, int64_t row, int32_t column_base) {
    std::vector<uint32_t>& to = selected_[row];
    const auto visible =
        static_cast<uint32_t>((std::min<int64_t>(token + query_block_, layout_.length(s)) + block_ - 1) / block_);
    EXPECT_EQ(plan_.rows[row].visible, visible);
    const auto add = [&](int64_t j, int first) {
      for (int64_t fine = j * expand(); fine < std::min<int64_t>((j + 1) * expand(), visible); ++fine) {
        to.push_back(list_entry(static_cast<uint32_t>(fine), static_cast<uint32_t>(first)));
        ++counts_[head * head_columns() + column_base + fine];
      }
    };
    if (whole_) {
      for (int64_t j = 0; j <= own; ++j) add(j, 0);
    } else {
      const BlockIndex::Row from =
          index_.row(BlockIndex::row_id(index_.sequences()[s], head, static_cast<int>(token / query_block_)));
      for (size_t i = 0; i < from.blocks.size(); ++i) add(from.blocks[i], from.first[i]);
    }
    EXPECT_LE(std::ssize(to), plan_.rows[row].capacity);
  }

  // Row lists of a pass, by the places that the plan gives its blocks.
  Lists cut_rows(int p) const {
    Lists rows;
    const RingPassPlan& pass = plan_.passes[p];
    for (const ForwardItem& item : pass.work.forward) {
      const auto sequence = static_cast<int>(
          std::upper_bound(pass.cu_seqlens.begin(), pass.cu_seqlens.end(), item.token) - pass.cu_seqlens.begin() - 1);
      EXPECT_EQ(item.token - pass.cu_seqlens[sequence], item.position);
      for (int i = 0; i < item.tokens; ++i) EXPECT_GE(pass.queries[item.token + i], 0);
      std::vector<uint32_t>& row = rows[{sequence, item.head, item.position / query_block_}];
      row.clear();
      for (const uint32_t entry : selected_[item.list_begin]) {
        const RingBlock& at = plan_.blocks[plan_.rows[item.list_begin].block + entry_id(entry)];
        if (at.pass == p) row.push_back(list_entry(at.place, entry_first(entry)));
      }
    }
    return rows;
  }

  // And its column lists.
  Lists cut_columns(int p) const {
    Lists columns;
    const RingPassPlan& pass = plan_.passes[p];
    const auto blocks_of = [&](int q) { return (pass.cu_seqlens[q + 1] - pass.cu_seqlens[q] + block_ - 1) / block_; };
    for (const RingGroup& group : plan_.groups)
      for (int i = 0; i < group.blocks; ++i) {
        const RingBlock& at = plan_.blocks[group.block + i];
        EXPECT_EQ(group.column, group.head * head_columns() + group.block);
        if (at.pass != p || at.column < 0) continue;
        const int column = at.column + group.head * plan_.head_columns[p];
        EXPECT_EQ(plan_.column_sources[column], group.head * head_columns() + group.block + i);
        // Its number among the blocks of the made-up sequences says which one it is.
        int number = at.column - pass.first_column, sequence = 0;
        while (number >= blocks_of(sequence)) number -= blocks_of(sequence++);
        EXPECT_EQ(number, at.place);
        std::vector<uint32_t>& to = columns[{sequence, group.head, number}];
        for (int r = 0; r < group.rows; ++r)
          for (const uint32_t entry : selected_[group.row + r])
            if (static_cast<int>(entry_id(entry)) == group.first + i)
              to.push_back(list_entry(at.query_block + r, entry_first(entry)));
        EXPECT_EQ(std::ssize(to), offsets_[column + 1] - offsets_[column]);
      }
    return columns;
  }

  // Items of the backward, of so many keys each, and the columns of their blocks.
  void check_items(int p) const {
    const RingPassPlan& pass = plan_.passes[p];
    int32_t column = 0, keys = 0;
    for (int32_t i = 0; i < pass.work.head_places; ++i) {
      const BackwardItem& item = pass.work.places[i];
      EXPECT_EQ(item.position % case_.keys, 0);
      EXPECT_LE(item.keys, case_.keys);
      EXPECT_EQ(item.column, column);
      column += (item.keys + block_ - 1) / block_;
      keys += item.keys;
    }
    EXPECT_EQ(column, plan_.head_columns[p]);
    EXPECT_EQ(keys, pass.tokens());
  }

  // The CPU's pass of the same sequences; those with sparse and with dense ones have different query blocks in all
  // cases.
  const RingPass* wanted_pass(int p) const {
    const std::span<const RingPass> all =
        p < case_.ranks ? expected_.passes(p) : std::span(expected_.copies(), expected_.copies() == nullptr ? 0 : 1);
    const RingPass* wanted = nullptr;
    for (const RingPass& one : all)
      if (one.index.shape().query_block == query_block_) wanted = &one;
    return wanted;
  }

  void compare(int p, const RingPass& wanted, const Lists& rows, const Lists& columns) const {
    const RingPassPlan& pass = plan_.passes[p];
    std::vector<int32_t> begin;
    for (const RingPass::Part& part : wanted.parts) begin.push_back(static_cast<int32_t>(part.begin));
    EXPECT_TRUE(std::equal(begin.begin(), begin.end(), pass.cu_seqlens.begin()));
    EXPECT_EQ(wanted.tokens(), pass.tokens());
    const auto found = [](const Lists& lists, int q, int head, int number) {
      const auto at = lists.find({q, head, number});
      return at == lists.end() ? std::vector<uint32_t>() : at->second;
    };
    for (int q = 0; q < std::ssize(wanted.parts); ++q)
      for (int head = 0; head < kShape.kv_heads; ++head) {
        const BlockIndex::Sequence& sequence = wanted.index.sequences()[q];
        for (int tile = 0; tile < sequence.query_blocks; ++tile)
          EXPECT_EQ(found(rows, q, head, tile), fine_row(wanted.index, sequence, head, tile))
              << "pass " << p << " sequence " << q << " head " << head << " tile " << tile;
        for (int j = 0; j < sequence.key_blocks; ++j) {
          std::vector<uint32_t> column;
          for (const uint32_t entry : wanted.index.column(BlockIndex::column_id(sequence, head, j)))
            column.push_back(list_entry(BlockIndex::query_block_of(entry), BlockIndex::first_of(entry)));
          EXPECT_EQ(found(columns, q, head, j * expand()), column)
              << "pass " << p << " sequence " << q << " head " << head << " key block " << j;
        }
      }
  }

  // A row of an index in blocks of the device's size, as far as its queries see.
  std::vector<uint32_t> fine_row(const BlockIndex& index, const BlockIndex::Sequence& sequence, int head,
                                 int tile) const {
    const BlockIndex::Row row = index.row(BlockIndex::row_id(sequence, head, tile));
    std::vector<uint32_t> fine;
    for (size_t i = 0; i < row.blocks.size(); ++i)
      for (int e = 0; e < expand(); ++e) {
        const auto id = static_cast<uint32_t>(row.blocks[i] * expand() + e);
        if (int64_t{id} * block_ < int64_t{tile + 1} * query_block_ && int64_t{id} * block_ < sequence.length)
          fine.push_back(list_entry(id, row.first[i]));
      }
    return fine;
  }

  // Every block's statistics arrive once, where they belong.
  void check_statistics() const {
    std::vector<int> arrived(static_cast<size_t>(plan_.select.statistics_rows));
    for (const int32_t place : plan_.statistics)
      if (place >= 0) ++arrived[place];
    EXPECT_EQ(std::count(arrived.begin(), arrived.end(), 1), std::ssize(arrived));
    for (size_t i = 0; i < plan_.select.blocks.size(); ++i)
      EXPECT_GE(plan_.statistics[rank_ * plan_.piece + static_cast<int64_t>(i)], 0);
  }

  const RingCase& case_;
  const ContextLayout& layout_;
  const int rank_;
  const bool whole_;  // the dense sequences
  const int block_;   // of the device's lists
  ThreadPool pool_{1};
  SelectionConfig config_;
  std::vector<bool> dense_, left_out_;
  BlockIndex index_;
  RingPlan expected_;
  RingListPlan plan_;
  int query_block_ = 0;
  std::vector<std::vector<uint32_t>> selected_;  // of every row of the plan
  std::vector<int32_t> counts_;                  // selected entries of every column
  std::vector<int32_t> offsets_;                 // of the columns that the plan makes
};

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
  for (const bool whole : {false, true})
    for (int rank = 0; rank < c.ranks; ++rank) {
      SCOPED_TRACE(fmt::format("rank {} of {}, {}", rank, c.ranks, whole ? "dense" : "sparse"));
      FollowedPlan(c, layout, rank, whole).check();
    }
}

}  // namespace
}  // namespace sb::gpu
