#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>

#include "cli/commands.h"
#include "core/errors.h"
#include "train/run_config.h"

namespace sb {
namespace {

struct Arguments {
  std::string file;
  std::vector<std::string> overrides;
  bool markdown = false;
};

void run(const Arguments& arguments) {
  if (arguments.markdown) {
    std::fputs(run_config_markdown().c_str(), stdout);
    return;
  }
  SB_USER_CHECK(!arguments.file.empty(), "config: name a run.yaml to check, or --markdown for the reference");
  std::fputs(print_run_config(load_run_config(arguments.file, arguments.overrides)).c_str(), stdout);
}

}  // namespace

void add_config_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("config", "check a run.yaml and print every option with its value");
  auto arguments = std::make_shared<Arguments>();
  command->add_option("run.yaml", arguments->file, "the run's configuration");
  command->add_option("--set", arguments->overrides, "overrides an option: --set train.max_steps=100; may be repeated")
      ->type_name("SECTION.OPTION=VALUE")
      ->allow_extra_args(false);
  command->add_flag("--markdown", arguments->markdown, "print the reference of all options (docs/configuration.md)");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace sb
