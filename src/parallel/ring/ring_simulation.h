#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "attention/index/block_index.h"
#include "parallel/ring/context_layout.h"
#include "parallel/ring/ring_travel.h"

namespace sb {

// Vertical-slash lists of one sequence as trained models have them, drawn. Every head has its own:
//   - slashes: block distances 0 … 7, then distinct distances drawn log-uniformly from 1 to the number of blocks (a
//   heavy
//     tail: as many between 8 and 80 as between 400 and 4000) until the head's slashes hold `slash_density` of the
//     causal block pairs;
//   - verticals: token columns, drawn evenly, in the blocks that no slash covers as gathered columns;
//   - a sink: block 0.
struct DrawnPattern {
  int64_t tokens = 512 * 1024;
  int block = 128;
  int heads = 16;
  double slash_density = 0.046;
  int verticals = 500;
  int every = 0;  // > 0: slashes at all multiples of so many blocks instead, and nothing else
  uint64_t seed = 1;
};
BlockIndex draw_pattern(const DrawnPattern& pattern);

// What a tour takes when a rank's work on a chunk, a transfer within a node and one between nodes take the given times,
// by following every transfer and every step of RingTravel::forward(): the last rank's end.
struct RingTimes {
  double compute, inner_hop, outer_hop;
};
// Ranks are laid out in nodes of `machine_node`; the ring itself is made for nodes of `shape.node_size` (all ranks: a
// plain ring over all machines).
double simulate_ring(const RingShape& shape, int machine_node, const RingTimes& times);
// The same when the work of every rank on every chunk is what `work` counts: `times.compute` is then that of a step of
// mean work, and copies come first.
double simulate_ring(const RingShape& shape, int machine_node, const RingTimes& times, const RingWork& work);

// One way of spreading an index over ranks.
struct RingRow {
  ContextPlacement placement;
  bool copied = true;  // sinks and columns copied to all ranks; otherwise in the ring
  double worker = 1, step = 1, lock_step = 1;
  double ideal = 0;      // time of the same work spread evenly, nothing to wait for
  double computing = 0;  // transfers free: the work alone, ranks waiting for each other's data
  double plain = 0, hierarchical = 0;
  // What transfers add.
  double plain_exposed() const { return plain - computing; }
  double hierarchical_exposed() const { return hierarchical - computing; }
};

struct RingComparison {
  int ranks = 32;
  int machine_node = 8;  // ranks of a machine: transfers within take times.inner_hop
  RingTimes times{0.51, 0.13, 0.98};
  std::vector<ContextPlacement> placements;
};

// Every placement, with sinks and columns in the ring and copied. The index holds one or more whole sequences.
std::vector<RingRow> compare_placements(const BlockIndex& index, const RingComparison& comparison);

// As a table.
std::string ring_table(std::span<const RingRow> rows);
const char* placement_name(ContextPlacement placement);

}  // namespace sb
