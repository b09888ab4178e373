#include "parallel/ring/ring_simulation.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "core/errors.h"
#include "core/random.h"

namespace sb {
namespace {

std::set<int> drawn_slashes(const DrawnPattern& pattern, int64_t blocks, Random& random) {
  std::set<int> slashes;
  const auto count = static_cast<double>(blocks);
  const double wanted = pattern.slash_density * count * (count + 1) / 2;
  double held = 0;
  const auto add = [&](int64_t distance) {
    if (distance < blocks && slashes.insert(static_cast<int>(distance)).second)
      held += static_cast<double>(blocks - distance);
  };
  for (int distance = 0; distance < 8; ++distance) add(distance);
  while (held < wanted) add(static_cast<int64_t>(std::exp(random.uniform() * std::log(count))));
  return slashes;
}

std::set<int> regular_slashes(int every, int64_t blocks) {
  std::set<int> slashes;
  for (int distance = 0; distance < blocks; distance += every) slashes.insert(distance);
  return slashes;
}

// `turn_begin`: when every rank is ready; `compute(rank, chunk)`: its work.
template <typename Compute>
double follow_tour(const RingShape& shape, int machine_node, const RingTimes& times, std::vector<double> turn_begin,
                   const Compute& compute) {
  const int ranks = shape.ranks;
  const auto hop = [&](int from, int to) {
    return from / machine_node == to / machine_node ? times.inner_hop : times.outer_hop;
  };
  for (int turn = 0; turn < shape.nodes(); ++turn) {
    // A transfer begins when both sides are there, and both are free of it when it is over.
    std::vector<double> begin = turn_begin, end(ranks);
    for (int step = 0; step < shape.node_size; ++step) {
      for (int r = 0; r < ranks; ++r) end[r] = begin[r] + compute(r, shape.chunk(r, turn, step));
      for (int r = 0; r < ranks && step + 1 < shape.node_size; ++r) {
        const int next = shape.inner(r, 1);
        const double over = std::max(begin[r], begin[next]) + hop(r, next);
        end[r] = std::max(end[r], over);
        end[next] = std::max(end[next], over);
      }
      begin = end;
    }
    for (int r = 0; r < ranks && turn + 1 < shape.nodes(); ++r) {
      const int next = shape.outer(r, 1);
      const double over = std::max(turn_begin[r], turn_begin[next]) + hop(r, next);
      end[r] = std::max(end[r], over);
      end[next] = std::max(end[next], over);
    }
    turn_begin = end;
  }
  return *std::max_element(turn_begin.begin(), turn_begin.end());
}

}  // namespace

BlockIndex draw_pattern(const DrawnPattern& pattern) {
  SB_USER_CHECK(pattern.block == 64 || pattern.block == 128 || pattern.block == 256,
                "a ring's pattern cannot be drawn in blocks of {}; there are 64, 128 and 256", pattern.block);
  const int64_t blocks = (pattern.tokens + pattern.block - 1) / pattern.block;
  SB_USER_CHECK(blocks > 0 && blocks <= 65536, "{} tokens in blocks of {}: 1 to 65,536 blocks", pattern.tokens,
                pattern.block);
  SB_USER_CHECK(pattern.slash_density >= 0 && pattern.slash_density <= 1 && pattern.verticals >= 0 &&
                    pattern.verticals <= pattern.tokens,
                "slashes that hold {} of the pairs and {} of {} columns cannot be drawn", pattern.slash_density,
                pattern.verticals, pattern.tokens);
  ThreadPool pool(1);
  Random random(pattern.seed);
  BlockIndex index;
  BlockIndexBuilder builder;
  const std::vector<int32_t> cu_seqlens = {0, static_cast<int32_t>(pattern.tokens)};
  builder.begin(index, {pattern.block, std::min(pattern.block, 128), pattern.heads}, cu_seqlens, {}, 1);
  const int tiles_a_block = pattern.block / index.shape().query_block;
  std::vector<uint8_t> listed(static_cast<size_t>(blocks));
  std::vector<IndexEntry> entries;
  std::vector<int32_t> columns;
  for (int head = 0; head < pattern.heads; ++head) {
    const std::set<int> slashes =
        pattern.every > 0 ? regular_slashes(pattern.every, blocks) : drawn_slashes(pattern, blocks, random);
    std::set<int32_t> verticals;
    while (pattern.every == 0 && std::ssize(verticals) < pattern.verticals)
      verticals.insert(static_cast<int32_t>(random.below(pattern.tokens)));
    for (int64_t i = 0; i < blocks; ++i) {
      std::fill(listed.begin(), listed.end(), 0);
      if (pattern.every == 0) listed[0] = 1;
      for (const int distance : slashes)
        if (distance <= i) listed[i - distance] = 1;
      entries.clear();
      columns.clear();
      for (int64_t j = 0; j <= i; ++j)
        if (listed[j]) entries.push_back({static_cast<uint16_t>(j), 0});
      for (const int32_t column : verticals)
        if (column < i * pattern.block && !listed[column / pattern.block]) columns.push_back(column);
      for (int64_t tile = i * tiles_a_block;
           tile < std::min((i + 1) * tiles_a_block, int64_t{index.sequences()[0].query_blocks}); ++tile)
        builder.set_row(0, BlockIndex::row_id(index.sequences()[0], head, static_cast<int>(tile)), entries, columns);
    }
  }
  builder.finish(pool);
  return index;
}

double simulate_ring(const RingShape& shape, int machine_node, const RingTimes& times) {
  return follow_tour(shape, machine_node, times, std::vector<double>(shape.ranks, 0.0),
                     [&](int, int) { return times.compute; });
}

double simulate_ring(const RingShape& shape, int machine_node, const RingTimes& times, const RingWork& work) {
  SB_CHECK(work.ranks == shape.ranks, "work of {} ranks for a ring of {}", work.ranks, shape.ranks);
  const double mean = static_cast<double>(work.total()) / (static_cast<double>(shape.ranks) * shape.ranks);
  const double each = mean == 0 ? 0 : times.compute / mean;
  std::vector<double> begin;
  for (const int64_t pairs : work.outside) begin.push_back(static_cast<double>(pairs) * each);
  return follow_tour(shape, machine_node, times, std::move(begin), [&](int rank, int chunk) {
    return static_cast<double>(work.at(rank, (rank - chunk + shape.ranks) % shape.ranks)) * each;
  });
}

std::vector<RingRow> compare_placements(const BlockIndex& index, const RingComparison& comparison) {
  const RingShape plain(comparison.ranks, comparison.ranks), nodes(comparison.ranks, comparison.machine_node);
  const RingTimes free{comparison.times.compute, 0, 0};
  std::vector<int32_t> cu_seqlens = {0};
  for (const BlockIndex::Sequence& sequence : index.sequences())
    cu_seqlens.push_back(cu_seqlens.back() + sequence.length);
  std::vector<RingRow> rows;
  for (const ContextPlacement placement : comparison.placements) {
    const ContextLayout layout(placement, comparison.ranks, index.shape().block, cu_seqlens);
    for (const bool copied : {false, true}) {
      const RingWork work = count_ring_work(layout, index, copied ? 1 : 0);
      RingRow row;
      row.placement = placement;
      row.copied = copied;
      row.worker = work.worker_imbalance();
      row.step = work.step_imbalance();
      row.lock_step = work.lock_step_over_ideal();
      row.ideal = comparison.times.compute * comparison.ranks;
      row.computing = simulate_ring(plain, comparison.machine_node, free, work);
      row.plain = simulate_ring(plain, comparison.machine_node, comparison.times, work);
      row.hierarchical = simulate_ring(nodes, comparison.machine_node, comparison.times, work);
      rows.push_back(row);
    }
  }
  return rows;
}

const char* placement_name(ContextPlacement placement) {
  switch (placement) {
    case ContextPlacement::zigzag:
      return "zigzag";
    case ContextPlacement::striped:
      return "striped";
    case ContextPlacement::shifted:
      return "shifted";
    case ContextPlacement::triangular:
      return "triangular";
  }
  throw InternalError("no placement {}", static_cast<int>(placement));
}

std::string ring_table(std::span<const RingRow> rows) {
  std::string text =
      fmt::format("{:<11} {:<12} {:>8} {:>8} {:>10} {:>10} {:>10} {:>10} {:>13} {:>10}\n", "placement", "sink",
                  "worker", "step", "lock-step", "work ms", "plain ms", "exposed", "nodes ms", "exposed");
  for (const RingRow& row : rows)
    text += fmt::format("{:<11} {:<12} {:>8.3f} {:>8.3f} {:>10.3f} {:>10.2f} {:>10.2f} {:>10.2f} {:>13.2f} {:>10.2f}\n",
                        placement_name(row.placement), row.copied ? "copied" : "in the ring", row.worker, row.step,
                        row.lock_step, row.computing, row.plain, row.plain_exposed(), row.hierarchical,
                        row.hierarchical_exposed());
  return text;
}

}  // namespace sb
