#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "parallel/ring/ring_simulation.h"

namespace CLI {
class App;
}

namespace sb {

// `simulate --cp`: how a ring of context-parallel ranks shares one sequence.
struct RingArguments {
  bool only = false;  // without the balancing policies
  std::vector<std::string> placements;
  int node_size = 0;
  int64_t tokens = 512 * 1024;
  std::string index;
  double slash_density = 0.046;
  int verticals = 500;
  std::vector<double> times;
};

void add_ring_options(CLI::App& command, RingArguments& arguments);

// Every step of every rank is followed, which so many ranks allow.
constexpr int kMostRingRanks = 4096;
void check_ring(int ranks);

// Prints the table and returns its rows. `heads` and `block` are those of a drawn pattern.
std::vector<RingRow> run_ring(const RingArguments& arguments, int ranks, int heads, int block, uint64_t seed);

}  // namespace sb
