#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/errors.h"
#include "plan/latency/latency_model.h"

// Any text is either refused with a UserError or is a profile that prints and loads to the same again, and whose times
// are numbers.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  sb::Profile profile;
  try {
    profile = sb::parse_profile(std::string(reinterpret_cast<const char*>(data), size), "fuzz.json");
  } catch (const sb::UserError&) {
    return 0;
  }
  const std::string written = sb::write_profile(profile);
  SB_CHECK(sb::write_profile(sb::parse_profile(written, "written")) == written, "written:\n{}", written);
  const sb::LatencyModel latency(profile);
  for (int i = 0; i < sb::kOperations; ++i)
    SB_CHECK(!std::isnan(latency.predict(static_cast<sb::Operation>(i), {4096, 256, 1e6, 1e5})), "{}", written);
  return 0;
}
