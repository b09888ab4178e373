#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>

#include "core/errors.h"
#include "plan/simulate/layout_sweep.h"
#include "plan/simulate/length_pool.h"
#include "plan/simulate/simulate.h"
#include "python/bindings/bindings.h"
#include "python/bindings/planner.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace sb::python {
namespace {

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// What simulate() and sweep() have in common.
struct Case {
  PlannerOptions options;
  std::vector<int64_t> pool;
  int64_t global_batch, steps;
  uint64_t seed;
};

Case make_case(const PlannerOptions& options, std::vector<int64_t> lengths, int64_t global_batch, int64_t steps,
               uint64_t seed) {
  Case made{options, std::move(lengths), global_batch, steps, seed};
  SB_USER_CHECK(!made.pool.empty(), "there are no lengths to draw from");
  for (const int64_t length : made.pool) SB_USER_CHECK(length > 0, "a length is {}; they must be positive", length);
  SB_USER_CHECK(steps > 0 && global_batch > 0, "steps and global_batch must be positive");
  return made;
}

// What a simulation of the case runs with.
struct Simulation {
  explicit Simulation(const Case& described)
      : costs(LatencyModel(find_profile(described.options.profile, find_model_shape(described.options.model),
                                        described.options.spec)),
              described.options.spec, described.options.layout),
        coverage(find_coverage(described.options.coverage, costs.cost.layers())),
        threads(described.options.threads),
        input{costs.cost, *coverage, described.pool, described.global_batch, described.steps, described.seed, seconds,
              &threads,   {}} {}
  Costs costs;
  std::unique_ptr<CoverageModel> coverage;
  ThreadPool threads;
  SimulateInput input;
};

std::vector<SimulatedPolicy> all_policies(const Case& described) {
  const PlanOptions& plan = described.options.plan;
  return standard_policies(plan.batching, plan.tuning.p, plan.chunk.tokens);
}

SimulatedPolicy find_policy(const std::vector<SimulatedPolicy>& all, const std::string& name) {
  const auto found = std::ranges::find(all, name, &SimulatedPolicy::name);
  std::vector<std::string> known;
  for (const SimulatedPolicy& policy : all) known.push_back(policy.name);
  SB_USER_CHECK(found != all.end(), "policies: `{}` is not one of {}", name, fmt::join(known, ", "));
  return *found;
}

std::vector<SimulatedRow> simulate(const Case& described, const std::vector<std::string>& names) {
  SB_USER_CHECK(described.global_batch >= described.options.layout.dp,
                "global_batch {} is smaller than dp {}: a rank would have nothing to do", described.global_batch,
                described.options.layout.dp);
  const int tp = described.options.layout.tp;
  const std::string problem = sparse_tensor_parallel_problem(find_model_shape(described.options.model), tp);
  SB_USER_CHECK(problem.empty(), "tp {}: {}; lower tp", tp, problem);
  const std::vector<SimulatedPolicy> all = all_policies(described);
  std::vector<SimulatedPolicy> policies;
  for (const std::string& name : names) policies.push_back(find_policy(all, name));
  const Simulation simulation(described);
  std::vector<SimulatedRow> rows;
  for (const SimulatedPolicy& policy : names.empty() ? all : policies)
    rows.push_back(simulate_policy(simulation.input, policy));
  return rows;
}

std::vector<SweepRow> sweep(const Case& described, const std::string& policy, int gpus, int max_cp, int max_tp) {
  SB_USER_CHECK(gpus > 0 && max_cp > 0 && max_tp > 0, "gpus, max_cp and max_tp must be positive");
  const SimulatedPolicy chosen = find_policy(all_policies(described), policy);
  const Simulation simulation(described);
  const ModelShape& shape = simulation.costs.cost.shape();
  const auto layouts =
      possible_layouts(described.options.layout, gpus, shape, described.global_batch, {.tp = max_tp, .cp = max_cp});
  SB_USER_CHECK(!layouts.empty(), "no layout of {} workers fits {} layers and a global batch of {}", gpus, shape.layers,
                described.global_batch);
  std::vector<SweepRow> rows;
  for (const Layout& layout : layouts)
    rows.push_back(simulate_layout(simulation.costs.latency, simulation.input, chosen, layout));
  return rows;
}

void bind_rows(nb::module_& module) {
  nb::class_<SimulatedRow>(module, "SimulatedRow", "One policy over all steps.")
      .def_ro("policy", &SimulatedRow::name)
      .def_ro("makespan_ms", &SimulatedRow::makespan_ms, "Mean over the steps.")
      .def_ro("speedup", &SimulatedRow::speedup, "Over in_order at the base budgets.")
      .def_ro("worst_step_speedup", &SimulatedRow::worst_step_speedup)
      .def_ro("imbalance", &SimulatedRow::imbalance)
      .def_ro("worker_imbalance", &SimulatedRow::worker_imbalance)
      .def_ro("lower_bound_share", &SimulatedRow::lower_bound_share)
      .def_ro("bubble_share", &SimulatedRow::bubble_share)
      .def_ro("mean_coverage", &SimulatedRow::mean_coverage)
      .def_ro("min_coverage", &SimulatedRow::min_coverage)
      .def_ro("worst_loss", &SimulatedRow::worst_loss)
      .def_ro("worst_mean_difference", &SimulatedRow::worst_mean_difference)
      .def_ro("tokens", &SimulatedRow::tokens, "Mean of a step.")
      .def_ro("cut_share", &SimulatedRow::cut_share, "Share of the steps that cut sequences.")
      .def_ro("planner_ms", &SimulatedRow::planner_ms)
      .def("__repr__", [](const SimulatedRow& row) {
        return fmt::format("SimulatedRow({}, {:.1f} ms, {:.3f}x)", row.name, row.makespan_ms, row.speedup);
      });
  nb::class_<SweepRow>(module, "SweepRow", "One policy on one layout.")
      .def_ro("layout", &SweepRow::layout)
      .def_ro("simulated", &SweepRow::simulated)
      .def_ro("tokens_per_second", &SweepRow::tokens_per_second)
      .def_ro("memory_bytes", &SweepRow::memory_bytes, "Of the fullest worker.")
      .def_ro("fits", &SweepRow::fits, "None where the profile does not say how much memory there is.")
      .def("__repr__", [](const SweepRow& row) {
        return fmt::format("SweepRow(dp {} x pp {} x tp {} x cp {}, {:.0f} tokens/s)", row.layout.dp, row.layout.pp,
                           row.layout.tp, row.layout.cp, row.tokens_per_second);
      });
}

}  // namespace

void bind_simulation(nb::module_& module) {
  bind_rows(module);
  using Released = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Case>(module, "SimulatedCase", "What simulate() and sweep() draw their steps from.")
      .def(
          "__init__",
          [](Case* self, const PlannerOptions& options, std::vector<int64_t> lengths, int64_t global_batch,
             int64_t steps,
             uint64_t seed) { new (self) Case(make_case(options, std::move(lengths), global_batch, steps, seed)); },
          "options"_a, nb::kw_only(), "lengths"_a, "global_batch"_a, "steps"_a, "seed"_a);
  module.def("simulate", simulate, "described"_a, "policies"_a, Released());
  module.def("sweep", sweep, "described"_a, "policy"_a, "gpus"_a, "max_cp"_a, "max_tp"_a, Released());
  module.def("find_lengths", find_lengths, "name_or_path"_a,
             "The lengths of a named pool (chatqa2-like, longalign-like) or of a text file with one a line.");
}

}  // namespace sb::python
