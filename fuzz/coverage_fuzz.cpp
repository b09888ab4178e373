#include <cstddef>
#include <cstdint>
#include <string>

#include "core/errors.h"
#include "plan/coverage/coverage.h"
#include "plan/coverage/coverage_statistics.h"

// Any text is either refused with a UserError or holds curves that rise from 0 to 1 with the budget and print and load
// to the same again.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  sb::CoverageTable table;
  try {
    table = sb::parse_coverage(std::string(reinterpret_cast<const char*>(data), size), "fuzz.json");
  } catch (const sb::UserError&) {
    return 0;
  }
  const std::string written = sb::write_coverage(table);
  SB_CHECK(sb::write_coverage(sb::parse_coverage(written, "written")) == written, "written:\n{}", written);
  const int layers = table.layers;
  const auto coverage = sb::table_coverage(table, "fuzz");
  for (const int64_t tokens : {1, 700, 100'000})
    for (const int layer : {0, layers - 1}) {
      double before = 0;
      for (const int64_t budget : {1, 100, 600, 700, 5000, 100'000}) {
        const double now = coverage->at({0, tokens}, layer, budget);
        SB_CHECK(now >= before - 1e-9 && now <= 1 + 1e-9, "{} after {} at budget {} of {}:\n{}", now, before, budget,
                 tokens, written);
        before = now;
      }
      SB_CHECK(coverage->at({0, tokens}, layer, tokens) == 1.0, "all of {} tokens hold less than everything", tokens);
    }
  return 0;
}
