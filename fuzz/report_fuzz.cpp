#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/errors.h"
#include "data/text/jsonl.h"
#include "fuzz/scratch_folder.h"
#include "report/report.h"

namespace {

// Lines that are plans get their checksum, which no chance would find; all others stay as they are.
std::string plan_log(std::string_view text, const ScratchFolder& folder) {
  std::string log;
  std::string_view line;
  for (size_t offset = 0; sb::next_line(text, offset, line);) {
    try {
      sb::LoggedStep step;
      step.plan = sb::parse_plan(std::string(line), "fuzz");
      step.in_order = step.plan;
      const std::string file = folder.path("line.jsonl");
      std::filesystem::remove(file);
      sb::PlanLog(file).plan(step);
      std::ifstream in(file, std::ios::binary);
      log.append(std::istreambuf_iterator<char>(in), {});
    } catch (const sb::UserError&) {
      log += line;
      log += '\n';
    }
  }
  return log;
}

size_t count(const std::string& text, std::string_view what) {
  size_t found = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++found;
  return found;
}

}  // namespace

// A run's directory: metrics.jsonl, then a line "plan.jsonl", then that file. Whatever they hold, the report is a page
// with the one script that belongs there, and a log that was read is the same when it is written and read again.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const ScratchFolder folder;
  const std::string_view text(reinterpret_cast<const char*>(data), size), border = "\nplan.jsonl\n";
  const size_t split = text.find(border);
  folder.write("metrics.jsonl", text.substr(0, split));
  folder.write("run.yaml", text.substr(0, 64));
  folder.write("plan.jsonl",
               split == std::string_view::npos ? std::string() : plan_log(text.substr(split + border.size()), folder));
  const sb::ReportInput input = sb::read_run(folder.path(""), static_cast<int64_t>(size % 7));
  const std::string page = sb::write_report(input);
  // The curves' data stand in scripts too, of another type.
  SB_CHECK(page.ends_with("</html>\n") && count(page, "<script>") == 1 && count(page, "<html") == 1 &&
               count(page, "<script") == count(page, "</script>"),
           "page:\n{}", page);

  const sb::PlanRecord plans = sb::read_plan_log(folder.path("plan.jsonl"));
  std::filesystem::remove(folder.path("again.jsonl"));
  {
    sb::PlanLog again(folder.path("again.jsonl"));
    for (const auto& [number, step] : plans.steps) {
      again.plan(step);
      if (step.measured) again.measured(*step.measured);
    }
  }
  const sb::PlanRecord record = sb::read_plan_log(folder.path("again.jsonl"));
  SB_CHECK(record.damage.empty() && record.steps.size() == plans.steps.size(), "{}", record.damage);
  return 0;
}
