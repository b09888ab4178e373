#include <algorithm>

#include "core/errors.h"
#include "parallel/ring/gpu/ring_lists.h"

namespace sb::gpu {
namespace {

int32_t divide_up(int64_t a, int64_t b) {
  return static_cast<int32_t>((a + b - 1) / b);
}

class RingListPlanner {
 public:
  explicit RingListPlanner(const RingListRequest& request)
      : request_(request),
        layout_(*request.layout),
        passes_(layout_, request.rank, *request.replicated, request.replicated_blocks),
        local_(layout_.local_cu_seqlens(request.rank)) {}

  RingListPlan make() {
    HeldBlocks held;
    for (int s = 0; s < layout_.sequences(); ++s) {
      held.blocks.push_back(layout_.held(request_.rank, s));
      if (!request_.left_out[s]) passes_.add_sequence(s, request_.copies);
    }
    plan_.select = make_select_plan(request_.shape, local_, request_.left_out, request_.tiles, request_.config,
                                    request_.score, request_.batch_masses, &held);
    query_block_ = plan_.select.query_block;
    block_ = plan_.select.block;
    expand_ = plan_.select.select_block / block_;
    number_rows();
    for (int c = 0; c < passes_.passes(); ++c) add_pass(c);
    add_blocks();
    add_rows();
    add_groups();
    if (request_.scored) place_statistics();
    return std::move(plan_);
  }

 private:
  // First row of every sequence, for list head 0, and its key blocks among those of the selection.
  void number_rows() {
    int32_t row = 0, block = 0;
    for (int s = 0; s < layout_.sequences(); ++s) {
      first_row_.push_back(row);
      first_block_.push_back(block);
      row += divide_up(local_[s + 1] - local_[s], query_block_);
      block += divide_up(layout_.length(s), block_);
    }
    SB_CHECK(row == plan_.select.rows, "{} rows of {}", row, plan_.select.rows);
    blocks_ = block;
    SB_CHECK(int64_t{block} * plan_.select.list_heads == plan_.select.columns, "{} key blocks for {} columns", block,
             plan_.select.columns);
  }

  void add_pass(int c) {
    const RingPass& pass = passes_.pass(c);
    RingPassPlan& to = plan_.passes.emplace_back();
    to.first_column = static_cast<int32_t>(columns_);
    to.cu_seqlens = {0};
    if (!pass.parts.empty()) {
      fill_tokens(pass, to);
      plan_work(pass, to);
    }
    plan_.head_columns.push_back(to.work.columns);
    std::vector<int32_t>& first = part_columns_.emplace_back(1, to.first_column);
    for (const RingPass::Part& part : pass.parts)
      first.push_back(first.back() + divide_up(part.keys + part.queries, block_));
    columns_ += int64_t{to.work.columns} * plan_.select.list_heads;
    SB_USER_CHECK(columns_ < INT32_MAX, "the lists of this micro-batch have more than 2^31 columns; lower parallel.cp");
  }

  static void fill_tokens(const RingPass& pass, RingPassPlan& to) {
    to.keys.assign(static_cast<size_t>(pass.tokens()), -1);
    to.queries = to.keys;
    for (const RingPass::Part& part : pass.parts) {
      for (int64_t token = 0; token < part.keys; ++token) {
        const int64_t place = part.key_source + token;
        to.keys[part.begin + token] =
            pass.source == RingPass::Keys::copies ? pass.copies[place] : static_cast<int32_t>(place);
      }
      for (int64_t token = 0; token < part.queries; ++token) {
        const int64_t at = part.begin + part.keys + token;
        to.queries[at] = static_cast<int32_t>(part.query_source + token);
        if (pass.source == RingPass::Keys::own) to.keys[at] = to.queries[at];
      }
      to.cu_seqlens.push_back(static_cast<int32_t>(part.begin + part.keys + part.queries));
    }
  }

  void plan_work(const RingPass& pass, RingPassPlan& to) {
    const int32_t heads = plan_.select.list_heads;
    // Of every row of the made-up sequences (under one list head) the row of this rank; -1: keys of others.
    std::vector<int32_t> own;
    for (int s = 0; s < layout_.sequences(); ++s) {
      const int number = passes_.part_of(static_cast<int>(&to - plan_.passes.data()), s);
      if (number < 0) continue;
      const RingPass::Part& part = pass.parts[number];
      own.insert(own.end(), part.keys / query_block_, -1);
      for (int32_t i = 0; i < divide_up(part.queries, query_block_); ++i) own.push_back(first_row_[s] + i);
    }
    const auto rows = static_cast<int32_t>(own.size());
    // As if every row had one entry, its own number.
    std::vector<int32_t> offsets(size_t{1} + static_cast<size_t>(heads) * own.size());
    for (size_t i = 0; i < offsets.size(); ++i) offsets[i] = static_cast<int32_t>(i);
    Shape shape = request_.shape;
    shape.tokens = pass.tokens();
    const RowLayout lists{heads, query_block_, block_, request_.keys, rows, offsets};
    to.work =
        make_work(shape, to.cu_seqlens, std::vector<bool>(pass.parts.size(), false), &lists, request_.multiprocessors);
    std::vector<ForwardItem> items;
    for (ForwardItem item : to.work.forward) {
      const int32_t head = item.list_begin / rows, row = own[item.list_begin % rows];
      if (row < 0) continue;
      item.list_begin = head * plan_.select.rows + row;
      item.list_count = 0;
      items.push_back(item);
    }
    // Later queries have seen more: these first, head by head.
    std::stable_sort(items.begin(), items.end(), [](const ForwardItem& a, const ForwardItem& b) {
      return a.head != b.head ? a.head < b.head : a.position > b.position;
    });
    to.work.forward = std::move(items);
    const Tiling& tiling = to.work.tiling;
    const int64_t cost = int64_t{plan_.select.entries} * tiling.parts * (query_block_ / tiling.tokens);
    to.work.limits = work_limits(std::ssize(to.work.places), cost, request_.multiprocessors);
  }

