#pragma once

#include "core/config/config.h"
#include "run/config/run_config.h"

namespace sb {

// The section `parallel` of the option table, and what must hold between its options and the rest.
void add_parallel_options(OptionTable& table, ParallelOptions& parallel);
void check_parallel(const RunConfig& config, const OptionTable& table);

}  // namespace sb
