#include <cstddef>
#include <cstdint>
#include <string>

#include "core/errors.h"
#include "run/config/run_config.h"

// Any text is either refused with a UserError or gives a configuration whose printed form loads to the same again.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string yaml(reinterpret_cast<const char*>(data), size);
  std::string printed;
  try {
    printed = sb::print_run_config(sb::parse_run_config(yaml, "fuzz.yaml"));
  } catch (const sb::UserError&) {
    return 0;
  }
  SB_CHECK(sb::print_run_config(sb::parse_run_config(printed, "printed.yaml")) == printed, "printed:\n{}", printed);
  return 0;
}
