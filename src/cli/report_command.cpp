#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <memory>

#include "cli/at_least.h"
#include "cli/commands.h"
#include "cli/output_file.h"
#include "core/errors.h"
#include "report/report.h"

namespace sb {

void add_report_command(CLI::App& app) {
  struct Arguments {
    std::string run, out;
    int64_t step = 0;
  };
  CLI::App* command = app.add_subcommand("report", "write an HTML report of a run: loss, speed, coverage, schedules");
  auto a = std::make_shared<Arguments>();
  command->add_option("run", a->run, "directory of the run (its train.output_dir)")
      ->required()
      ->check(CLI::ExistingDirectory);
  command->add_option("--out", a->out, "file to write (default: report.html in the run's directory)");
  command->add_option("--step", a->step, "step whose schedule is drawn (default: a typical step)")
      ->check(at_least(1), "at least 1");
  command->callback([a] {
    check_output(a->out);
    const ReportInput input = read_run(a->run, a->step);
    SB_USER_CHECK(a->step == 0 || input.plans.steps.contains(a->step), "--step: {} has no plan of step {}",
                  (std::filesystem::path(a->run) / "plan.jsonl").string(), a->step);
    const std::filesystem::path out =
        a->out.empty() ? std::filesystem::path(a->run) / "report.html" : std::filesystem::path(a->out);
    write_output(out.string(), write_report(input));
    fmt::print("wrote {}; open it in a browser\n", out.string());
  });
}

}  // namespace sb
