#include "attention/gpu/plan/work.h"

#include <algorithm>
#include <numeric>

#include "core/errors.h"

namespace sb::gpu {

namespace {

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

// The gathered lists of one sequence.
void add_gathered(Work& work, const RowLayout& lists, int32_t columns, int32_t token, int32_t tokens) {
  for (int32_t head = 0; head < lists.heads; ++head) {
    GatheredList list;
    list.columns = work.gathered_columns;
    list.bits = work.gathered_words;
    list.pieces = static_cast<int32_t>(2 * divide_up(columns, 2 * kGatheredPiece));
    list.slot = static_cast<int32_t>(work.gathered_pieces.size());
    list.token = token;
    list.tokens = tokens;
    list.head = head;
    list.subtile = work.cu_subtiles.back();
    list.rows = static_cast<int32_t>(divide_up(tokens, lists.query_block));
    list.place = work.gathered_places;
    work.gathered_places += static_cast<int32_t>(divide_up(tokens, kBlock));
    work.gathered_columns += int64_t{list.pieces} * kGatheredPiece;
    work.gathered_words += int64_t{list.pieces} * list.rows;
    work.gathered_pieces.insert(work.gathered_pieces.end(), list.pieces, static_cast<int32_t>(work.gathered.size()));
    work.gathered.push_back(list);
  }
}

}  // namespace

Tiling make_tiling(const Shape& shape, int list_heads, int query_block, std::span<const int32_t> cu_seqlens) {
  SB_USER_CHECK(list_heads == shape.kv_heads || list_heads == shape.query_heads,
                "attention lists are per key/value head ({}) or per query head ({}), not {}", shape.kv_heads,
                shape.query_heads, list_heads);
  Tiling tiling;
  const int group = shape.query_heads / list_heads;
  tiling.query_block = query_block;
  if (query_block > 0) {
    SB_USER_CHECK(query_block >= 1 && query_block <= 128, "query_block must be 1..128, got {}", query_block);
    if (query_block % 2 != 0) tiling.tile = 1;
  }
  // The largest part of a group that fits, or a smaller one (of four heads or more) that fills clearly more rows of a
  // subtile. A query block holds whole tiles.
  for (int parts = 1; parts <= group; ++parts) {
    const int heads = group / parts;
    if (group % parts != 0 || heads > kSubtileRows) continue;
    int tokens = kSubtileRows / heads;
    while (query_block > 0 && query_block % (tiling.tile * tokens) != 0) --tokens;
    if (tiling.heads > 0 && (heads < 4 || 8 * heads * tokens <= 9 * tiling.heads * tiling.tokens)) continue;
    tiling.heads = heads;
    tiling.tokens = tokens;
    tiling.parts = parts;
  }
  int64_t subtiles = 0;
  for (size_t s = 0; s + 1 < cu_seqlens.size(); ++s)
    subtiles += tiling.tile * divide_up(cu_seqlens[s + 1] - cu_seqlens[s], tiling.tile * tiling.tokens);
  SB_CHECK(subtiles * list_heads * tiling.parts < INT32_MAX, "too many tiles for 32-bit indices");
  tiling.subtiles = static_cast<int32_t>(subtiles);
  return tiling;
}

Work make_work(const Shape& shape, std::span<const int32_t> cu_seqlens, const std::vector<bool>& dense,
               const RowLayout* lists, int workers) {
  const size_t sequences = cu_seqlens.size() - 1;
  SB_CHECK(dense.size() == sequences, "{} flags for {} sequences", dense.size(), sequences);
  SB_CHECK(shape.first_query == 0 || sequences == 1, "a piece comes by itself, not with {} sequences", sequences);
  const int32_t list_heads = lists ? lists->heads : shape.kv_heads;
  Work work;
  work.workers = workers;
  work.tiling = make_tiling(shape, list_heads, lists ? lists->query_block : 0, cu_seqlens);
  if (lists) {
    work.tiling.block = lists->block;
    work.tiling.keys = lists->keys;
  }
  const Tiling& tiling = work.tiling;
  const int32_t tile_tokens = tiling.tile * tiling.tokens, block = tiling.block, keys = tiling.keys;
  const int32_t tile_heads = list_heads * tiling.parts;

  work.cu_subtiles.push_back(0);
  std::vector<int64_t> forward_cost;
  std::vector<int32_t> first_gathered;  // list of each sequence
  int64_t column_cost = 0;
  int32_t row_base = 0;
  for (size_t s = 0; s < sequences; ++s) {
    const int32_t begin = cu_seqlens[s], length = cu_seqlens[s + 1] - begin;
    const int32_t keys_end = shape.first_query + length;
    const auto tiles = static_cast<int32_t>(divide_up(length, tile_tokens));
    SB_CHECK(dense[s] || lists, "sequence {} is sparse but there are no lists", s);
    int32_t gathered = -1;
    if (!dense[s] && !lists->gathered.empty() && lists->gathered[s] > 0) {
      gathered = static_cast<int32_t>(work.gathered.size());
      add_gathered(work, *lists, lists->gathered[s], begin, length);
    }
    first_gathered.push_back(gathered);
    for (int32_t head = 0; head < tile_heads; ++head)
      for (int32_t t = 0; t < tiles; ++t) {
        ForwardItem item;
        const int32_t before = t * tile_tokens;  // tokens of the queries
        item.position = shape.first_query + before;
        item.token = begin + before;
        item.tokens = std::min(tile_tokens, length - before);
        item.head = head;
        item.subtile = head * tiling.subtiles + work.cu_subtiles.back() + tiling.tile * t;
        if (dense[s]) {
          item.list_begin = -1;
          forward_cost.push_back(divide_up(item.position + item.tokens, block));
        } else {
          const int32_t list_head = head / tiling.parts;
          const size_t row = static_cast<size_t>(list_head) * lists->rows + row_base + before / lists->query_block;
          if (gathered >= 0) item.gathered = gathered + list_head;
          item.list_begin = lists->offsets[row];
          item.list_count = lists->offsets[row + 1] - item.list_begin;
          item.query_token = before % lists->query_block;
          // As many of the columns as lie before the tile if they are spread evenly.
          const int64_t columns = gathered < 0 ? 0 : int64_t{lists->gathered[s]} * item.position / length;
          forward_cost.push_back(item.list_count + columns / block);
        }
        work.forward.push_back(item);
      }
    if (dense[s]) {
      for (int32_t key = 0; key < keys_end; key += keys)
        column_cost += int64_t{tiling.tile} * tile_heads * (tiles - std::max(key - shape.first_query, 0) / tile_tokens);
    } else {
      const auto rows = static_cast<int32_t>(divide_up(length, lists->query_block));
      for (int32_t head = 0; head < list_heads; ++head) {
        const size_t row = static_cast<size_t>(head) * lists->rows + row_base;
        column_cost += int64_t{lists->offsets[row + rows] - lists->offsets[row]} * tiling.parts *
                       (lists->query_block / tiling.tokens);
      }
    }
    if (lists) row_base += static_cast<int32_t>(divide_up(length, lists->query_block));
    work.cu_subtiles.push_back(work.cu_subtiles.back() + tiling.tile * tiles);
  }
  sort_items(work.forward, forward_cost);

  for (int32_t kv = 0; kv < shape.kv_heads; ++kv) {
    int32_t column = 0;
    for (size_t s = 0; s < sequences; ++s) {
      const int32_t begin = cu_seqlens[s], keys_end = shape.first_query + cu_seqlens[s + 1] - begin;
      for (int32_t position = 0; position < keys_end; position += keys) {
        BackwardItem place;
        place.token = begin + position;
        place.keys = std::min(keys, keys_end - position);
        place.position = position;
        place.head = kv;
        place.subtile = work.cu_subtiles[s];
        place.subtiles = work.cu_subtiles[s + 1] - work.cu_subtiles[s];
        place.column = column;
        column += static_cast<int32_t>(divide_up(place.keys, block));
        place.dense = dense[s];
        place.gathered = first_gathered[s];
        work.places.push_back(place);
      }
    }
    work.columns = column;
  }
  work.head_places = static_cast<int32_t>(work.places.size()) / shape.kv_heads;
  work.limits = work_limits(static_cast<int64_t>(work.places.size()), column_cost, workers);
  return work;
}

WorkLimits work_limits(int64_t columns, int64_t cost, int workers) {
  // A column of cost c becomes at most c / share + 1 parts, and only those with c > share are split. With less cost the
  // share is smaller, too, but never below the least.
  const int64_t shares = std::min(cost / kLeastShare, (columns <= 2 * workers ? 3 : 2) * int64_t{workers});
  SB_CHECK(columns + shares < INT32_MAX, "too many key blocks for 32-bit indices");
  return {static_cast<int32_t>(columns + shares), static_cast<int32_t>(shares), static_cast<int32_t>(2 * shares)};
}

size_t statistics_size(const Shape& shape, const Tiling& tiling) {
  const size_t subtiles = static_cast<size_t>(shape.query_heads / tiling.heads) * tiling.subtiles + 2;
  return subtiles * 2 * kSubtileRows;
}
size_t dq_sum_size(const Shape& shape, const Tiling& tiling) {
  const size_t subtiles = static_cast<size_t>(shape.query_heads / tiling.heads) * tiling.subtiles + 2;
  return subtiles * kSubtileRows * shape.head_dim;
}
size_t gathered_sums_size(const Shape& shape, int pieces, int parts) {
  return static_cast<size_t>(pieces) * parts * 2 * kGatheredPiece * shape.head_dim;
}
size_t partials_size(const Shape& shape, int slots) {
  return static_cast<size_t>(slots) * 2 * kBlock * shape.head_dim;
}

}  // namespace sb::gpu
