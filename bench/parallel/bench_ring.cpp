// How evenly ring attention spreads vertical-slash patterns over ranks and ring steps, by placement: counted, not
// timed.
//
// 512K tokens, blocks of 128, 32 ranks, 16 heads. Every head has lists of its own, drawn as follows (seed fixed):
//   - slashes: block distances 0 … 7, then distinct distances drawn log-uniformly from 1 to the number of blocks (a
//     heavy tail: as many between 8 and 80 as between 400 and 4000) until the head's slashes hold 4.6 % of the causal
//     block pairs;
//   - verticals: 500 token columns, drawn evenly, in the blocks that no slash covers as gathered columns;
//   - a sink: block 0.
// The second case has its slashes at multiples of the number of ranks instead: the worst case of plain stripes.
//
// Part 2: a ring over 4 nodes of 8 ranks with the published times of a step's work and of transfers within and between
// nodes: simulated, and by the clock on thread ranks whose work sleeps and whose links take the times (ten times as
// long, so that waking up costs little).
#include <fmt/format.h>

#include <cmath>
#include <set>
#include <thread>

#include "comm/thread_communicator.h"
#include "core/random.h"
#include "parallel/context_layout.h"
#include "parallel/ring_travel.h"

namespace {

using namespace sb;

constexpr int kTokens = 512 * 1024, kBlock = 128, kBlocks = kTokens / kBlock, kRanks = 32, kHeads = 16;
constexpr int kVerticals = 500;
constexpr double kSlashDensity = 0.046;

std::set<int> drawn_slashes(Random& random) {
  std::set<int> slashes = {0, 1, 2, 3, 4, 5, 6, 7};
  const double wanted = kSlashDensity * kBlocks * (kBlocks + 1) / 2;
  double held = 0;
  for (const int distance : slashes) held += kBlocks - distance;
  while (held < wanted) {
    const int distance = static_cast<int>(std::exp(random.uniform() * std::log(kBlocks)));
    if (slashes.insert(distance).second) held += kBlocks - distance;
  }
  return slashes;
}

std::set<int> regular_slashes() {
  std::set<int> slashes;
  for (int distance = 0; distance < kBlocks; distance += kRanks) slashes.insert(distance);
  return slashes;
}

BlockIndex make_index(bool regular) {
  ThreadPool pool(1);
  Random random(1);
  BlockIndex index;
  BlockIndexBuilder builder;
  const std::vector<int32_t> cu_seqlens = {0, kTokens};
  builder.begin(index, {kBlock, kBlock, kHeads}, cu_seqlens, {}, 1);
  std::vector<uint8_t> listed(kBlocks);
  std::vector<IndexEntry> entries;
  std::vector<int32_t> columns;
  for (int head = 0; head < kHeads; ++head) {
    const std::set<int> slashes = regular ? regular_slashes() : drawn_slashes(random);
    std::set<int> verticals;
    while (!regular && std::ssize(verticals) < kVerticals) verticals.insert(static_cast<int>(random.below(kTokens)));
    for (int i = 0; i < kBlocks; ++i) {
      std::fill(listed.begin(), listed.end(), 0);
      if (!regular) listed[0] = 1;
      for (const int distance : slashes)
        if (distance <= i) listed[i - distance] = 1;
      entries.clear();
      columns.clear();
      for (int j = 0; j <= i; ++j)
        if (listed[j]) entries.push_back({static_cast<uint16_t>(j), 0});
      for (const int column : verticals)
        if (column < i * kBlock && !listed[column / kBlock]) columns.push_back(column);
      builder.set_row(0, BlockIndex::row_id(index.sequences()[0], head, i), entries, columns);
    }
  }
  builder.finish(pool);
  return index;
}

void print_row(const char* placement, const char* sinks, const RingWork& work) {
  fmt::print("{:<10} {:<12} {:>8.3f} {:>8.3f} {:>12.3f}\n", placement, sinks, work.worker_imbalance(),
             work.step_imbalance(), work.lock_step_over_ideal());
}

// Prints all placements and returns the work of the last one.
RingWork report(const char* title, const BlockIndex& index) {
  const std::vector<int32_t> cu_seqlens = {0, kTokens};
  fmt::print("{}: sparsity {:.1f} %\n", title,
             100 - 100.0 * static_cast<double>(index.token_pairs()) / static_cast<double>(index.causal_token_pairs()));
  fmt::print("{:<10} {:<12} {:>8} {:>8} {:>12}\n", "placement", "sink", "worker", "step", "lock-step");
  RingWork work;
  for (const auto& [name, placement] :
       {std::pair("zigzag", ContextPlacement::zigzag), std::pair("striped", ContextPlacement::striped),
        std::pair("shifted", ContextPlacement::shifted), std::pair("triangular", ContextPlacement::triangular)}) {
    const ContextLayout layout(placement, kRanks, kBlock, cu_seqlens);
    print_row(name, "in the ring", count_ring_work(layout, index, 0));
    work = count_ring_work(layout, index, 1);
    print_row(name, "replicated", work);
  }
  fmt::print("\n");
  return work;
}

constexpr int kNodeSize = 8;
constexpr RingTimes kPublished{0.51, 0.13, 0.98};  // milliseconds

double measured_ring(int node_size, double slow_down) {
  const auto lasting = [&](double ms) { return std::chrono::nanoseconds(static_cast<int64_t>(ms * slow_down * 1e6)); };
  ThreadCommOptions options;
  constexpr int64_t kElements = 16;
  // A hop brings keys and values, a message each.
  options.transfer_time = [&](int from, int to, int64_t bytes) {
    const double share = static_cast<double>(bytes) / static_cast<double>(2 * kElements * sizeof(float));
    return lasting((from / kNodeSize == to / kNodeSize ? kPublished.inner_hop : kPublished.outer_hop) * share);
  };
  double seconds = 0;
  run_thread_ranks(
      kRanks,
      [&](Communicator& group) {
        RingTravel travel(group, node_size);
        const std::vector<int64_t> elements(kRanks, kElements);
        const std::vector<float> own(kElements);
        ThreadPool pool(1);
        Arena scratch("scratch", travel.forward_scratch_bytes(DType::f32, kElements));
        const Exec exec{DeviceKind::cpu, &pool, nullptr, &scratch};
        group.barrier();
        const auto begin = std::chrono::steady_clock::now();
        travel.forward(exec, DType::f32, {own.data(), own.data()}, elements,
                       [&](int, const RingData&) { std::this_thread::sleep_for(lasting(kPublished.compute)); });
        group.barrier();
        if (group.rank() == 0)
          seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      },
      options);
  return seconds * 1e3 / slow_down;
}

void report_travel() {
  fmt::print("{} ranks in nodes of {}: work {} ms, hop within a node {} ms, between nodes {} ms\n", kRanks, kNodeSize,
             kPublished.compute, kPublished.inner_hop, kPublished.outer_hop);
  fmt::print("{:<14} {:>14} {:>14}\n", "ring", "simulated ms", "measured ms");
  for (const auto& [name, node_size] : {std::pair("plain", kRanks), std::pair("hierarchical", kNodeSize)})
    fmt::print("{:<14} {:>14.2f} {:>14.2f}\n", name, simulate_ring(RingShape(kRanks, node_size), kNodeSize, kPublished),
               measured_ring(node_size, 10));
  fmt::print("\n");
}

}  // namespace

int main() {
  fmt::print("{} tokens, blocks of {}, {} ranks, {} heads; imbalances are most over mean, lock-step is over ideal\n\n",
             kTokens, kBlock, kRanks, kHeads);
  const RingWork drawn = report("vertical-slash", make_index(false));
  const RingWork regular = report("slashes at multiples of the ranks", make_index(true));
  report_travel();
  fmt::print(
      "triangular, sink replicated: worker {:.3f}, step {:.3f}, lock-step over ideal {:.3f}; regular slashes: "
      "step {:.3f}, lock-step over ideal {:.3f}\n",
      drawn.worker_imbalance(), drawn.step_imbalance(), drawn.lock_step_over_ideal(), regular.step_imbalance(),
      regular.lock_step_over_ideal());
}
