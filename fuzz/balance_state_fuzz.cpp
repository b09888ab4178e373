#include <cstddef>
#include <cstdint>
#include <string>

#include "core/errors.h"
#include "plan/planner/balance_state.h"

// Any text is either refused with a UserError or is a state that prints and loads to the same again, with curves that
// can be evaluated.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::vector<sb::BalanceState> states;
  try {
    states = sb::parse_balance_states(std::string(reinterpret_cast<const char*>(data), size), "fuzz.json");
  } catch (const sb::UserError&) {
    return 0;
  }
  const std::string written = sb::write_balance_states(states);
  SB_CHECK(sb::write_balance_states(sb::parse_balance_states(written, "written")) == written, "written: {}", written);
  for (const sb::BalanceState& state : states)
    for (const int64_t tokens : {1, 5000, 1'000'000}) {
      const double held = state.coverage.at({0, tokens}, 1, 1000);
      SB_CHECK(held >= 0 && held <= 1 + 2e-6, "{} of {} tokens: {}", held, tokens, written);
    }
  return 0;
}