  void add_blocks() {
    plan_.column_sources.assign(columns_, -1);
    for (int s = 0; s < layout_.sequences(); ++s)
      for (int64_t j = 0; j < divide_up(layout_.length(s), block_); ++j) {
        RingBlock& block = plan_.blocks.emplace_back();
        if (request_.left_out[s]) continue;
        const PassLayout::Place place = passes_.place_of_block(s, j / expand_);
        const int number = passes_.part_of(place.pass, s);
        block.pass = place.pass;
        block.place = static_cast<int32_t>(place.at * expand_ + j % expand_);
        if (number < 0) continue;  // no queries here
        const RingPass& pass = passes_.pass(place.pass);
        const RingPass::Part& part = pass.parts[number];
        const int64_t keys = pass.source == RingPass::Keys::own ? part.queries : part.keys;
        if (int64_t{block.place} * block_ >= keys) continue;  // another rank's short last block
        block.query_block = static_cast<int32_t>(part.keys / query_block_);
        block.column = part_columns_[place.pass][number] + block.place;
        for (int32_t head = 0; head < plan_.select.list_heads; ++head)
          plan_.column_sources[block.column + int64_t{head} * plan_.head_columns[place.pass]] =
              head * blocks_ + static_cast<int32_t>(plan_.blocks.size() - 1);
      }
  }

  void add_rows() {
    // Items of the selection are in the order of their work; lists of rows are not.
    std::vector<const SelectItem*> items;
    for (const SelectItem& item : plan_.select.items) items.push_back(&item);
    std::sort(items.begin(), items.end(),
              [](const SelectItem* a, const SelectItem* b) { return a->list_begin < b->list_begin; });
    plan_.rows.resize(static_cast<size_t>(plan_.select.list_heads) * plan_.select.rows);
    size_t next = 0;
    for (int32_t head = 0; head < plan_.select.list_heads; ++head)
      for (int s = 0; s < layout_.sequences(); ++s) {
        if (request_.left_out[s]) continue;
        for (int32_t i = 0; i < divide_up(local_[s + 1] - local_[s], query_block_); ++i) {
          const SelectItem& item = *items[next++];
          plan_.rows[int64_t{head} * plan_.select.rows + first_row_[s] + i] = {item.map, item.list_begin, item.capacity,
                                                                               first_block_[s], item.visible};
        }
      }
    SB_CHECK(next == items.size(), "{} of {} query blocks", next, items.size());
  }

  void add_groups() {
    for (int32_t head = 0; head < plan_.select.list_heads; ++head)
      for (int s = 0; s < layout_.sequences(); ++s) {
        const int32_t rows = divide_up(local_[s + 1] - local_[s], query_block_);
        const int32_t blocks = divide_up(layout_.length(s), block_);
        for (int32_t b = 0; b < blocks && !request_.left_out[s] && rows > 0; b += kGroupColumns)
          plan_.groups.push_back({head * plan_.select.rows + first_row_[s], rows, first_block_[s] + b, b,
                                  std::min(kGroupColumns, blocks - b), head, head * blocks_ + first_block_[s] + b});
      }
  }

  // A rank sends its blocks head by head, sequence by sequence; they are wanted in the same order, but whole.
  void place_statistics() {
    const int32_t kv_heads = request_.shape.kv_heads, parts = plan_.select.parts;
    std::vector<std::vector<int32_t>> places(layout_.ranks());
    for (int r = 0; r < layout_.ranks(); ++r) {
      int64_t first = 0, block = 0;
      for (int32_t head = 0; head < kv_heads; ++head)
        for (int s = 0; s < layout_.sequences(); ++s) {
          if (request_.left_out[s]) continue;
          for (const int32_t b : layout_.held(r, s)) {
            places[r].resize(static_cast<size_t>(statistics_rows(block + 1, parts)), -1);
            for (int part = 0; part < parts; ++part)
              places[r][statistics_row(block, parts) + part * kStatisticsGroup] =
                  static_cast<int32_t>(first + statistics_row(b, parts) + part * kStatisticsGroup);
            ++block;
          }
          first += statistics_rows(layout_.blocks(s), parts);
        }
      SB_CHECK(first == plan_.select.statistics_rows, "{} rows of statistics, {} wanted", first,
               plan_.select.statistics_rows);
      plan_.piece = std::max(plan_.piece, std::ssize(places[r]));
    }
    for (std::vector<int32_t>& of : places) {
      of.resize(static_cast<size_t>(plan_.piece), -1);
      plan_.statistics.insert(plan_.statistics.end(), of.begin(), of.end());
    }
  }

  const RingListRequest& request_;
  const ContextLayout& layout_;
  PassLayout passes_;
  const std::vector<int32_t> local_;
  RingListPlan plan_;
  int32_t query_block_ = 1, block_ = 1, expand_ = 1, blocks_ = 0;
  int64_t columns_ = 0;
  std::vector<int32_t> first_row_, first_block_;
  std::vector<std::vector<int32_t>> part_columns_;  // [pass][part]: its first column
};

}  // namespace

RingListPlan make_ring_lists(const RingListRequest& request) {
  return RingListPlanner(request).make();
}

}  // namespace sb::gpu
