#pragma once

#include <cstdint>
#include <string>

#include "comm/communicator.h"
#include "run/config/run_config.h"
#include "run/logs/console.h"

namespace sb {

// What the ranks of a run agree on before its first step. All are collective; `world` is nullptr for a process alone.

// train.threads: 0 is each rank's share of the cores, which another start may find to be another; the bits of a run
// depend on it. It is settled at the first start, alike on all ranks, and kept while the layout stays.
void settle_threads(RunConfig& config, Communicator* world, int cores);

// Says what the ranks compute with, and where they differ. Gives the table, on rank 0 of several.
std::string introduce_ranks(const RunConfig& config, Communicator* world, Console& console);

// parallel.timeout: 0 follows from the step's predicted time: long enough for the slowest thing that a rank does while
// another one waits, on a machine that is much slower than predicted. `saved_bytes`: of a checkpoint.
void settle_timeout(const RunConfig& config, Communicator& world, double step_seconds, int64_t saved_bytes);
int64_t timeout_seconds(const RunConfig& config, double step_seconds, int64_t saved_bytes);

}  // namespace sb
