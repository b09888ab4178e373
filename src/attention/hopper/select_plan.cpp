#include <algorithm>
#include <numeric>

#include "attention/hopper/select.h"
#include "attention/selection/staircase.h"
#include "core/errors.h"

namespace sb::hopper {

SelectPlan make_select_plan(const Shape& shape, std::span<const int32_t> cu_seqlens, const std::vector<bool>& dense,
                            const std::vector<SequenceTiles>& tiles, int step) {
  const size_t sequences = cu_seqlens.size() - 1;
  SB_CHECK(dense.size() == sequences && tiles.size() == sequences, "{} flags, {} tilings for {} sequences",
           dense.size(), tiles.size(), sequences);
  SelectPlan plan;
  plan.query_block = sequences > 0 ? tiles[0].query_block : 0;
  // Rows of 64 that hold whole tokens and divide the query block.
  plan.subtile_tokens = std::max(1, kSubtileRows / (shape.query_heads / shape.kv_heads));
  if (shape.query_heads == shape.kv_heads) plan.subtile_tokens = kSubtileRows / 4;  // half of the rows hold the keys
  while (plan.query_block % plan.subtile_tokens != 0) --plan.subtile_tokens;

  for (size_t s = 0; s < sequences; ++s)
    plan.rows += static_cast<int32_t>((cu_seqlens[s + 1] - cu_seqlens[s] + plan.query_block - 1) / plan.query_block);
  plan.row_offsets.push_back(0);
  int64_t entries = 0;
  for (int32_t head = 0; head < shape.kv_heads; ++head) {
    for (size_t s = 0; s < sequences; ++s) {
      const SequenceTiles& t = tiles[s];
      const int32_t begin = cu_seqlens[s];
      SB_CHECK(t.tokens == cu_seqlens[s + 1] - begin && t.block == kBlock && t.query_block == plan.query_block,
               "tiling of sequence {} does not match", s);
      if (dense[s]) {
        plan.row_offsets.insert(plan.row_offsets.end(), t.tiles(), plan.row_offsets.back());
        plan.columns.insert(plan.columns.end(), t.blocks(), SelectColumn{});
        continue;
      }
      SB_USER_CHECK(t.blocks() <= kMaxCompeting, "a sequence of {} tokens is too long for selection on the device ({})",
                    t.tokens, int64_t{kMaxCompeting} * kBlock);
      const auto statistics = static_cast<int32_t>(plan.blocks.size());
      for (int64_t b = 0; b < t.blocks(); ++b)
        plan.blocks.push_back({static_cast<int32_t>(begin + b * kBlock),
                               static_cast<int32_t>(std::min<int64_t>(kBlock, t.tokens - b * kBlock)), head, 0});
      const int64_t stride = (t.blocks() + 15) / 16 * 16;
      for (int64_t tile = 0; tile < t.tiles(); ++tile) {
        SelectItem item;
        item.token = static_cast<int32_t>(begin + t.begin(tile));
        item.tokens = t.rows(tile);
        item.head = head;
        item.competing = static_cast<int32_t>(t.competing(tile));
        item.visible = static_cast<int32_t>(t.visible(tile));
        item.sinks = std::min(t.sink_blocks, item.competing);
        item.local = std::min(t.local_blocks, item.competing - item.sinks);
        item.statistics = statistics;
        item.list_begin = plan.row_offsets.back();
        item.map = plan.map_bytes + tile * stride;
        const StaircaseRule rule =
            staircase_rule(StaircaseRule::Kind::topk, t.free_quota(tile), step, plan.query_block);
        int64_t count = item.visible;
        if (t.candidates(tile) <= rule.total) {
          item.everything = 1;
        } else {
          item.first = static_cast<int32_t>(rule.first);
          item.total = static_cast<int32_t>(rule.total);
          count = t.forced_competing(tile) + (item.visible - item.competing) + rule.allowed(item.tokens - 1);
        }
        plan.max_competing = std::max(plan.max_competing, item.everything ? 0 : item.competing);
        entries += count;
        SB_CHECK(entries < INT32_MAX, "too many list entries for 32-bit offsets");
        plan.row_offsets.push_back(static_cast<int32_t>(entries));
        plan.items.push_back(item);
      }
      for (int64_t b = 0; b < t.blocks(); ++b) {
        SelectColumn column;
        column.first_block = static_cast<int32_t>(b * kBlock / plan.query_block);
        column.blocks = static_cast<int32_t>(t.tiles() - column.first_block);
        column.stride = static_cast<int32_t>(stride);
        column.map = plan.map_bytes + column.first_block * stride + b;
        plan.columns.push_back(column);
      }
      plan.map_bytes += t.tiles() * stride;
    }
  }
  plan.entries = static_cast<int32_t>(entries);
  // Long ones first.
  std::stable_sort(plan.items.begin(), plan.items.end(),
                   [](const SelectItem& a, const SelectItem& b) { return a.competing > b.competing; });
  return plan;
}

}  // namespace sb::hopper
