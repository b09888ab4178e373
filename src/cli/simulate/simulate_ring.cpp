#include "cli/simulate/simulate_ring.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>

#include "cli/at_least.h"
#include "core/errors.h"
#include "core/thread_pool.h"

namespace sb {
namespace {

constexpr ContextPlacement kPlacements[] = {ContextPlacement::zigzag, ContextPlacement::striped,
                                            ContextPlacement::shifted, ContextPlacement::triangular};

std::vector<ContextPlacement> chosen_placements(const std::vector<std::string>& names) {
  if (names.empty()) return {std::begin(kPlacements), std::end(kPlacements)};
  std::vector<ContextPlacement> chosen;
  for (const std::string& name : names) {
    const auto* found = std::find_if(std::begin(kPlacements), std::end(kPlacements),
                                     [&](ContextPlacement placement) { return name == placement_name(placement); });
    SB_USER_CHECK(found != std::end(kPlacements),
                  "--placement: unknown placement `{}`; choose from zigzag, striped, shifted, triangular", name);
    chosen.push_back(*found);
  }
  return chosen;
}

// Ranks of a machine: as said, else eight where that divides, else all.
int machine_node(int asked, int ranks) {
  if (asked == 0) return ranks % 8 == 0 ? 8 : ranks;
  SB_USER_CHECK(ranks % asked == 0,
                "--node-size: {} does not divide --cp {}; every machine must have the same number of ranks", asked,
                ranks);
  return asked;
}

}  // namespace

void add_ring_options(CLI::App& command, RingArguments& a) {
  command.add_flag("--ring", a.only, "--cp: simulate only how a ring of that many ranks shares one sequence");
  command
      .add_option("--placement", a.placements,
                  "--cp: simulate only these placements, of zigzag, striped, shifted, triangular")
      ->delimiter(',');
  command
      .add_option("--node-size", a.node_size, "--cp: ranks per machine; 0: eight if that divides --cp, otherwise all")
      ->capture_default_str()
      ->check(at_least(0), "at least 0");
  command.add_option("--ring-tokens", a.tokens, "--cp: length of the sequence whose pattern is drawn at random")
      ->capture_default_str()
      ->check(at_least(1), "at least 1");
  command
      .add_option("--slash-density", a.slash_density,
                  "--cp: fraction of the block pairs in the slashes of that pattern")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 1.0));
  command.add_option("--verticals", a.verticals, "--cp: single columns per head in that pattern")
      ->capture_default_str()
      ->check(at_least(0), "at least 0");
  command.add_option("--ring-index", a.index,
                     "--cp: block index saved by a run (attention.dump_index), instead of a random pattern");
  command
      .add_option("--ring-times", a.times,
                  "--cp: ms for the work of an average ring step, a transfer within a machine and a transfer between "
                  "machines (default 0.51,0.13,0.98, as published for 512K tokens on 4 x 8 A100)")
      ->delimiter(',')
      ->expected(3);
}

void check_ring(int ranks) {
  SB_USER_CHECK(ranks <= kMostRingRanks,
                "--cp {}: a ring is simulated step by step, for up to {} ranks; lower --cp (--dp has no such limit)",
                ranks, kMostRingRanks);
}

std::vector<RingRow> run_ring(const RingArguments& arguments, int ranks, int heads, int block, uint64_t seed) {
  RingComparison comparison;
  comparison.ranks = ranks;
  comparison.machine_node = machine_node(arguments.node_size, ranks);
  comparison.placements = chosen_placements(arguments.placements);
  if (!arguments.times.empty()) comparison.times = {arguments.times[0], arguments.times[1], arguments.times[2]};
  for (const double ms : {comparison.times.compute, comparison.times.inner_hop, comparison.times.outer_hop})
    SB_USER_CHECK(ms >= 0, "--ring-times: {} ms is negative", ms);

  BlockIndex index;
  if (arguments.index.empty()) {
    DrawnPattern pattern;
    pattern.tokens = arguments.tokens;
    pattern.block = block;
    pattern.heads = heads;
    pattern.slash_density = arguments.slash_density;
    pattern.verticals = arguments.verticals;
    pattern.seed = seed;
    index = draw_pattern(pattern);
  } else {
    ThreadPool pool(1);
    index.load(arguments.index, pool);
  }
  const double sparsity =
      100 - 100.0 * static_cast<double>(index.token_pairs()) / static_cast<double>(index.causal_token_pairs());
  fmt::print(
      "ring of {} ranks in machines of {}, {}: {} tokens, blocks of {}, {} lists, {:.1f}% sparse\n"
      "average ring step: {} ms of work; transfers: {} ms within a machine, {} ms between machines; imbalance: maximum "
      "/ mean; lock-step: time / ideal\n",
      ranks, comparison.machine_node, arguments.index.empty() ? "random pattern" : arguments.index,
      index.sequences().back().token_begin + index.sequences().back().length, index.shape().block,
      index.shape().list_heads, sparsity, comparison.times.compute, comparison.times.inner_hop,
      comparison.times.outer_hop);
  const std::vector<RingRow> rows = compare_placements(index, comparison);
  fmt::print("{}", ring_table(rows));
  return rows;
}

}  // namespace sb
