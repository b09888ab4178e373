#pragma once

#include <string>

#include "core/config/config.h"
#include "run/config/run_config.h"

namespace sb {

// Whether `balance` asks for more than the sequences in their order.
bool wants_balancing(const BalanceOptions& balance);

// The section `balance` of the option table, and what must hold between its options and the rest.
void add_balance_options(OptionTable& table, BalanceOptions& balance);
void check_balance(const RunConfig& config, const OptionTable& table);

}  // namespace sb
