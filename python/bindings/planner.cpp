#include "python/bindings/planner.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cmath>

#include "core/errors.h"
#include "plan/coverage/cautious_coverage.h"
#include "plan/planner/balanced_planner.h"
#include "python/bindings/bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace sb::python {
namespace {

std::vector<Sequence> sequences_of(const std::vector<int64_t>& lengths) {
  std::vector<Sequence> sequences;
  for (const int64_t tokens : lengths) sequences.push_back({std::ssize(sequences), tokens});
  return sequences;
}

// UserError for what no model and no layout could use.
void check_spec(const AttentionSpec& spec) {
  SB_USER_CHECK(spec.block > 0, "block {} must be positive", spec.block);
  SB_USER_CHECK(spec.query_block > 0, "query_block {} must be positive", spec.query_block);
  SB_USER_CHECK(spec.budget > 0 && spec.budget <= AttentionSpec::kMostBudget, "budget {} is not in 1 to {}",
                spec.budget, AttentionSpec::kMostBudget);
  SB_USER_CHECK(spec.max_budget == 0 || spec.max_budget >= spec.budget,
                "max_budget {} is below budget {}; use 0 (up to dense) or a larger number", spec.max_budget,
                spec.budget);
  SB_USER_CHECK(spec.sink_blocks >= 0, "sink_blocks {} must not be negative", spec.sink_blocks);
  SB_USER_CHECK(spec.local_blocks >= 0, "local_blocks {} must not be negative", spec.local_blocks);
  SB_USER_CHECK(spec.dense_below >= -1, "dense_below {} is neither -1 (the budget) nor a number of tokens",
                spec.dense_below);
  SB_USER_CHECK(spec.score_tokens >= 0 && (spec.score_tokens == 0 || spec.block % spec.score_tokens == 0),
                "score_tokens {} does not divide block {}; use 0 (the whole block) or a divisor", spec.score_tokens,
                spec.block);
  for (const int layer : spec.dense_layers)
    SB_USER_CHECK(layer >= 0, "dense_layers: there is no layer {}; they count from 0", layer);
}

// UserError for what a planner and a simulation take on trust.
void check_options(const PlannerOptions& options) {
  const BatchingOptions& batching = options.plan.batching;
  SB_USER_CHECK(batching.micro_batch_sequences >= 0 && batching.micro_batch_tokens >= 0,
                "micro_batch_sequences and micro_batch_tokens may not be negative");
  const TuningOptions& tuning = options.plan.tuning;
  SB_USER_CHECK(tuning.p >= 0 && tuning.p < 1, "p must be in [0, 1), got {}", tuning.p);
  const int64_t chunk = options.plan.chunk.tokens, edge = piece_edge(options.spec);
  SB_USER_CHECK(chunk == ChunkOptions::kAutomatic || (chunk >= 0 && chunk % edge == 0),
                "chunk {} is neither \"auto\" nor a multiple of {} tokens, where key blocks and query blocks both end",
                chunk, edge);
  SB_USER_CHECK(options.threads >= 1 && options.threads <= 1024, "threads must be 1 to 1024, got {}", options.threads);
}

}  // namespace

Planner::Planner(PlannerOptions options) : options_(std::move(options)), pool_(options_.threads) {
  profile_ = find_profile(options_.profile, find_model_shape(options_.model), options_.spec);
  check_measured_blocks(profile_, options_.spec, {"block", "query_block", "score_tokens"});
  if (!options_.coverage.empty()) coverage_ = find_coverage(options_.coverage, layers());
  const Costs costs(LatencyModel(profile_), options_.spec, options_.layout);
  for (int stage = 0; stage <= costs.cost.stages(); ++stage) first_layer_.push_back(costs.cost.first_layer(stage));
  learn({});
}

void Planner::learn(BalanceState state) {
  LatencyModel latency(profile_);
  latency.set_corrections_ppm(state.corrections_ppm);
  auto costs = std::make_shared<const Costs>(latency, options_.spec, options_.layout, first_layer_);
  learned_ = std::make_shared<const Learned>(Learned{std::move(state), std::move(costs)});
}

PlanObject Planner::plan(int64_t step, const std::vector<int64_t>& lengths) {
  const std::vector<Sequence> sequences = sequences_of(lengths);
  const std::shared_ptr<const Learned> learned = learned_;
  ForkedPool::Workers& workers = pool_.get();
  const nb::gil_scoped_release released;
  const std::lock_guard busy(workers.busy);
  ExpectedBudgets expected;
  expected.set_ppm(learned->state.expected_budgets_ppm);
  const CautiousCoverage observed(learned->state.coverage, options_.spec);
  const CoverageModel& coverage = coverage_ ? *coverage_ : static_cast<const CoverageModel&>(observed);
  return {std::make_shared<const Plan>(
              plan_step(step, learned->costs->cost, coverage, sequences, options_.plan, expected, &workers.pool)),
          learned->costs};
}

