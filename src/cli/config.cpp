#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>

#include "cli/commands.h"
#include "cli/run_arguments.h"
#include "core/errors.h"

namespace sb {
namespace {

void print(const RunArguments& arguments, bool markdown) {
  if (markdown) {
    std::fputs(run_config_markdown().c_str(), stdout);
    return;
  }
  SB_USER_CHECK(!arguments.file.empty(), "config: name a run.yaml to check, or pass --markdown for the reference");
  std::fputs(print_run_config(arguments.load()).c_str(), stdout);
}

}  // namespace

void add_config_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("config", "validate a run.yaml and print every option with its value");
  auto arguments = std::make_shared<RunArguments>();
  auto markdown = std::make_shared<bool>(false);
  add_run_file(*command, *arguments);
  command->add_flag("--markdown", *markdown, "print the reference of all options, docs/configuration.md");
  command->callback([=] { print(*arguments, *markdown); });
}

}  // namespace sb
