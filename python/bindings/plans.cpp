#include <fmt/format.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "core/errors.h"
#include "python/bindings/bindings.h"
#include "python/bindings/plan_object.h"
#include "report/schedule_picture.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace sb::python {

const CostModel& PlanObject::cost() const {
  SB_USER_CHECK(costs, "this plan was read from text, which has no transfer times: make it again with Planner.plan()");
  return costs->cost;
}

std::vector<RankOperation> operations_of(const PlanObject& plan) {
  std::vector<RankOperation> operations;
  for (int rank = 0; rank < static_cast<int>(plan.plan->ranks.size()); ++rank)
    for (const ScheduledOperation& operation : schedule_of(*plan.plan, plan.cost(), rank).operations)
      operations.push_back({rank, operation});
  return operations;
}

namespace {

PlanObject plan_from_json(const std::string& text, const std::string& where) {
  return {std::make_shared<const Plan>(parse_plan(text, where)), nullptr};
}

std::vector<RankObject> ranks_of(const PlanObject& plan) {
  std::vector<RankObject> ranks;
  for (size_t r = 0; r < plan.plan->ranks.size(); ++r) ranks.push_back({plan.plan, r});
  return ranks;
}

std::vector<MicroBatchObject> micro_batches_of(const RankObject& rank) {
  std::vector<MicroBatchObject> micro_batches;
  for (size_t i = 0; i < rank.get().micro_batches.size(); ++i) micro_batches.push_back({rank, i});
  return micro_batches;
}

std::optional<nb::ndarray<nb::numpy, int32_t>> budgets_of(const MicroBatchObject& micro_batch) {
  const PlannedMicroBatch& planned = micro_batch.get();
  if (planned.budgets.empty()) return std::nullopt;
  const size_t sequences = planned.sequences.size();
  return numpy_array(planned.budgets, {planned.budgets.size() / sequences, sequences});
}

std::optional<std::pair<int64_t, int64_t>> piece_of(const MicroBatchObject& micro_batch) {
  const PlannedMicroBatch& planned = micro_batch.get();
  if (!planned.is_piece()) return std::nullopt;
  return std::pair(planned.begin, planned.end);
}

// One panel a plan, titled, on one time axis; all with the costs of the first.
std::string svg_of(const std::vector<std::pair<std::string, PlanObject>>& plans, int max_ranks) {
  SB_USER_CHECK(!plans.empty(), "there is no plan to draw");
  std::vector<SchedulePanel> panels;
  for (const auto& [title, plan] : plans) {
    SB_USER_CHECK(plan.cost().stages() == plans[0].second.cost().stages(), "the plans to draw differ in their stages");
    panels.push_back({title, plan.plan.get()});
  }
  return schedule_svg(panels, plans[0].second.cost(), max_ranks);
}

void bind_micro_batch(nb::module_& module) {
  nb::class_<MicroBatchObject>(module, "MicroBatch", "Whole sequences, or one piece of one sequence.")
      .def_prop_ro(
          "sequences", [](const MicroBatchObject& m) { return m.get().sequences; },
          "Positions in the lengths that were planned.")
      .def_prop_ro("tokens", [](const MicroBatchObject& m) { return m.get().tokens; })
      .def_prop_ro("budgets", budgets_of, nb::rv_policy::move,
                   "int32 [layers, sequences], keys per query; None: the configured budget.")
      .def_prop_ro("piece", piece_of, "(begin, end) of the tokens of the only sequence; None: whole sequences.")
      .def_prop_ro(
          "forward_us", [](const MicroBatchObject& m) { return m.get().forward_us; }, "Of every stage.")
      .def_prop_ro(
          "backward_us", [](const MicroBatchObject& m) { return m.get().backward_us; }, "Of every stage.")
      .def("__repr__", [](const MicroBatchObject& m) {
        return fmt::format("MicroBatch({} sequences, {} tokens)", m.get().sequences.size(), m.get().tokens);
      });
  nb::class_<RankObject>(module, "RankPlan", "What one data-parallel rank does in a step.")
      .def_prop_ro("micro_batches", micro_batches_of, "In the order of their forwards.")
      .def_prop_ro("makespan_us", [](const RankObject& r) { return r.get().makespan_us; })
      .def_prop_ro(
          "ahead", [](const RankObject& r) { return r.get().ahead; },
          "How far forwards run ahead of backwards on the last stage.")
      .def("__repr__",
           [](const RankObject& r) { return fmt::format("RankPlan({} micro-batches)", r.get().micro_batches.size()); });
}

void bind_operation(nb::module_& module) {
  const auto field = [](auto ScheduledOperation::*member) {
    return [member](const RankOperation& operation) { return operation.operation.*member; };
  };
  nb::class_<RankOperation>(module, "Operation", "A forward or backward of a schedule; times in microseconds.")
      .def_ro("rank", &RankOperation::rank)
      .def_prop_ro("stage", field(&ScheduledOperation::stage))
      .def_prop_ro("micro_batch", field(&ScheduledOperation::micro_batch))
      .def_prop_ro("backward", field(&ScheduledOperation::backward))
      .def_prop_ro("critical", field(&ScheduledOperation::critical))
      .def_prop_ro("start", field(&ScheduledOperation::start))
      .def_prop_ro("end", field(&ScheduledOperation::end))
      .def_prop_ro("slack", field(&ScheduledOperation::slack))
      .def("__repr__", [](const RankOperation& o) {
        return fmt::format("Operation(rank {}, stage {}, {}{}, {:.1f} to {:.1f} us)", o.rank, o.operation.stage,
                           o.operation.backward ? "B" : "F", o.operation.micro_batch, o.operation.start,
                           o.operation.end);
      });
}

}  // namespace

