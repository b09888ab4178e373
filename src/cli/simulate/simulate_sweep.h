#pragma once

#include <cstdint>
#include <vector>

#include "plan/simulate/layout_sweep.h"
#include "plan/simulate/simulate.h"

namespace CLI {
class App;
}

namespace sb {

// `simulate --sweep`: policies on every layout of so many workers.
struct SweepArguments {
  bool wanted = false;
  int gpus = 0;  // 0: as many as the layout that is given has
  SweepLimits most;
};

void add_sweep_options(CLI::App& command, SweepArguments& arguments);

// Prints the table and what is fastest, and returns the rows. `like` is the case to run; of its layout, what is not
// dp, pp, tp and cp stays. Several policies are compared, each with its best layout and with micro-batches of the size
// given and of twice and four times as much; the first is what the others are compared to.
std::vector<SweepRow> run_sweep(const SweepArguments& arguments, const LatencyModel& latency, const SimulateInput& like,
                                const std::vector<SimulatedPolicy>& policies);

}  // namespace sb
