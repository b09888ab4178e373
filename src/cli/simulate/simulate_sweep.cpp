#include "cli/simulate/simulate_sweep.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdio>
#include <limits>
#include <span>

#include "cli/at_least.h"
#include "cli/step_progress.h"
#include "core/errors.h"

namespace sb {
namespace {

constexpr std::array<int64_t, 3> kSizes = {1, 2, 4};  // of micro-batches, in multiples of what is given

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
  for (const SweepRow& row : std::span(rows).subspan(1)) {
    const std::string name = layout_name(row.layout);
    if (row.tokens_per_second >= 0.98 * best.tokens_per_second && name != layout_name(best.layout) &&
        std::ranges::find(as_fast, name) == as_fast.end())
      as_fast.push_back(name);
  }
  fmt::print("fastest layout that fits: dp x pp x tp x cp = {}{}\n", layout_name(best.layout),
             as_fast.empty() ? "" : fmt::format("; within 2% of it: {}", fmt::join(as_fast, ", ")));
  const BatchingOptions& batching = best.simulated.options.batching;
  const bool tokens = batching.micro_batch_tokens > 0;
  fmt::print(
      "to compare all policies on it, pass --dp {} --pp {} --tp {} --cp {} --micro-batch-{} {} instead of --sweep and "
      "--gpus\n",
      best.layout.dp, best.layout.pp, best.layout.tp, best.layout.cp, tokens ? "tokens" : "sequences",
      tokens ? batching.micro_batch_tokens : batching.micro_batch_sequences);
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

namespace {

// What a policy needs beside the layout, for people and for the command line.
std::string micro_batch_text(const BatchingOptions& batching) {
  if (batching.micro_batch_tokens > 0) return fmt::format("{} tokens", batching.micro_batch_tokens);
  return fmt::format("{} seq", batching.micro_batch_sequences);
}

SimulatedPolicy with_micro_batches(SimulatedPolicy policy, int64_t times) {
  policy.options.batching.micro_batch_sequences *= times;
  policy.options.batching.micro_batch_tokens *= times;
  return policy;
}

std::string place(const SweepRow& row) {
  return fmt::format("{} with micro-batches of {}", layout_name(row.layout),
                     micro_batch_text(row.simulated.options.batching));
}

// Best against best, and as the papers compare: on one layout, that of the first policy.
void print_headline(const std::vector<SweepRow>& rows, const std::vector<SimulatedPolicy>& policies) {
  const auto best = [&](const std::string& policy) {
    const SweepRow* found = nullptr;
    for (const SweepRow& row : rows)
      if (row.simulated.name == policy && fits(row) &&
          (found == nullptr || row.tokens_per_second > found->tokens_per_second))
        found = &row;
    return found;
  };
  const SweepRow* first = best(policies.front().name);
  if (first == nullptr) return;
  fmt::print("\nbest against best (dp x pp x tp x cp)\n{}: {:.1f} ms on {}\n", policies.front().name,
             first->simulated.makespan_ms, place(*first));
  for (const SimulatedPolicy& policy : std::span(policies).subspan(1)) {
    const SweepRow* own = best(policy.name);
    if (own == nullptr) {
      fmt::print("{}: no layout fits\n", policy.name);
      continue;
    }
    std::string same;
    for (const SweepRow& row : rows)
      if (row.simulated.name == policy.name && place(row) == place(*first))
        same = fmt::format("; on the layout of {}: {:.3f}", policies.front().name,
                           row.tokens_per_second / first->tokens_per_second);
    fmt::print("{}: {:.1f} ms on {}, {:.3f} times as fast{}\n", policy.name, own->simulated.makespan_ms, place(*own),
               own->tokens_per_second / first->tokens_per_second, same);
  }
  fmt::print("\n");
}

// Every policy on every layout with three sizes of micro-batches. A size that does not fit for any policy ends a
// layout: larger ones do not either.
std::vector<SweepRow> compare(const std::vector<Layout>& layouts, const LatencyModel& latency,
                              const SimulateInput& input, const std::vector<SimulatedPolicy>& policies,
                              StepProgress& progress) {
  fmt::print("{:<18} {:>14}", "dp x pp x tp x cp", "micro-batch");
  for (const SimulatedPolicy& policy : policies) fmt::print(" {:>24}", policy.name);
  fmt::print("   (step ms; *: does not fit)\n");
  std::vector<SweepRow> rows;
  for (const Layout& layout : layouts)
    for (const int64_t times : kSizes) {
      bool any = false;
      std::string line;
      for (const SimulatedPolicy& policy : policies) {
        rows.push_back(simulate_layout(latency, input, with_micro_batches(policy, times), layout));
        any |= fits(rows.back());
        line += fmt::format(" {:>24}",
                            fmt::format("{:.1f}{}", rows.back().simulated.makespan_ms, fits(rows.back()) ? "" : "*"));
      }
      progress.clear();
      fmt::print("{:<18} {:>14}{}\n", layout_name(layout), micro_batch_text(rows.back().simulated.options.batching),
                 line);
      std::fflush(stdout);
      if (!any) break;
    }
  return rows;
}

}  // namespace

std::vector<SweepRow> run_sweep(const SweepArguments& arguments, const LatencyModel& latency, const SimulateInput& like,
                                const std::vector<SimulatedPolicy>& policies) {
  const Profile& profile = latency.profile();
  const Layout& given = like.cost.layout();
  const int workers = arguments.gpus > 0 ? arguments.gpus : given.workers();
  const auto layouts = possible_layouts(given, workers, profile.shape, like.global_batch, arguments.most);
  SB_USER_CHECK(!layouts.empty(), "no layout of {} workers fits {} layers and a global batch of {}", workers,
                profile.shape.layers, like.global_batch);
  const bool known = profile.memory_bytes > 0, one = policies.size() == 1;
  fmt::print("layouts of {} workers{}{}\n", workers,
             known ? fmt::format(" with {:.0f} GiB each", gib(profile.memory_bytes)) : "",
             one ? fmt::format(", policy {}; speed-up over in_order on the same layout", policies[0].name) : "");
  if (workers > like.global_batch)
    fmt::print("dp is limited to the global batch of {}; a larger --global-batch allows more layouts\n",
               like.global_batch);
  StepProgress progress(std::ssize(layouts) * like.steps * std::ssize(policies) * (one ? 1 : std::ssize(kSizes)));
  SimulateInput input = like;
  input.step_done = [&] { progress.step(); };
  std::vector<SweepRow> rows;
  if (one) {
    fmt::print("{:<18} {:>9} {:>9} {:>8} {:>12} {:>10} {:>6}\n", "dp x pp x tp x cp", "step ms", "speed-up", "bubbles",
               "tokens/s", "GiB/worker", "fits");
    for (const Layout& layout : layouts) {
      rows.push_back(simulate_layout(latency, input, policies[0], layout));
      progress.clear();
      print_row(rows.back());
    }
  } else {
    rows = compare(layouts, latency, input, policies, progress);
    print_headline(rows, policies);
  }
  std::vector<SweepRow> last;
  for (const SweepRow& row : rows)
    if (row.simulated.name == policies.back().name) last.push_back(row);
  print_fastest(last, profile.memory_bytes);
  print_tensor_parallel(last);
  return rows;
}

}  // namespace sb
