#include <unistd.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <memory>

#include "cli/commands.h"
#include "cli/run_arguments.h"
#include "train/stop_signal.h"
#include "train/training_run.h"

namespace sb {
namespace {

void run(const RunArguments& arguments) {
  const RunConfig config = load_run_config(arguments.file, arguments.overrides);
  if (arguments.print_config) {
    std::fputs(print_run_config(config).c_str(), stdout);
    return;
  }
  // A file-size limit is to be an error that names the file, like a full disk, and not the end of the process.
  std::signal(SIGXFSZ, SIG_IGN);
  const StopSignal stop;
  run_training(config, stdout, isatty(STDOUT_FILENO) != 0, StopSignal::requested);
}

}  // namespace

void add_train_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("train", "train a model as run.yaml says; run it again to resume");
  auto arguments = std::make_shared<RunArguments>();
  add_run_arguments(*command, *arguments);
  command->callback([arguments] { run(*arguments); });
}

}  // namespace sb
