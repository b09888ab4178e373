#pragma once

// Selection on the device for tests and benchmarks: plan, device memory, and the lists back on the host.

#include <algorithm>
#include <functional>

#include "attention/gpu/select/select.h"
#include "attention/select/planes.h"
#include "tests/attention/gpu/hopper/device_case.h"

namespace sb::gpu {

// Planes that differ from head to head, all over the channels.
inline LayerPlanes made_up_planes(const Shape& shape, int channels, float scale, float key_mean = 0.25f) {
  LayerPlanes planes{shape.kv_heads, channels, {}, {}, {}};
  const int half = shape.head_dim / 2;
  for (int head = 0; head < shape.kv_heads; ++head) {
    std::vector<int32_t> selected;
    for (int i = 0; i < channels / 2; ++i) selected.push_back((7 * i + 3 * head) % half);
    std::sort(selected.begin(), selected.end());
    planes.channel.insert(planes.channel.end(), selected.begin(), selected.end());
    for (const int32_t plane : selected) planes.channel.push_back(plane + half);
    planes.key_mean.resize(planes.channel.size(), key_mean);
    planes.scale.push_back(scale * (1 + 0.25f * static_cast<float>(head)));
  }
  return planes;
}

struct SelectCase {
  SelectionConfig config;
  bool hopper;
  int shared_memory = 0;  // as SelectParams has it
  SelectPlan plan;
  DeviceArray<ScoreItem> scores;
  DeviceArray<ScoreToken> score_rows;
  DeviceArray<SelectItem> items;
  DeviceArray<SelectBlock> blocks;
  DeviceArray<SelectGroup> groups;
  DeviceArray<SelectPool> pools;
  DeviceArray<uint32_t> row_entries, column_entries;
  DeviceArray<int32_t> column_offsets, column_counts;
  DeviceArray<uint8_t> statistics;
  DeviceArray<uint16_t> masses, sums;
  DeviceArray<int32_t> pool_counts;
  DeviceArray<uint8_t> map;
  DeviceArray<int32_t> plane_channels;
  DeviceArray<float> plane_scales, plane_key_means;
  DeviceArray<float> thresholds;
  DeviceArray<unsigned long long> selected;

  SelectCase(const Shape& shape, const std::vector<int32_t>& cu, const std::vector<bool>& dense,
             const std::vector<SequenceTiles>& tiles, const SelectionConfig& selection, bool on_hopper,
             int64_t batch_masses = int64_t{1} << 26, float threshold = 0, const LayerPlanes& planes = {})
      : config(selection),
        hopper(on_hopper),
        plan(make_select_plan(shape, cu, dense, tiles, selection,
                              on_hopper ? hopper_score_tile(shape, selection) : kPortableScoreTile, batch_masses)),
        scores(plan.scores),
        score_rows(plan.score_rows),
        items(plan.items),
        blocks(plan.blocks),
        groups(plan.groups),
        pools(plan.pools),
        row_entries(plan.entries),
        column_entries(plan.entries),
        column_offsets(plan.columns + 1),
        column_counts(plan.columns),
        statistics(on_hopper ? hopper_statistics_bytes(shape, plan) : portable_statistics_bytes(shape, plan)),
        masses(plan.slices * plan.masses),
        sums(plan.sums),
        pool_counts(pool_counts_size(plan.pools.size(), plan.pool_tiles)),
        map(plan.map_bytes),
        plane_channels(planes.channel),
        plane_scales(planes.scale),
        plane_key_means(planes.key_mean),
        thresholds(std::vector<float>(plan.sequences.size(), threshold)),
        selected(std::vector<unsigned long long>(2 * plan.sequences.size(), 0)) {}

  SelectParams params(const Shape& shape, const void* q, const void* k) const {
    SelectParams p;
    p.shape = shape;
    p.q = q;
    p.k = k;
    p.pattern = config.pattern;
    p.lookahead = config.order == SelectionOrder::lookahead;
    p.moments = config.score == BlockScore::moments;
    p.coverage = static_cast<float>(config.coverage);
    p.planes = plane_channels.get();
    p.plane_scales = plane_scales.get();
    p.plane_key_means = plane_key_means.get();
    p.plane_channels = config.score_channels;
    p.thresholds = thresholds.get();
    p.shared_memory = shared_memory;
    set_plan(plan, p);
    p.scores = scores.get();
    p.score_rows = score_rows.get();
    p.items = items.get();
    p.blocks = blocks.get();
    p.block_count = static_cast<int32_t>(blocks.size());
    p.groups = groups.get();
    p.group_count = static_cast<int32_t>(groups.size());
    p.row_entries = row_entries.get();
    p.column_offsets = column_offsets.get();
    p.column_entries = column_entries.get();
    if (config.pattern != SelectionPattern::topk) p.selected = selected.get();
    p.statistics = statistics.get();
    p.masses = masses.get();
    p.map = map.get();
    p.column_counts = column_counts.get();
    p.pools = pools.get();
    p.pool_count = static_cast<int32_t>(pools.size());
    p.sums = sums.get();
    p.pool_counts = pool_counts.get();
    return p;
  }

  void run(const Shape& shape, const void* q, const void* k) const {
    list_rows(shape, q, k, nullptr);
    list_columns(params(shape, q, k), nullptr);
  }
  void list_rows(const Shape& shape, const void* q, const void* k, void* stream) const {
    if (hopper)
      hopper_select(params(shape, q, k), stream);
    else
      portable_select(params(shape, q, k), Precision::bf16, stream);
  }

  void poison() {
    row_entries.poison();
    column_entries.poison();
    column_offsets.poison();
    statistics.poison();
    masses.poison();
    sums.poison();
    pool_counts.poison();
    map.poison();
    column_counts.poison();
    must(cudaMemset(selected.get(), 0, selected.size() * sizeof(unsigned long long)), "clear");
  }

  // Without what fills up the rows.
  RowLists lists(const Shape& shape) const {
    RowLists out{shape.kv_heads, plan.query_block, plan.rows, {0}, {}, plan.block};
    const auto all = row_entries.host();
    for (size_t row = 0; row + 1 < plan.row_offsets.size(); ++row) {
      for (int32_t i = plan.row_offsets[row]; i < plan.row_offsets[row + 1]; ++i)
        if (all[i] != kNoEntry) out.entries.push_back(all[i]);
      out.offsets.push_back(static_cast<int32_t>(out.entries.size()));
    }
    return out;
  }
};

}  // namespace sb::gpu
