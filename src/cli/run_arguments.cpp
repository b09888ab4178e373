#include "cli/run_arguments.h"

#include <CLI/CLI.hpp>

namespace sb {

void add_run_file(CLI::App& command, RunArguments& arguments) {
  command.add_option("run.yaml", arguments.file, "configuration of the run");
  // One value a --set, so that the file may follow it.
  command
      .add_option("--set", arguments.overrides,
                  "override an option, for example --set train.max_steps=100; may be repeated")
      ->type_name("SECTION.OPTION=VALUE")
      ->allow_extra_args(false);
}

void add_run_arguments(CLI::App& command, RunArguments& arguments) {
  add_run_file(command, arguments);
  command.get_option("run.yaml")->required();
  command.add_flag("--print-config", arguments.print_config,
                   "print every option with its value, as YAML that can be loaded again, and exit");
}

}  // namespace sb
