#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <sstream>
#include <thread>

#include "cli/commands.h"
#include "cli/exit_code.h"
#include "cli/run_arguments.h"
#include "comm/host_name.h"
#include "comm/world.h"
#include "core/log.h"
#include "device/cuda.h"
#include "parallel/grid.h"
#include "run/checkpoint/checkpoint.h"
#include "run/logs/event_log.h"
#include "run/stop_signal.h"
#include "train/training_run.h"

namespace sb {
namespace {

struct TrainArguments {
  RunArguments run;
  int ranks = 0;  // 0: as started
  int max_restarts = 0;
  std::string log_level;  // as given; empty: not given
};

// Tells the ranks whether the launcher of `--ranks` shows their output on a terminal: mpirun gives them terminals of
// their own, wherever the output then goes.
constexpr const char* kOnTerminal = "SB_ON_TERMINAL";

// A rank that was lost, by its code: what the user or the program did wrong would only happen again.
bool lost_a_rank(const Launched& launched) {
  return !launched.stopped && (launched.exit_code == 1 || launched.exit_code > 128);
}

// Starts the ranks until they have ended well, or as often as a lost rank is forgiven: each time after a longer pause,
// a short one again once there is a new checkpoint.
int launch_with_restarts(const TrainArguments& arguments, const RunConfig& config,
                         const std::vector<std::string>& command) {
  constexpr std::chrono::seconds kFirstPause(1), kLongestPause(300);
  const auto newest = [&] {
    const std::vector<int64_t> steps = checkpoint_steps(config.train.output_dir);
    return steps.empty() ? int64_t{0} : steps.back();
  };
  std::chrono::seconds pause = kFirstPause;
  for (int restart = 1;; ++restart) {
    const int64_t before = newest();
    const Launched launched = launch_local_ranks(arguments.ranks, command);
    if (!lost_a_rank(launched) || arguments.max_restarts == 0) return launched.exit_code;
    if (restart > arguments.max_restarts) {
      log::error(
          "a rank was lost (exit code {}) and --max-restarts {} are used up; the same command goes on from the newest "
          "checkpoint. With fewer GPUs any other layout does as well: `sparsebalance simulate --sweep --gpus N` lists "
          "what fits",
          launched.exit_code, arguments.max_restarts);
      return launched.exit_code;
    }
    const int64_t step = newest();
    if (step > before) pause = kFirstPause;
    log::warning("a rank was lost (exit code {}): starting again from {} in {} s, restart {} of {}", launched.exit_code,
                 step > 0 ? fmt::format("checkpoint-{}", step) : "the beginning", pause.count(), restart,
                 arguments.max_restarts);
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, kLongestPause);
  }
}

// This program again, as so many processes.
void launch(const TrainArguments& arguments, const RunConfig& config) {
  std::vector<std::string> command = {""};
  if (!arguments.log_level.empty()) command.insert(command.end(), {"--log-level", arguments.log_level});
  command.insert(command.end(), {"train", arguments.run.file.string()});
  for (const std::string& assignment : arguments.run.overrides) command.insert(command.end(), {"--set", assignment});
  isatty(STDOUT_FILENO) != 0 ? setenv(kOnTerminal, "1", 1) : unsetenv(kOnTerminal);
  const int code = launch_with_restarts(arguments, config, command);
  if (code != 0) throw CLI::RuntimeError(code);
}

// For messages: "rank 3 on host-b, GPU 1".
void place_ranks_on_gpus(Communicator& world, const MachineRanks& machine) {
  cuda::require_device();
  const std::string own = fmt::format("{}, GPU {}", host_name(), machine.index % cuda::device_count());
  std::string joined;
  for (const std::string& place : gather_texts(world, own, 0)) joined += place + "\n";
  std::istringstream lines(broadcast_text(world, std::move(joined), 0));
  std::vector<std::string> places;
  for (std::string line; std::getline(lines, line);) places.push_back(line);
  world.place_ranks(std::move(places));
  log::set_prefix(fmt::format("rank {} on {}", world.rank(), own));
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
  log::set_prefix(fmt::format("rank {} on {}", world.rank(), host_name()));
  try {
    const MachineRanks machine = ranks_on_this_machine(world);
    if (config.device == DeviceKind::cuda) place_ranks_on_gpus(world, machine);
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
  SB_USER_CHECK(arguments.max_restarts == 0 || arguments.ranks > 1,
                "--max-restarts: for ranks that --ranks starts on this machine; on several machines the job's script "
                "starts it again (examples/cluster.sbatch)");
  const int launched = launched_ranks();
  SB_USER_CHECK(arguments.ranks == 0 || launched == 1 || launched == arguments.ranks,
                "--ranks {}: a launcher has already started {} ranks; remove it", arguments.ranks, launched);
  check_grid(config.parallel.grid(), arguments.ranks > 0 ? arguments.ranks : launched);
  if (arguments.ranks > 1 && launched == 1) {
    run_model_config(config);  // what does not fit is said once, and not by every rank
    return launch(arguments, config);
  }

  // A run does not end because the program that its output is piped to has ended.
  std::signal(SIGPIPE, SIG_IGN);
  WorldOptions options;
  constexpr int64_t kUntilAStepIsPredicted = 600;
  options.timeout =
      std::chrono::seconds(config.parallel.timeout > 0 ? config.parallel.timeout : kUntilAStepIsPredicted);
  options.stopping = StopSignal::requested;
  options.start_timeout = std::chrono::seconds(config.parallel.start_timeout);
  options.lost = [&](const LostRank& lost) {
    append_event(config.train.output_dir,
                 {.event = "lost", .host = lost.place, .rank = lost.rank, .reason = lost.reason});
  };
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
  command
      ->add_option("--max-restarts", arguments->max_restarts,
                   "with --ranks: start again from the newest intact checkpoint after a lost rank, so often at most")
      ->check(CLI::Range(0, 1000000));
  command->callback([&app, arguments] {
    if (const CLI::Option* level = app.get_option("--log-level"); level->count() > 0)
      arguments->log_level = level->as<std::string>();
    run(*arguments);
  });
}

}  // namespace sb
