#include "attention/hopper/work.h"

#include <algorithm>
#include <numeric>

#include "core/errors.h"

namespace sb::hopper {

namespace {

int64_t divide_up(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Orders items by head, then by falling cost: few heads at a time keep the caches warm, long items first keep the
// multiprocessors equally busy. Stable.
template <typename Item>
void sort_items(std::vector<Item>& items, const std::vector<int64_t>& cost) {
  std::vector<int32_t> order(items.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return items[a].head != items[b].head ? items[a].head < items[b].head : cost[a] > cost[b];
  });
  std::vector<Item> sorted;
  sorted.reserve(items.size());
  for (int32_t i : order) sorted.push_back(items[i]);
  items = std::move(sorted);
}

// Part of a column: entries of one list head, or tiles of a dense sequence.
struct Part {
  ColumnSegment segment;
  int64_t cost;  // in subtiles
};

}  // namespace

Tiling make_tiling(const Shape& shape, int list_heads, int query_block, std::span<const int32_t> cu_seqlens) {
  SB_USER_CHECK(list_heads == shape.kv_heads || list_heads == shape.query_heads,
                "attention lists are per key/value head ({}) or per query head ({}), not {}", shape.kv_heads,
                shape.query_heads, list_heads);
  Tiling tiling;
  tiling.heads = shape.query_heads / list_heads;
  SB_USER_CHECK(tiling.heads <= kSubtileRows, "a group of {} query heads does not fit the kernel's {} rows",
                tiling.heads, kSubtileRows);
  tiling.tokens = kSubtileRows / tiling.heads;
  tiling.query_block = query_block;
  if (query_block > 0) {
    SB_USER_CHECK(query_block >= 2 && query_block <= 128, "query_block must be 2..128, got {}", query_block);
    // The largest subtile of which a query block holds whole tiles.
    while (query_block % (2 * tiling.tokens) != 0) {
      --tiling.tokens;
      SB_USER_CHECK(tiling.tokens > 0, "query_block must be even, got {}", query_block);
    }
  }
  int64_t subtiles = 0;
  for (size_t s = 0; s + 1 < cu_seqlens.size(); ++s)
    subtiles += 2 * divide_up(cu_seqlens[s + 1] - cu_seqlens[s], 2 * tiling.tokens);
  SB_CHECK(subtiles * list_heads < INT32_MAX, "too many tiles for 32-bit indices");
  tiling.subtiles = static_cast<int32_t>(subtiles);
  return tiling;
}

ColumnLists transpose(const RowLists& lists, std::span<const int32_t> cu_seqlens) {
  ColumnLists out;
  for (size_t s = 0; s + 1 < cu_seqlens.size(); ++s)
    out.columns += static_cast<int32_t>(divide_up(cu_seqlens[s + 1] - cu_seqlens[s], kBlock));
  out.offsets.assign(static_cast<size_t>(lists.heads) * out.columns + 1, 0);
  // Counts, then places; rows ascend, so the columns come out sorted.
  for (int pass = 0; pass < 2; ++pass) {
    std::vector<int32_t> next;
    if (pass == 1) {
      for (size_t i = 1; i < out.offsets.size(); ++i) out.offsets[i] += out.offsets[i - 1];
      out.entries.resize(out.offsets.back());
      next.assign(out.offsets.begin(), out.offsets.end() - 1);
    }
    for (int32_t head = 0; head < lists.heads; ++head) {
      int32_t row = 0, column = 0;
      for (size_t s = 0; s + 1 < cu_seqlens.size(); ++s) {
        const int32_t length = cu_seqlens[s + 1] - cu_seqlens[s];
        const auto blocks = static_cast<int32_t>(divide_up(length, lists.query_block));
        for (int32_t b = 0; b < blocks; ++b, ++row) {
          const size_t at = static_cast<size_t>(head) * lists.rows + row;
          for (int32_t i = lists.offsets[at]; i < lists.offsets[at + 1]; ++i) {
            const uint32_t entry = lists.entries[i];
            const size_t to = static_cast<size_t>(head) * out.columns + column + entry_id(entry);
            if (pass == 0)
              ++out.offsets[to + 1];
            else
              out.entries[next[to]++] = list_entry(b, entry_first(entry));
          }
        }
        column += static_cast<int32_t>(divide_up(length, kBlock));
      }
    }
  }
  return out;
}

Work make_work(const Shape& shape, std::span<const int32_t> cu_seqlens, const std::vector<bool>& dense,
               const RowLists* lists, int workers) {
  const size_t sequences = cu_seqlens.size() - 1;
  SB_CHECK(dense.size() == sequences, "{} flags for {} sequences", dense.size(), sequences);
  const int32_t list_heads = lists ? lists->heads : shape.kv_heads;
  const int32_t heads_per_kv = list_heads / shape.kv_heads;
  Work work;
  work.tiling = make_tiling(shape, list_heads, lists ? lists->query_block : 0, cu_seqlens);
  const Tiling& tiling = work.tiling;
  const int32_t tile_tokens = 2 * tiling.tokens;
  if (lists) work.columns = transpose(*lists, cu_seqlens);

  work.cu_subtiles.push_back(0);
  std::vector<int64_t> forward_cost, backward_cost;
  int32_t row_base = 0;
  for (size_t s = 0; s < sequences; ++s) {
    const int32_t begin = cu_seqlens[s], length = cu_seqlens[s + 1] - begin;
    const auto tiles = static_cast<int32_t>(divide_up(length, tile_tokens));
    SB_CHECK(dense[s] || lists, "sequence {} is sparse but there are no lists", s);
    for (int32_t head = 0; head < list_heads; ++head)
      for (int32_t t = 0; t < tiles; ++t) {
        ForwardItem item;
        item.position = t * tile_tokens;
        item.token = begin + item.position;
        item.tokens = std::min(tile_tokens, length - item.position);
        item.head = head;
        item.subtile = head * tiling.subtiles + work.cu_subtiles.back() + 2 * t;
        if (dense[s]) {
          item.list_begin = -1;
          forward_cost.push_back(divide_up(item.position + item.tokens, kBlock));
        } else {
          const size_t row = static_cast<size_t>(head) * lists->rows + row_base + item.position / lists->query_block;
          item.list_begin = lists->offsets[row];
          item.list_count = lists->offsets[row + 1] - item.list_begin;
          item.query_token = item.position % lists->query_block;
          forward_cost.push_back(item.list_count);
        }
        work.forward.push_back(item);
      }
    if (lists) row_base += static_cast<int32_t>(divide_up(length, lists->query_block));
    work.cu_subtiles.push_back(work.cu_subtiles.back() + 2 * tiles);
  }
  sort_items(work.forward, forward_cost);

  // Columns: first their parts and the total, then the cut.
  struct Column {
    BackwardItem item;
    std::vector<Part> parts;
    int64_t cost = 0;
  };
  std::vector<Column> columns;
  int64_t total = 0;
  int32_t column_base = 0;
  for (size_t s = 0; s < sequences; ++s) {
    const int32_t begin = cu_seqlens[s], length = cu_seqlens[s + 1] - begin;
    const auto blocks = static_cast<int32_t>(divide_up(length, kBlock));
    for (int32_t kv = 0; kv < shape.kv_heads; ++kv)
      for (int32_t b = 0; b < blocks; ++b) {
        Column column;
        BackwardItem& item = column.item;
        item.position = b * kBlock;
        item.token = begin + item.position;
        item.keys = std::min(kBlock, length - item.position);
        item.head = kv;
        item.subtile = work.cu_subtiles[s];
        item.subtiles = work.cu_subtiles[s + 1] - work.cu_subtiles[s];
        item.dense = dense[s];
        for (int32_t h = kv * heads_per_kv; h < (kv + 1) * heads_per_kv; ++h) {
          Part part;
          if (dense[s]) {
            const int32_t first = item.position / tile_tokens;
            part.segment = {h, first, item.subtiles / 2 - first};
            part.cost = 2LL * part.segment.count;
          } else {
            const size_t at = static_cast<size_t>(h) * work.columns.columns + column_base + b;
            part.segment = {h, work.columns.offsets[at], work.columns.offsets[at + 1] - work.columns.offsets[at]};
            part.cost = static_cast<int64_t>(part.segment.count) * (lists->query_block / tiling.tokens);
          }
          column.cost += part.cost;
          column.parts.push_back(part);
        }
        total += column.cost;
        columns.push_back(std::move(column));
      }
    column_base += blocks;
  }
  // Whole columns sweep the queries together and share what the L2 holds, so only those that one worker could not
  // finish beside its share of the others are split.
  const int64_t limit = std::max<int64_t>(128, total / (2LL * std::max(workers, 1)));
  for (Column& column : columns) {
    const int64_t pieces = divide_up(std::max<int64_t>(column.cost, 1), limit);
    const int64_t share = divide_up(std::max<int64_t>(column.cost, 1), pieces);
    const size_t first_item = work.backward.size();
    auto open = [&] {
      column.item.segment_begin = static_cast<int32_t>(work.segments.size());
      column.item.segment_count = 0;
      work.backward.push_back(column.item);
      backward_cost.push_back(0);
    };
    open();
    for (const Part& part : column.parts) {
      const int64_t each = part.segment.count > 0 ? part.cost / part.segment.count : 1;
      ColumnSegment rest = part.segment;
      while (rest.count > 0) {
        if (backward_cost.back() >= share) open();
        const int64_t room = std::max<int64_t>(1, divide_up(share - backward_cost.back(), each));
        const auto take = static_cast<int32_t>(std::min<int64_t>(rest.count, room));
        work.segments.push_back({rest.head, rest.begin, take});
        ++work.backward.back().segment_count;
        backward_cost.back() += take * each;
        rest.begin += take;
        rest.count -= take;
      }
    }
    const auto count = static_cast<int32_t>(work.backward.size() - first_item);
    if (count > 1) {
      work.splits.push_back({column.item.token, column.item.keys, column.item.head, work.partial_slots, count});
      for (int32_t i = 0; i < count; ++i) work.backward[first_item + i].partial = work.partial_slots + i;
      work.partial_slots += count;
    }
  }
  sort_items(work.backward, backward_cost);
  return work;
}

}  // namespace sb::hopper
