#include <cstddef>
#include <cstdint>
#include <string>

#include "core/errors.h"
#include "plan/plan.h"
#include "plan/planner/plan_log.h"

// Any text is either refused with a UserError or is a plan that survives being written, sent and read.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  sb::Plan plan;
  try {
    plan = sb::parse_plan(text, "fuzz.json");
  } catch (const sb::UserError&) {
    return 0;
  }
  const std::string written = sb::write_plan(plan);
  SB_CHECK(sb::write_plan(sb::parse_plan(written, "written")) == written, "written: {}", written);
  SB_CHECK(sb::write_plan(sb::unpack_plan(sb::pack_plan(plan), plan.step)) == written, "sent: {}", written);
  return 0;
}