void bind_plans(nb::module_& module) {
  bind_micro_batch(module);
  bind_operation(module);
  const auto field = [](auto Plan::*member) { return [member](const PlanObject& p) { return (*p.plan).*member; }; };
  nb::class_<PlanObject>(module, "Plan", "What one optimizer step does, on every data-parallel rank.")
      .def_prop_ro("step", field(&Plan::step))
      .def_prop_ro("layers", field(&Plan::layers))
      .def_prop_ro("ranks", ranks_of)
      .def_prop_ro("makespan_us", field(&Plan::makespan_us))
      .def_prop_ro("lower_bound_us", field(&Plan::lower_bound_us), "No arrangement at these budgets is faster.")
      .def_prop_ro("baseline_us", field(&Plan::baseline_us), "In order, at the base budgets.")
      .def_prop_ro("imbalance", field(&Plan::imbalance), "Largest / mean latency of the micro-batches.")
      .def_prop_ro("worker_imbalance", field(&Plan::worker_imbalance))
      .def_prop_ro("bubble_share", field(&Plan::bubble_share))
      .def_prop_ro("mean_coverage", field(&Plan::mean_coverage))
      .def_prop_ro("min_coverage", field(&Plan::min_coverage))
      .def_prop_ro("base_coverage", field(&Plan::base_coverage), "Mean at the base budgets.")
      .def_prop_ro("notes", field(&Plan::notes), "Where the plan is not what was asked for.")
      .def(
          "to_json", [](const PlanObject& p) { return write_plan(*p.plan); }, "As plan.jsonl has it, byte for byte.")
      .def_static("from_json", plan_from_json, "text"_a, "where"_a = "the text")
      .def("operations", operations_of, nb::call_guard<nb::gil_scoped_release>(),
           "The schedule: every forward and backward of every rank with start, end and slack.")
      .def(
          "svg",
          [](const PlanObject& p, const std::string& title, int max_ranks) {
            return svg_of({{title, p}}, max_ranks);
          },
          "title"_a = "", "max_ranks"_a = 4, "The schedule as a picture; the slowest ranks first.")
      .def(
          "trace", [](const PlanObject& p) { return schedule_trace(*p.plan, p.cost()); },
          "The schedule for chrome://tracing or Perfetto.")
      .def("_repr_svg_",
           [](const PlanObject& p) -> std::optional<std::string> {
             if (!p.costs) return std::nullopt;
             return svg_of({{fmt::format("step {}", p.plan->step), p}}, 4);
           })
      .def("__getstate__", [](const PlanObject& p) { return write_plan(*p.plan); })
      .def("__setstate__",
           [](PlanObject& p, const std::string& text) { new (&p) PlanObject(plan_from_json(text, "a pickled plan")); })
      .def(
          "__eq__",
          [](const PlanObject& a, const nb::object& other) {
            PlanObject b;
            return nb::try_cast(other, b) && write_plan(*a.plan) == write_plan(*b.plan);
          },
          nb::is_operator())
      .def("__hash__", [](const PlanObject& p) { return std::hash<std::string>()(write_plan(*p.plan)); })
      .def("__repr__", [](const PlanObject& p) {
        return fmt::format("Plan(step {}, {} ranks, {:.1f} ms)", p.plan->step, p.plan->ranks.size(),
                           p.plan->makespan_us / 1e3);
      });
  module.def("svg", svg_of, "plans"_a, "max_ranks"_a = 4,
             "Titled plans, [(title, plan), ...], as one picture on one time axis.");
}

}  // namespace sb::python
