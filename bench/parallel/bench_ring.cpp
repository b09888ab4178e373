// How evenly ring attention spreads vertical-slash patterns over ranks and ring steps, by placement: counted, not
// timed. 512K tokens, blocks of 128, 32 ranks, 16 heads, lists as DrawnPattern says; and slashes at multiples of the
// number of ranks, the worst case of plain stripes.
//
// Part 2: a ring over 4 nodes of 8 ranks with the published times of a step's work and of transfers within and between
// nodes: simulated, and by the clock on thread ranks whose work sleeps and whose links take the times (ten times as
// long, so that waking up costs little).
#include <fmt/format.h>

#include <thread>

#include "comm/thread_communicator.h"
#include "parallel/ring/ring_simulation.h"
#include "parallel/ring/ring_travel.h"

namespace {

using namespace sb;

constexpr int kRanks = 32;

// Prints all placements and returns the last one: triangular, sinks copied.
RingRow report(const char* title, const DrawnPattern& pattern) {
  const BlockIndex index = draw_pattern(pattern);
  fmt::print("{}: sparsity {:.1f} %\n", title,
             100 - 100.0 * static_cast<double>(index.token_pairs()) / static_cast<double>(index.causal_token_pairs()));
  RingComparison comparison;
  comparison.ranks = kRanks;
  comparison.placements = {ContextPlacement::zigzag, ContextPlacement::striped, ContextPlacement::shifted,
                           ContextPlacement::triangular};
  const std::vector<RingRow> rows = compare_placements(index, comparison);
  fmt::print("{}\n", ring_table(rows));
  return rows.back();
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
  const DrawnPattern drawn;
  DrawnPattern regular;
  regular.every = kRanks;
  fmt::print("{} tokens, blocks of {}, {} ranks, {} heads; imbalances are most over mean, lock-step is over ideal\n\n",
             drawn.tokens, drawn.block, kRanks, drawn.heads);
  const RingRow spread = report("vertical-slash", drawn);
  const RingRow worst = report("slashes at multiples of the ranks", regular);
  report_travel();
  fmt::print(
      "triangular, sink copied: worker {:.3f}, step {:.3f}, lock-step over ideal {:.3f}; regular slashes: step {:.3f}, "
      "lock-step over ideal {:.3f}\n",
      spread.worker, spread.step, spread.lock_step, worst.step, worst.lock_step);
}
