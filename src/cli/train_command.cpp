#include <unistd.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <thread>

#include "cli/commands.h"
#include "cli/exit_code.h"
#include "cli/run_arguments.h"
#include "comm/world.h"
#include "core/log.h"
#include "parallel/grid.h"
#include "run/stop_signal.h"
#include "train/training_run.h"

namespace sb {
namespace {

struct TrainArguments {
  RunArguments run;
  int ranks = 0;          // 0: as started
  std::string log_level;  // as given; empty: not given
};

// Tells the ranks whether the launcher of `--ranks` shows their output on a terminal: mpirun gives them terminals of
// their own, wherever the output then goes.
constexpr const char* kOnTerminal = "SB_ON_TERMINAL";

// This program again, as so many processes.
void launch(const TrainArguments& arguments) {
  std::vector<std::string> command = {""};
  if (!arguments.log_level.empty()) command.insert(command.end(), {"--log-level", arguments.log_level});
  command.insert(command.end(), {"train", arguments.run.file.string()});
  for (const std::string& assignment : arguments.run.overrides) command.insert(command.end(), {"--set", assignment});
  isatty(STDOUT_FILENO) != 0 ? setenv(kOnTerminal, "1", 1) : unsetenv(kOnTerminal);
  const int code = launch_local_ranks(arguments.ranks, std::move(command));
  if (code != 0) throw CLI::RuntimeError(code);
}

void train(const RunConfig& config, Communicator& world) {
  constexpr const char* kAlone =
      "\n"
      "stopping after this micro-batch, then saving the last finished step; interrupt again to stop now\n";
  constexpr const char* kTogether = "\nstopping after this step, then saving it; interrupt again to stop now\n";
  const StopSignal stop(world.size() == 1 ? kAlone : world.rank() == 0 ? kTogether : "");
  if (world.size() == 1) {
    run_training(config, stdout, isatty(STDOUT_FILENO) != 0, StopSignal::requested);
    return;
  }
  log::set_prefix(fmt::format("rank {}", world.rank()));
  try {
    const MachineRanks machine = ranks_on_this_machine(world);
    run_training(config, stdout, std::getenv(kOnTerminal) != nullptr, StopSignal::requested,
                 {&world, machine.count, machine.index, machine.cores});
  } catch (const std::exception& error) {
    // What is wrong on all ranks is said by rank 0, whose abort ends the others.
    if (world.rank() != 0) std::this_thread::sleep_for(std::chrono::milliseconds(500));
    world.abort(error.what(), exit_code(error));
  }
}

void run(const TrainArguments& arguments) {
  const RunConfig config = arguments.run.load();
  if (arguments.run.print_config) {
    std::fputs(print_run_config(config).c_str(), stdout);
    return;
  }
  const int launched = launched_ranks();
  SB_USER_CHECK(arguments.ranks == 0 || launched == 1 || launched == arguments.ranks,
                "--ranks {}: a launcher has already started {} ranks; remove it", arguments.ranks, launched);
  check_grid(config.parallel.grid(), arguments.ranks > 0 ? arguments.ranks : launched);
  if (arguments.ranks > 1 && launched == 1) {
    run_model_config(config);  // what does not fit is said once, and not by every rank
    return launch(arguments);
  }

  // A run does not end because the program that its output is piped to has ended.
  std::signal(SIGPIPE, SIG_IGN);
  WorldOptions options;
  options.timeout = std::chrono::seconds(config.parallel.timeout);
  options.start_timeout = std::chrono::seconds(config.parallel.start_timeout);
  const std::unique_ptr<Communicator> world = open_world_communicator(options);
  train(config, *world);
}

}  // namespace

void add_train_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("train", "train a model as described by run.yaml; run it again to resume");
  auto arguments = std::make_shared<TrainArguments>();
  add_run_arguments(*command, arguments->run);
  command
      ->add_option("--ranks", arguments->ranks, "start this many processes on this machine: parallel.dp × pp × cp × tp")
      ->check(CLI::Range(1, 4096));
  command->callback([&app, arguments] {
    if (const CLI::Option* level = app.get_option("--log-level"); level->count() > 0)
      arguments->log_level = level->as<std::string>();
    run(*arguments);
  });
}

}  // namespace sb