StepMeasurement Planner::measurement_of(const Plan& plan, const std::vector<std::vector<MeasuredTimes>>& times) const {
  SB_USER_CHECK(times.size() == plan.ranks.size(), "times are of {} ranks, the plan of {}", times.size(),
                plan.ranks.size());
  StepMeasurement measurement;
  measurement.step = plan.step;
  for (size_t r = 0; r < times.size(); ++r) {
    SB_USER_CHECK(times[r].size() == plan.ranks[r].micro_batches.size(),
                  "rank {}: times of {} micro-batches, the plan has {}", r, times[r].size(),
                  plan.ranks[r].micro_batches.size());
    auto& rank = measurement.ranks.emplace_back();
    for (const MeasuredTimes& stages : times[r]) {
      SB_USER_CHECK(std::ssize(stages) == options_.layout.pp, "rank {}: times of {} stages where there are {}", r,
                    stages.size(), options_.layout.pp);
      MicroBatchTimes& micro_batch = rank.emplace_back();
      for (const auto& [forward, backward] : stages) {
        SB_USER_CHECK(forward >= 0 && backward >= 0 && forward < 1e9 && backward < 1e9,
                      "rank {}: {} and {} are no milliseconds of a forward and a backward", r, forward, backward);
        micro_batch.forward.push_back(std::llround(forward * 1e6));
        micro_batch.backward.push_back(std::llround(backward * 1e6));
      }
    }
  }
  return measurement;
}

void Planner::observe(const PlanObject& plan, const std::vector<int64_t>& lengths,
                      const std::vector<std::vector<MeasuredTimes>>& times) {
  const std::vector<Sequence> sequences = sequences_of(lengths);
  for (const PlannedRank& rank : plan.plan->ranks)
    for (const PlannedMicroBatch& micro_batch : rank.micro_batches)
      for (const int64_t id : micro_batch.sequences)
        SB_USER_CHECK(id >= 0 && id < std::ssize(lengths), "the plan has sequence {}, and there are {} lengths", id,
                      lengths.size());
  const StepMeasurement measurement = measurement_of(*plan.plan, times);
  BalanceState state = learned_->state;
  LatencyModel latency(profile_);
  latency.set_corrections_ppm(state.corrections_ppm);
  const CostModel cost(latency, options_.spec, options_.layout, first_layer_);
  learn_times(cost, latency, *plan.plan, sequences, measurement);
  ExpectedBudgets expected;
  expected.set_ppm(state.expected_budgets_ppm);
  learn_budgets(*plan.plan, options_.spec, sequences, expected);
  state.step = std::max(state.step, plan.plan->step);
  state.corrections_ppm = latency.corrections_ppm();
  state.expected_budgets_ppm = expected.ppm();
  learn(std::move(state));
}

void Planner::restore(const std::string& text) {
  learn(parse_balance_states(text, "the planner's state").back());
}

