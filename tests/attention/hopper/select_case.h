#pragma once

// Selection on the device for tests and benchmarks: plan, device memory, and the lists back on the host.

#include "attention/hopper/select.h"
#include "tests/attention/hopper/device_case.h"

namespace sb::hopper {

struct SelectCase {
  SelectPlan plan;
  DeviceArray<SelectItem> items;
  DeviceArray<SelectBlock> blocks;
  DeviceArray<SelectColumn> columns;
  DeviceArray<uint32_t> row_entries, column_entries;
  DeviceArray<int32_t> column_offsets;
  DeviceArray<__nv_bfloat16> statistics;
  DeviceArray<uint8_t> map;

  SelectCase(const Shape& shape, const std::vector<int32_t>& cu, const std::vector<bool>& dense,
             const std::vector<SequenceTiles>& tiles, int step)
      : plan(make_select_plan(shape, cu, dense, tiles, step)),
        items(plan.items),
        blocks(plan.blocks),
        columns(plan.columns),
        row_entries(plan.entries),
        column_entries(plan.entries),
        column_offsets(plan.columns.size() + 1),
        statistics(plan.blocks.size() * 2 * shape.head_dim),
        map(plan.map_bytes) {}

  SelectParams params(const Shape& shape, const void* q, const void* k) const {
    SelectParams p;
    p.shape = shape;
    p.q = q;
    p.k = k;
    p.query_block = plan.query_block;
    p.subtile_tokens = plan.subtile_tokens;
    p.max_competing = plan.max_competing;
    p.items = items.get();
    p.item_count = static_cast<int32_t>(items.size());
    p.blocks = blocks.get();
    p.block_count = static_cast<int32_t>(blocks.size());
    p.columns = columns.get();
    p.column_count = static_cast<int32_t>(columns.size());
    p.row_entries = row_entries.get();
    p.column_offsets = column_offsets.get();
    p.column_entries = column_entries.get();
    p.statistics = statistics.get();
    p.map = map.get();
    return p;
  }

  void poison() {
    row_entries.poison();
    column_entries.poison();
    column_offsets.poison();
    statistics.poison();
  }

  RowLists lists(const Shape& shape) const {
    return {shape.kv_heads, plan.query_block, plan.rows, plan.row_offsets, row_entries.host()};
  }
};

}  // namespace sb::hopper
