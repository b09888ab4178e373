#include "cli/simulate/simulate_sweep.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <limits>
#include <span>

#include "cli/at_least.h"
#include "cli/step_progress.h"
#include "core/errors.h"

namespace sb {
namespace {

double gib(int64_t bytes) {
  return static_cast<double>(bytes) / (1 << 30);
}

std::string layout_name(const Layout& layout) {
  return fmt::format("{} x {} x {} x {}", layout.dp, layout.pp, layout.tp, layout.cp);
}

void print_row(const SweepRow& row) {
  fmt::print("{:<18} {:>9.1f} {:>8.3f}x {:>7.1f}% {:>12.0f} {:>10.1f} {:>6}\n", layout_name(row.layout),
             row.simulated.makespan_ms, row.simulated.speedup, 100 * row.simulated.bubble_share, row.tokens_per_second,
             gib(row.memory_bytes),
             !row.fits   ? "n/a"
             : *row.fits ? "yes"
                         : "no");
  std::fflush(stdout);
}

bool fits(const SweepRow& row) {
  return row.fits.value_or(true);
}

// Of the rows without tensor parallelism (or with it), the fastest that fits; nothing: none fits.
const SweepRow* fastest(const std::vector<SweepRow>& rows, bool tensor_parallel) {
  const SweepRow* best = nullptr;
  for (const SweepRow& row : rows)
    if ((row.layout.tp > 1) == tensor_parallel && fits(row) &&
        (best == nullptr || row.tokens_per_second > best->tokens_per_second))
      best = &row;
  return best;
}

// What tensor parallelism does for this model on so many workers, where it was tried at all.
void print_tensor_parallel(const std::vector<SweepRow>& rows) {
  const auto tried = [](const SweepRow& row) { return row.layout.tp > 1; };
  if (std::ranges::none_of(rows, tried) || std::ranges::all_of(rows, tried)) return;
  const SweepRow *with = fastest(rows, true), *without = fastest(rows, false);
  if (with == nullptr) {
    fmt::print("tensor parallelism: no layout that uses it fits\n");
    return;
  }
  const auto text = [](const SweepRow& row) {
    return fmt::format("{} ({:.1f} ms, {:.0f}% bubbles, {:.1f} GiB)", layout_name(row.layout),
                       row.simulated.makespan_ms, 100 * row.simulated.bubble_share, gib(row.memory_bytes));
  };
  if (without == nullptr) {
    int64_t least = std::numeric_limits<int64_t>::max();
    for (const SweepRow& row : rows)
      if (!tried(row)) least = std::min(least, row.memory_bytes);
    fmt::print(
        "tensor parallelism is needed: no layout fits without it (the smallest takes {:.1f} GiB); fastest with it: "
        "{}\n",
        gib(least), text(*with));
    return;
  }
  const double ratio = without->simulated.makespan_ms / with->simulated.makespan_ms;
  fmt::print("tensor parallelism: fastest with it {}, without it {}: {:.3f} times as fast{}\n", text(*with),
             text(*without), ratio,
             ratio < 1 ? ", since its collectives cost more than it saves"
             : with->simulated.bubble_share < without->simulated.bubble_share
                 ? ", since more ranks share each micro-batch and fewer are idle"
                 : "");
  const double faster = with->simulated.makespan_ms;
  for (const SweepRow& row : rows)
    if (!tried(row) && !fits(row) && row.simulated.makespan_ms < faster) {
      fmt::print("without tensor parallelism {} would be faster, but does not fit\n", text(row));
      break;
    }
}

void print_fastest(std::vector<SweepRow> rows, int64_t memory_bytes) {
  std::erase_if(rows, [](const SweepRow& row) { return !fits(row); });
  if (rows.empty()) {
    fmt::print("no layout fits in {:.0f} GiB; use more workers or smaller micro-batches\n", gib(memory_bytes));
    return;
  }
  std::ranges::stable_sort(rows, std::greater(), &SweepRow::tokens_per_second);
  const SweepRow& best = rows.front();
  std::vector<std::string> as_fast;
  for (const SweepRow& row : std::span(rows).subspan(1))
    if (row.tokens_per_second >= 0.98 * best.tokens_per_second) as_fast.push_back(layout_name(row.layout));
  fmt::print("fastest layout that fits: dp x pp x tp x cp = {}{}\n", layout_name(best.layout),
             as_fast.empty() ? "" : fmt::format("; within 2% of it: {}", fmt::join(as_fast, ", ")));
  fmt::print("to compare all policies on it, pass --dp {} --pp {} --tp {} --cp {} instead of --sweep and --gpus\n",
             best.layout.dp, best.layout.pp, best.layout.tp, best.layout.cp);
}

}  // namespace

void add_sweep_options(CLI::App& command, SweepArguments& arguments) {
  command.add_flag("--sweep", arguments.wanted,
                   "try all layouts of dp·pp·tp·cp workers and name the fastest that fits");
  command.add_option("--gpus", arguments.gpus, "--sweep: number of workers (default dp·pp·tp·cp)")
      ->check(at_least(1), "at least 1");
  command.add_option("--max-cp", arguments.most.cp, "--sweep: largest cp to try")
      ->check(at_least(1), "at least 1")
      ->capture_default_str();
  command.add_option("--max-tp", arguments.most.tp, "--sweep: largest tp to try")
      ->check(at_least(1), "at least 1")
      ->capture_default_str();
}

std::vector<SweepRow> run_sweep(const SweepArguments& arguments, const LatencyModel& latency, const SimulateInput& like,
                                const SimulatedPolicy& policy) {
  const Profile& profile = latency.profile();
  const Layout& given = like.cost.layout();
  const int workers = arguments.gpus > 0 ? arguments.gpus : given.workers();
  const auto layouts = possible_layouts(given, workers, profile.shape, like.global_batch, arguments.most);
  SB_USER_CHECK(!layouts.empty(), "no layout of {} workers fits {} layers and a global batch of {}", workers,
                profile.shape.layers, like.global_batch);
  const bool known = profile.memory_bytes > 0;
  fmt::print("layouts of {} workers{}, policy {}; speed-up over in_order on the same layout\n", workers,
             known ? fmt::format(" with {:.0f} GiB each", gib(profile.memory_bytes)) : "", policy.name);
  if (workers > like.global_batch)
    fmt::print("dp is limited to the global batch of {}; a larger --global-batch allows more layouts\n",
               like.global_batch);
  fmt::print("{:<18} {:>9} {:>9} {:>8} {:>12} {:>10} {:>6}\n", "dp x pp x tp x cp", "step ms", "speed-up", "bubbles",
             "tokens/s", "GiB/worker", "fits");
  std::vector<SweepRow> rows;
  StepProgress progress(std::ssize(layouts) * like.steps);
  SimulateInput input = like;
  input.step_done = [&] { progress.step(); };
  for (const Layout& layout : layouts) {
    rows.push_back(simulate_layout(latency, input, policy, layout));
    progress.clear();
    print_row(rows.back());
  }
  print_fastest(rows, profile.memory_bytes);
  print_tensor_parallel(rows);
  return rows;
}

}  // namespace sb