namespace {

void bind_layout(nb::module_& module) {
  nb::class_<AttentionSpec>(module, "AttentionSpec", "What a plan has to know about attention.")
      .def(
          "__init__",
          [](AttentionSpec* self, int64_t budget, int64_t block, int64_t query_block, int64_t score_tokens,
             int64_t sink_blocks, int64_t local_blocks, int64_t dense_below, int64_t max_budget,
             std::vector<int> dense_layers) {
            AttentionSpec spec;
            spec.block = block;
            spec.query_block = query_block;
            // Parts of blocks are judged by moments; a measured profile says itself what it was measured with.
            if (score_tokens != 0) {
              spec.score = "moments";
              spec.score_channels = 0;
              spec.score_tokens = score_tokens;
            }
            spec.budget = budget;
            spec.sink_blocks = sink_blocks;
            spec.local_blocks = local_blocks;
            spec.dense_below = dense_below;
            spec.max_budget = max_budget;
            spec.dense_layers = std::move(dense_layers);
            check_spec(spec);
            new (self) AttentionSpec(std::move(spec));
          },
          nb::kw_only(), "budget"_a = 8192, "block"_a = 128, "query_block"_a = 16, "score_tokens"_a = 0,
          "sink_blocks"_a = 1, "local_blocks"_a = 2, "dense_below"_a = -1, "max_budget"_a = 0,
          "dense_layers"_a = std::vector<int>())
      .def_ro("budget", &AttentionSpec::budget, "Keys per query: the base that tuning starts from.")
      .def_ro("block", &AttentionSpec::block)
      .def_ro("query_block", &AttentionSpec::query_block)
      .def_ro("score_tokens", &AttentionSpec::score_tokens)
      .def_ro("sink_blocks", &AttentionSpec::sink_blocks)
      .def_ro("local_blocks", &AttentionSpec::local_blocks)
      .def_ro("dense_below", &AttentionSpec::dense_below, "Sequences up to this length run dense; -1: the budget.")
      .def_ro("max_budget", &AttentionSpec::max_budget, "What memory was planned for; 0: up to dense.")
      .def_ro("dense_layers", &AttentionSpec::dense_layers);
  nb::class_<Layout>(module, "Layout", "The grid of workers.")
      .def(
          "__init__",
          [](Layout* self, int dp, int pp, int cp, int tp, int warmup_depth, bool comm, bool head, int element_bytes) {
            SB_USER_CHECK(element_bytes == 2 || element_bytes == 4,
                          "element_bytes {}: weights and activations have 2 bytes (bfloat16) or 4 (float32)",
                          element_bytes);
            new (self) Layout{.dp = dp,
                              .pp = pp,
                              .cp = cp,
                              .tp = tp,
                              .warmup_depth = warmup_depth,
                              .comm = comm,
                              .head = head,
                              .element_bytes = element_bytes};
          },
          nb::kw_only(), "dp"_a = 1, "pp"_a = 1, "cp"_a = 1, "tp"_a = 1, "warmup_depth"_a = 1, "comm"_a = true,
          "head"_a = true, "element_bytes"_a = 2)
      .def_ro("dp", &Layout::dp)
      .def_ro("pp", &Layout::pp)
      .def_ro("cp", &Layout::cp)
      .def_ro("tp", &Layout::tp)
      .def_ro("warmup_depth", &Layout::warmup_depth)
      .def_ro("comm", &Layout::comm, "Transfers and the gradient reduction are counted.")
      .def_ro("head", &Layout::head, "Embedding and loss are counted.")
      .def_ro("element_bytes", &Layout::element_bytes, "Of weights and activations, which transfers move.");
}

}  // namespace

void bind_planner(nb::module_& module) {
  bind_layout(module);
  nb::class_<PlannerOptions>(module, "PlannerOptions", "What plans are made by, in training and simulated.")
      .def(
          "__init__",
          [](PlannerOptions* self, const std::string& model, const std::string& profile, const std::string& coverage,
             const AttentionSpec& attention, const Layout& layout, double p, int64_t chunk,
             int64_t micro_batch_sequences, int64_t micro_batch_tokens, int threads, const std::string& batching,
             bool ordering, const std::string& tuning, const std::string& anchor, double target,
             int64_t max_sequences) {
            PlannerOptions options{.model = model,
                                   .profile = profile,
                                   .coverage = coverage,
                                   .spec = attention,
                                   .layout = layout,
                                   .plan = {},
                                   .threads = threads};
            options.plan.batching.policy = value_of(kBatchingWords, batching, "batching");
            options.plan.batching.micro_batch_sequences = micro_batch_sequences;
            options.plan.batching.micro_batch_tokens = micro_batch_tokens;
            options.plan.batching.max_sequences = max_sequences;
            options.plan.ordering = ordering;
            options.plan.tuning.policy = value_of(kTuningWords, tuning, "tuning");
            options.plan.tuning.anchor = value_of(kAnchorWords, anchor, "anchor");
            options.plan.tuning.p = p;
            options.plan.tuning.target = target;
            options.plan.chunk.tokens = chunk;
            check_options(options);
            new (self) PlannerOptions(std::move(options));
          },
          nb::kw_only(), "model"_a, "profile"_a, "coverage"_a, "attention"_a, "layout"_a, "p"_a, "chunk"_a,
          "micro_batch_sequences"_a, "micro_batch_tokens"_a, "threads"_a, "batching"_a = "sab", "ordering"_a = true,
          "tuning"_a = "none", "anchor"_a = "mean", "target"_a = -1.0, "max_sequences"_a = 0);
  nb::class_<Planner>(module, "Planner")
      .def(nb::init<PlannerOptions>(), "options"_a)
      .def("plan", &Planner::plan, "step"_a, "lengths"_a)
      .def("observe", &Planner::observe, "plan"_a, "lengths"_a, "times"_a)
      .def("state", &Planner::state)
      .def("restore", &Planner::restore, "text"_a)
      .def_prop_ro("layers", &Planner::layers)
      .def_prop_ro("first_layer", &Planner::first_layer, "Of every stage, and one past the last.");
}

}  // namespace sb::python
