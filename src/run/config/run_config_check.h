#pragma once

#include <string>

#include "core/config/config.h"
#include "run/config/run_config.h"

namespace sb {

// What no single option's range can say: which options need, exclude or bound each other. UserError begins with the
// place the option was given at; `file` stands where nothing was given.
void check_run_config(const RunConfig& config, const OptionTable& table, const std::string& file);

}  // namespace sb
