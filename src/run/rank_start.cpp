#include "run/rank_start.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <vector>

#include "core/errors.h"
#include "core/log.h"
#include "run/rank_table.h"

namespace sb {
namespace {

// What an earlier start of the run on the same layout settled; 0: there was none.
int threads_before(const RunConfig& config) {
  try {
    const std::filesystem::path file = config.train.output_dir / "run.yaml";
    if (!std::filesystem::exists(file)) return 0;
    const RunConfig before = load_run_config(file);
    const GridShape was = before.parallel.grid(), is = config.parallel.grid();
    const bool same = was.dp == is.dp && was.pp == is.pp && was.cp == is.cp && was.tp == is.tp;
    return same ? before.train.threads : 0;
  } catch (const UserError&) {  // is said where the directory is opened
    return 0;
  }
}

}  // namespace

void settle_threads(RunConfig& config, Communicator* world, int cores) {
  if (config.train.threads > 0) return;
  const bool leads = world == nullptr || world->rank() == 0;
  int32_t threads = cores, before = leads ? threads_before(config) : 0;
  if (world) {
    threads = world->all_reduce(threads, ReduceOp::min);
    world->broadcast(std::span(&before, 1), 0);
  }
  if (leads && before > 0 && before != threads)
    log::info("train.threads: {} as in the start before, where 0 would be {} now; set it to change that", before,
              threads);
  config.train.threads = before > 0 ? before : threads;
}

std::string introduce_ranks(const RunConfig& config, Communicator* world, Console& console) {
  if (world == nullptr || world->size() == 1) return "";
  const std::vector<RankMachine> machines = gather_machines(*world, own_machine(config.device, config.train.threads));
  if (world->rank() != 0) return "";
  const std::string table = rank_table(machines);
  console.text("ranks\n" + table);
  if (const std::string text = rank_differences(machines); !text.empty())
    log::warning("{}: the slowest decides, and the bits are those of these ranks in this order alone", text);
  return table;
}

int64_t timeout_seconds(const RunConfig& config, double step_seconds, int64_t saved_bytes) {
  // A rank may write its part of a checkpoint while all wait, to a slow disk.
  constexpr double kLeast = 120, kSteps = 20, kBytesPerSecond = 50e6;
  const double validation = step_seconds * static_cast<double>(config.train.validation_sequences) /
                            static_cast<double>(config.batch.global_batch_size);
  const double saving = static_cast<double>(saved_bytes) / config.parallel.grid().ranks() / kBytesPerSecond;
  const double seconds = kLeast + kSteps * step_seconds + validation + saving;
  // All validation data: as many as there are, which may be many.
  return std::llround(config.train.validation_sequences == 0 ? std::max(seconds, 600.0) : seconds);
}

void settle_timeout(const RunConfig& config, Communicator& world, double step_seconds, int64_t saved_bytes) {
  if (config.parallel.timeout > 0 || world.size() == 1) return;
  const int64_t seconds = world.all_reduce(timeout_seconds(config, step_seconds, saved_bytes), ReduceOp::max);
  world.set_timeout(std::chrono::seconds(seconds));
  if (world.rank() == 0) log::debug("parallel.timeout: {} s, from {:.2g} s per step", seconds, step_seconds);
}

}  // namespace sb
