#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/at_least.h"
#include "cli/commands.h"
#include "cli/output_file.h"
#include "cli/profile/scoring_options.h"
#include "cli/simulate/simulate_ring.h"
#include "cli/simulate/simulate_sweep.h"
#include "cli/step_progress.h"
#include "core/errors.h"
#include "core/log.h"
#include "data/files/token_file.h"
#include "plan/latency/adapter_profile.h"
#include "plan/latency/links_file.h"
#include "plan/simulate/length_pool.h"
#include "plan/simulate/simulate.h"
#include "report/schedule_picture.h"

namespace sb {
namespace {

using Json = nlohmann::ordered_json;

struct SimulateArguments {
  std::string model = "qwen2.5-3b", profile = "h200-analytic", coverage = "power:0.22", lengths = "chatqa2-like";
  Layout layout;
  AttentionSpec spec;
  BatchingOptions batching;
  int64_t global_batch = 16, steps = 200, max_length = 0, lora = 0;
  uint64_t seed = 1;
  double p = 0.1;
  std::vector<std::string> policies;
  std::string chunk = "auto";
  bool frontier = false, no_frontier = false;
  int threads = 0;
  std::string links, json, trace, svg;
  SweepArguments sweep;
  RingArguments ring;
};

double clock_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void print_legend() {
  fmt::print(
      "imbalance: maximum / mean time of the micro-batches; workers: the same of the workers; speed-up: over in_order\n"
      "of bound: lower bound / step time; bubbles: idle share of the workers' time; cov: attention coverage\n"
      "max loss: largest share of its coverage that a (sequence, layer) loses; planner: time to plan a step\n\n");
}

void print_head() {
  fmt::print("{:<34} {:>9} {:>8} {:>9} {:>8} {:>8} {:>8} {:>8} {:>9} {:>8} {:>10}\n", "policy", "imbalance", "workers",
             "step ms", "speed-up", "of bound", "bubbles", "mean cov", "min cov", "max loss", "planner ms");
}

void print_row(const SimulatedRow& row) {
  fmt::print("{:<34} {:>9.3f} {:>8.3f} {:>9.1f} {:>7.3f}x {:>7.1f}% {:>7.1f}% {:>8.4f} {:>9.4f} {:>7.1f}% {:>10.3f}\n",
             row.name, row.imbalance, row.worker_imbalance, row.makespan_ms, row.speedup, 100 * row.lower_bound_share,
             100 * row.bubble_share, row.mean_coverage, row.min_coverage, 100 * row.worst_loss, row.planner_ms);
  std::fflush(stdout);
}

Json row_json(const SimulatedRow& row) {
  const PlanOptions& o = row.options;
  Json json = {{"policy", row.name},
               {"batching", o.batching.name()},
               {"ordering", o.ordering ? "auto" : "none"},
               {"chunk", o.chunk.automatic() ? Json("auto")
                         : o.chunk.on()      ? Json(o.chunk.tokens)
                                             : Json("off")},
               {"tuning", word_of(kTuningWords, o.tuning.policy)}};
  if (o.tuning.policy != TuningPolicy::none) json["p"] = o.tuning.p;
  if (o.tuning.policy == TuningPolicy::anchor) json["anchor"] = word_of(kAnchorWords, o.tuning.anchor);
  if (o.tuning.policy == TuningPolicy::optimal)
    json["target"] = o.tuning.target == kEqualCoverage ? Json("equal_coverage") : Json(o.tuning.target);
  json.update({{"speedup", row.speedup},
               {"worst_step_speedup", row.worst_step_speedup},
               {"imbalance", row.imbalance},
               {"worker_imbalance", row.worker_imbalance},
               {"makespan_ms", row.makespan_ms},
               {"lower_bound_share", row.lower_bound_share},
               {"bubble_share", row.bubble_share},
               {"mean_coverage", row.mean_coverage},
               {"min_coverage", row.min_coverage},
               {"worst_loss", row.worst_loss},
               {"worst_mean_difference", row.worst_mean_difference},
               {"planner_ms", row.planner_ms}});
  if (o.tuning.policy == TuningPolicy::optimal) json["relaxed_mean_coverage"] = row.relaxed_bound;
  if (o.chunk.on())
    json.update({{"cut_share", row.cut_share},
                 {"longest_cut_tokens", row.longest_cut},
                 {"largest_piece_tokens", row.largest_piece}});
  return json;
}

// A named pool, a list of lengths, or the documents of token files (a prefix, .bin or .idx, a folder, a pattern).
std::vector<int64_t> pool_of(const std::string& name) {
  const bool tokens = name.ends_with(".bin") || name.ends_with(".idx") || std::filesystem::exists(name + ".idx") ||
                      std::filesystem::is_directory(name) ||
                      (name.find_first_of("*?[") != std::string::npos && !std::filesystem::exists(name));
  if (!tokens) return find_lengths(name);
  std::vector<int64_t> pool;
  for (const std::string& path : expand_token_paths({name})) {
    const std::unique_ptr<TokenFile> file = open_token_file(path);
    for (int64_t d = 0; d < file->documents(); ++d)
      if (file->length(d) > 0) pool.push_back(file->length(d));
  }
  SB_USER_CHECK(!pool.empty(), "{}: every document is empty", name);
  return pool;
}

std::vector<int64_t> read_pool(const SimulateArguments& arguments) {
  std::vector<int64_t> pool = pool_of(arguments.lengths);
  if (arguments.max_length > 0)
    for (int64_t& length : pool) length = std::min(length, arguments.max_length);
  const int64_t longest = *std::max_element(pool.begin(), pool.end());
  const int64_t cap = arguments.batching.micro_batch_tokens;
  SB_USER_CHECK(cap == 0 || longest <= cap,
                "the longest sequence of --lengths has {} tokens, more than the cap of {} per micro-batch; raise "
                "--micro-batch-tokens, or shorten the sequences with --max-length",
                longest, cap);
  return pool;
}

// Tokens of a piece; auto: what is fastest.
int64_t chunk_tokens(const SimulateArguments& arguments) {
  if (arguments.chunk == "auto") return ChunkOptions::kAutomatic;
  SB_USER_CHECK(arguments.spec.block > 0 && arguments.spec.query_block > 0,
                "--block and --query-block must be positive");
  int64_t tokens = 0;
  const auto [end, error] =
      std::from_chars(arguments.chunk.data(), arguments.chunk.data() + arguments.chunk.size(), tokens);
  const int64_t edge = piece_edge(arguments.spec);
  SB_USER_CHECK(error == std::errc() && end == arguments.chunk.data() + arguments.chunk.size() && tokens > 0 &&
                    tokens % edge == 0,
                "--chunk {} is neither `auto` nor a multiple of {} tokens, where key blocks and query blocks both end",
                arguments.chunk, edge);
  return tokens;
}

std::vector<SimulatedPolicy> all_policies(const SimulateArguments& arguments) {
  return standard_policies(arguments.batching, arguments.p, chunk_tokens(arguments));
}

std::vector<SimulatedPolicy> chosen(const std::vector<SimulatedPolicy>& all, const std::vector<std::string>& names) {
  if (names.empty()) return all;
  std::vector<SimulatedPolicy> policies;
  for (const std::string& name : names) {
    const auto found = std::find_if(all.begin(), all.end(), [&](const auto& policy) { return policy.name == name; });
    std::vector<std::string> known;
    for (const auto& policy : all) known.push_back(policy.name);
    SB_USER_CHECK(found != all.end(), "--policies: `{}` is not one of {}", name, fmt::join(known, ", "));
    policies.push_back(*found);
  }
  return policies;
}

void write_pictures(const SimulateArguments& arguments, const SimulateInput& input,
                    const std::vector<SimulatedPolicy>& policies) {
  if (arguments.svg.empty() && arguments.trace.empty()) return;
  LengthSampler sampler(input.pool, input.seed);
  const std::vector<Sequence> sequences = sampler.next(input.global_batch);
  const auto plan = [&](const SimulatedPolicy& policy) {
    return plan_step(0, input.cost, input.coverage, sequences, policy.options, {}, input.threads);
  };
  const SimulatedPolicy& last = policies.back();
  const Plan after = plan(last);
  if (!arguments.trace.empty()) write_output(arguments.trace, schedule_trace(after, input.cost));
  if (!arguments.svg.empty()) {
    const SimulatedPolicy first = all_policies(arguments).front();
    const Plan before = plan(first);
    write_output(arguments.svg,
                 schedule_svg({{"before: " + first.name, &before}, {"after: " + last.name, &after}}, input.cost));
    fmt::print("one of the steps before and after, drawn: {}\n", arguments.svg);
  }
}

Json run_sweep(const SimulateArguments& arguments, const LatencyModel& latency, const SimulateInput& input) {
  const std::vector<std::string> usual = {"in_order", "sab+anchor:mean", "sab+order+chunk+optimal"};
  const auto policies = chosen(all_policies(arguments), arguments.policies.empty() ? usual : arguments.policies);
  Json json = Json::array();
  for (const SweepRow& row : run_sweep(arguments.sweep, latency, input, policies))
    json.push_back({{"policy", row.simulated.name},
                    {"micro_batch_sequences", row.simulated.options.batching.micro_batch_sequences},
                    {"micro_batch_tokens", row.simulated.options.batching.micro_batch_tokens},
                    {"dp", row.layout.dp},
                    {"pp", row.layout.pp},
                    {"tp", row.layout.tp},
                    {"cp", row.layout.cp},
                    {"makespan_ms", row.simulated.makespan_ms},
                    {"speedup", row.simulated.speedup},
                    {"bubble_share", row.simulated.bubble_share},
                    {"tokens_per_second", row.tokens_per_second},
                    {"memory_bytes", row.memory_bytes},
                    {"fits", row.fits ? Json(*row.fits) : Json(nullptr)},
                    {"mean_coverage", row.simulated.mean_coverage}});
  return json;
}

Json run_ring(const SimulateArguments& arguments) {
  Json json = Json::array();
  for (const RingRow& row :
       run_ring(arguments.ring, arguments.layout.cp, static_cast<int>(find_model_shape(arguments.model).heads),
                static_cast<int>(arguments.spec.block), arguments.seed))
    json.push_back({{"placement", placement_name(row.placement)},
                    {"copied", row.copied},
                    {"worker_imbalance", row.worker},
                    {"step_imbalance", row.step},
                    {"lock_step_over_ideal", row.lock_step},
                    {"ideal_ms", row.ideal},
                    {"work_ms", row.computing},
                    {"plain_ms", row.plain},
                    {"plain_exposed_ms", row.plain_exposed()},
                    {"hierarchical_ms", row.hierarchical},
                    {"hierarchical_exposed_ms", row.hierarchical_exposed()}});
  return json;
}

// Of GPUs for a profile of one, of processors otherwise.
void use_links(const SimulateArguments& arguments, Profile& profile) {
  const MeasuredLinks measured = read_links_file(arguments.links);
  profile.links = links_for(measured, profile.memory_bytes > 0, arguments.links);
  const int ranks = arguments.sweep.gpus > 0 ? arguments.sweep.gpus : arguments.layout.workers();
  if (ranks != std::ssize(measured.hosts))
    log::warning("{}: was measured by {} ranks, but {} are simulated: links that more of them share may be slower",
                 arguments.links, measured.hosts.size(), ranks);
}

void check_arguments(const SimulateArguments& arguments) {
  SB_USER_CHECK(arguments.steps > 0 && arguments.global_batch > 0, "--steps and --global-batch must be positive");
  SB_USER_CHECK(arguments.p >= 0 && arguments.p < 1, "--p {}: must be at least 0 and below 1", arguments.p);
  SB_USER_CHECK(arguments.sweep.wanted || arguments.global_batch >= arguments.layout.dp,
                "--global-batch {} is smaller than --dp {}: some ranks would have nothing to do; raise the former or "
                "lower the latter",
                arguments.global_batch, arguments.layout.dp);
  const AttentionSpec& spec = arguments.spec;
  SB_USER_CHECK(spec.score_tokens == 0 || (spec.score_tokens > 0 && spec.block % spec.score_tokens == 0),
                "--score-tokens {} does not divide --block {}; use 0 (the whole block) or a divisor", spec.score_tokens,
                spec.block);
}

// An option that would have no effect beside the others is refused.
void check_together(const CLI::App& command) {
  const auto given = [&](const char* option) { return command.count(option) > 0; };
  const bool sweep = given("--sweep");
  for (const char* option : {"--gpus", "--max-cp", "--max-tp"})
    SB_USER_CHECK(sweep || !given(option), "{}: only applies to --sweep; add --sweep, or set --dp, --pp, --tp and --cp",
                  option);
  for (const char* option : {"--dp", "--pp", "--tp", "--cp"})
    SB_USER_CHECK(!given("--gpus") || !given(option), "--gpus and {} both set the number of workers; keep one", option);
  for (const char* option : {"--frontier", "--no-frontier", "--trace", "--svg"})
    for (const char* other : {"--sweep", "--ring"})
      SB_USER_CHECK(!given(other) || !given(option), "{}: has no effect with {}; remove one of the two", option, other);
  SB_USER_CHECK(!given("--ring") || !given("--policies"),
                "--policies: has no effect with --ring; remove one of the two");
  SB_USER_CHECK(!sweep || !given("--ring"),
                "--sweep tries layouts, --ring looks at a single ring; remove one of the two");
  for (const char* option : {"--placement", "--node-size", "--ring-tokens", "--slash-density", "--verticals",
                             "--ring-index", "--ring-times"})
    SB_USER_CHECK((given("--cp") && !sweep) || !given(option), "{}: only applies to a ring of --cp ranks; set --cp{}",
                  option, sweep ? " instead of --sweep" : "");
}

// In ascending order, each once.
void check_dense_layers(AttentionSpec& spec, int64_t layers) {
  for (const int layer : spec.dense_layers)
    SB_USER_CHECK(layer >= 0 && layer < layers, "--dense-layers: there is no layer {}; the model has layers 0 to {}",
                  layer, layers - 1);
  std::ranges::sort(spec.dense_layers);
  spec.dense_layers.erase(std::unique(spec.dense_layers.begin(), spec.dense_layers.end()), spec.dense_layers.end());
}

void print_interconnect(const Profile& profile, const Layout& layout, bool sweep) {
  if (layout.comm && (sweep || layout.workers() > 1))
    fmt::print("links: {}\n", describe(profile.links));
  else if (!layout.comm)
    fmt::print("interconnect: transfers are not counted (--comm off)\n");
  fmt::print("\n");
}

// Dense attention in order: what the budget alone is worth. The speed-up is over in_order at the budget, as in all
// rows.
SimulatedRow simulate_dense(const LatencyModel& latency, const SimulateInput& input, const SimulatedPolicy& in_order) {
  AttentionSpec spec = input.cost.spec();
  spec.dense_layers.clear();
  spec.dense_below = std::numeric_limits<int64_t>::max();
  const CostModel cost(latency, spec, input.cost.layout());
  const SimulateInput dense{cost,          input.coverage, input.pool, input.global_batch, input.steps, input.seed,
                            input.seconds, input.threads,  {}};
  SimulatedRow row = simulate_policy(dense, in_order);
  row.name = "dense attention, in_order";
  row.speedup = simulate_policy(input, in_order).makespan_ms / row.makespan_ms;
  return row;
}

void print_case(const SimulateArguments& arguments, const Profile& profile, const CoverageModel& coverage,
                size_t sequences) {
  fmt::print("{}: {}\nprofile {} ({}), coverage {}, lengths {} ({} sequences)\n", arguments.model,
             describe(profile.shape), profile.name, profile.machine, coverage.name(), arguments.lengths, sequences);
  if (profile.held_out.count > 0)
    fmt::print("prediction error of the profile on held-out shapes: median {:.1f}%, p95 {:.1f}%\n",
               100 * profile.held_out.median, 100 * profile.held_out.p95);
  if (profile.lora_rank > 0)
    fmt::print("LoRA adapters of rank {} on a frozen model{}\n", profile.lora_rank,
               profile.adapters_measured ? "" : ": derived from a profile of full fine-tuning");
  if (!profile.prefix_measured)
    fmt::print(
        "not measured: the cost of the prefix of a piece; assumed to read and write its gradient sums at memory "
        "bandwidth, {:.3g} us per 1,000 tokens and layer\n",
        1e3 * profile.tables[static_cast<size_t>(Operation::attention_backward)].per_prefix);
  const AttentionSpec& spec = arguments.spec;
  if (const std::string otherwise = selected_otherwise(profile, spec); !otherwise.empty())
    fmt::print("the profile {}\n", otherwise);
  if (const auto& measured = profile.attention;
      measured && (measured->block != spec.block || measured->query_block != spec.query_block ||
                   (measured->score == spec.score && measured->score_tokens != spec.score_tokens)))
    fmt::print(
        "the profile was measured with block {}, query block {}, score tokens {}: other block sizes are extrapolated\n",
        measured->block, measured->query_block, measured->score_tokens);
  const Layout& layout = arguments.layout;
  const std::string ranks = arguments.sweep.wanted ? ""
                                                   : fmt::format("dp {} x pp {} x tp {} x cp {}, ", layout.dp,
                                                                 layout.pp, layout.tp, layout.cp);
  fmt::print("{}global batch {}, {} steps, budget {}, block {}, {} by {}{}{}, p {}\n", ranks, arguments.global_batch,
             arguments.steps, spec.budget, spec.block, spec.pattern, spec.score,
             spec.score_tokens > 0 ? fmt::format(", score tokens {}", spec.score_tokens) : "",
             spec.dense_layers.empty() ? "" : fmt::format(", dense layers {}", fmt::join(spec.dense_layers, ",")),
             arguments.p);
  if (layout.tp > 1 || arguments.sweep.wanted)
    fmt::print(
        "not measured: tensor parallelism; a worker's share of a layer is assumed to take as long as the whole layer "
        "on 1/tp of the tokens, and four of a layer's ten collectives to be hidden behind matmuls\n");
  print_interconnect(profile, layout, arguments.sweep.wanted);
}

Json case_json(const SimulateArguments& arguments, const Profile& profile, const CoverageModel& coverage) {
  return {{"model", arguments.model},
          {"profile", profile.name},
          {"coverage", coverage.name()},
          {"lengths", arguments.lengths},
          {"dp", arguments.layout.dp},
          {"pp", arguments.layout.pp},
          {"tp", arguments.layout.tp},
          {"cp", arguments.layout.cp},
          {"comm", arguments.layout.comm},
          {"head", arguments.layout.head},
          {"warmup_depth", arguments.layout.warmup_depth},
          {"global_batch", arguments.global_batch},
          {"micro_batch_sequences", arguments.batching.micro_batch_sequences},
          {"micro_batch_tokens", arguments.batching.micro_batch_tokens},
          {"budget", arguments.spec.budget},
          {"block", arguments.spec.block},
          {"query_block", arguments.spec.query_block},
          {"pattern", arguments.spec.pattern},
          {"score", arguments.spec.score},
          {"score_channels", arguments.spec.score_channels},
          {"score_tokens", arguments.spec.score_tokens},
          {"dense_layers", arguments.spec.dense_layers},
          {"chunk", arguments.chunk},
          {"prefix_measured", profile.prefix_measured},
          {"links", profile.links.source},
          {"p", arguments.p},
          {"steps", arguments.steps},
          {"seed", arguments.seed}};
}

// What the last policy gains, in words. Of this layout alone: nobody would choose one that suits the order badly.
void print_gain(const Layout& layout, const SimulatedRow& row, const std::string& base) {
  fmt::print(
      "\n"
      "on this layout (dp {} x pp {} x tp {} x cp {}) {} makes a step {:.2f} times as fast as {}; --sweep compares "
      "layouts\n",
      layout.dp, layout.pp, layout.tp, layout.cp, row.name, row.speedup, base);
}

// One table of the policies asked for, and two of what tuning trades.
void run_policies(const SimulateArguments& arguments, const std::vector<SimulatedPolicy>& policies,
                  const SimulatedRow& dense, SimulateInput input, Json& json) {
  const auto frontier = frontier_policies(arguments.batching, arguments.p), by_loss = loss_policies(arguments.batching);
  const bool with_frontier = arguments.frontier || (arguments.policies.empty() && !arguments.no_frontier);
  StepProgress progress((std::ssize(policies) + (with_frontier ? std::ssize(frontier) + std::ssize(by_loss) : 0)) *
                        arguments.steps);
  input.step_done = [&] { progress.step(); };
  const auto table = [&](const char* key, const std::vector<SimulatedPolicy>& list) {
    if (&list == &policies) print_legend();
    print_head();
    if (&list == &policies) print_row(dense);
    Json rows = Json::array();
    SimulatedRow row;
    for (const SimulatedPolicy& policy : list) {
      row = simulate_policy(input, policy);
      progress.clear();
      print_row(row);
      rows.push_back(row_json(row));
    }
    json[key] = rows;
    return row;
  };
  const SimulatedRow last = table("rows", policies);
  if (const std::string base = all_policies(arguments).front().name; last.name != base)
    print_gain(arguments.layout, last, base);
  if (with_frontier) {
    fmt::print(
        "\n"
        "frontier: by deadline, between the fastest schedule (0) and the one at base budgets (1)\n");
    table("frontier", frontier);
    fmt::print(
        "\n"
        "equal mean coverage: by p, the largest fraction of its coverage that a (sequence, layer) may lose\n");
    table("by_p", by_loss);
  }
  write_pictures(arguments, input, policies);
}

Json simulate(SimulateArguments arguments) {
  if (arguments.ring.only) {
    SB_USER_CHECK(arguments.layout.cp > 1, "--ring: set --cp to the number of ranks that share the sequence");
    return {{"cp", arguments.layout.cp}, {"ring", run_ring(arguments)}};
  }
  check_arguments(arguments);
  if (arguments.batching.micro_batch_sequences == 0 && arguments.batching.micro_batch_tokens == 0)
    arguments.batching.micro_batch_sequences = 1;
  const auto policies = chosen(all_policies(arguments), arguments.policies);
  Profile used =
      with_adapters(find_profile(arguments.profile, find_model_shape(arguments.model), arguments.spec, arguments.lora),
                    arguments.lora);
  if (!arguments.links.empty()) use_links(arguments, used);
  const LatencyModel latency(std::move(used));
  const Profile& profile = latency.profile();
  check_dense_layers(arguments.spec, profile.shape.layers);
  if (!arguments.sweep.wanted) {
    const std::string problem = sparse_tensor_parallel_problem(profile.shape, arguments.layout.tp);
    SB_USER_CHECK(problem.empty(), "--tp {}: {}; lower --tp", arguments.layout.tp, problem);
  }
  const CostModel cost(latency, arguments.spec, arguments.layout);
  const auto coverage = find_coverage(arguments.coverage, static_cast<int>(profile.shape.layers));
  const std::vector<int64_t> pool = read_pool(arguments);
  ThreadPool threads(arguments.threads > 0 ? arguments.threads : available_cores());

  print_case(arguments, profile, *coverage, pool.size());
  Json json = case_json(arguments, profile, *coverage);
  const SimulateInput input{cost,          *coverage, pool, arguments.global_batch, arguments.steps, arguments.seed,
                            clock_seconds, &threads,  {}};
  if (arguments.sweep.wanted) {
    json["layouts"] = run_sweep(arguments, latency, input);
    return json;
  }
  const SimulatedRow dense = simulate_dense(latency, input, standard_policies(arguments.batching, arguments.p).front());
  json["dense"] = row_json(dense);
  run_policies(arguments, policies, dense, input, json);
  if (arguments.layout.cp > 1) {
    fmt::print("\n");
    json["ring"] = run_ring(arguments);
  }
  return json;
}

void run(const SimulateArguments& arguments) {
  for (const std::string& path : {arguments.json, arguments.trace, arguments.svg}) check_output(path);
  if (!arguments.sweep.wanted) check_ring(arguments.layout.cp);
  const Json json = simulate(arguments);
  if (!arguments.json.empty())  // A file's name need not be UTF-8, which JSON is.
    write_output(arguments.json, json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
}

}  // namespace

void add_simulate_command(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("simulate", "predict step time, speed-up and coverage of the balancing policies");
  auto a = std::make_shared<SimulateArguments>();
  const std::map<std::string, bool> on_off{{"on", true}, {"off", false}};
  command
      ->add_option("--model", a->model,
                   "model name (" + fmt::format("{}", fmt::join(named_model_shapes(), ", ")) + ") or config.json")
      ->capture_default_str();
  command
      ->add_option("--profile", a->profile,
                   "latency profile: h200 (measured, for Qwen2.5-0.5B and 3B), h200-analytic, h100-analytic, "
                   "a100-analytic, h20-analytic or a profile.json")
      ->capture_default_str();
  command->add_option("--links", a->links,
                      "links measured by `sparsebalance profile --links`; unless given, those of the profile");
  command->add_option("--lora", a->lora, "rank of LoRA adapters on a frozen model; 0: full fine-tuning")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 12))
      ->capture_default_str();
  command->add_option("--coverage", a->coverage, "coverage model: power:GAMMA, layered or a coverage.json")
      ->capture_default_str();
  command
      ->add_option("--lengths", a->lengths,
                   "sequence lengths: chatqa2-like, longalign-like, a file with one length per line, or token files")
      ->capture_default_str();
  command->add_option("--max-length", a->max_length, "truncate longer sequences to this many tokens")
      ->check(at_least(1), "at least 1");
  command->add_option("--dp", a->layout.dp, "data-parallel ranks")->capture_default_str();
  command->add_option("--pp", a->layout.pp, "pipeline stages")->capture_default_str();
  command->add_option("--tp", a->layout.tp, "tensor-parallel ranks")
      ->check(at_least(1), "at least 1")
      ->capture_default_str();
  command->add_option("--cp", a->layout.cp, "context-parallel ranks")->capture_default_str();
  command
      ->add_option("--warmup-depth", a->layout.warmup_depth,
                   "forwards that a stage runs ahead, in multiples of its distance to the last stage; 1: plain 1F1B, "
                   "2: hides transfers")
      ->capture_default_str();
  command->add_option("--comm", a->layout.comm, "count transfers and the gradient reduction (default: on)")
      ->transform(CLI::CheckedTransformer(on_off).description("{on,off}"));
  command->add_option("--head", a->layout.head, "count embedding and loss (default: on)")
      ->transform(CLI::CheckedTransformer(on_off).description("{on,off}"));
  command
      ->add_option("--micro-batch-sequences", a->batching.micro_batch_sequences,
                   "sequences per micro-batch, which fixes the number of micro-batches (1 if --micro-batch-tokens is "
                   "not given either)")
      ->check(at_least(1), "at least 1");
  command->add_option("--micro-batch-tokens", a->batching.micro_batch_tokens, "maximum tokens per micro-batch")
      ->check(at_least(1), "at least 1");
  command->add_option("--global-batch", a->global_batch, "sequences per step")->capture_default_str();
  command->add_option("--budget", a->spec.budget, "base budget, keys per query")
      ->check(CLI::Range(int64_t{1}, AttentionSpec::kMostBudget))
      ->capture_default_str();
  command->add_option("--block", a->spec.block, "tokens per key block")->capture_default_str();
  command->add_option("--query-block", a->spec.query_block, "tokens per query block")->capture_default_str();
  add_scoring_options(*command, a->spec);
  command->add_option("--dense-layers", a->spec.dense_layers, "layers with dense attention, for example 0,1")
      ->delimiter(',');
  command->add_option("--max-budget", a->spec.max_budget, "largest budget that memory allows; 0: no limit")
      ->capture_default_str();
  command->add_option("--p", a->p, "largest fraction of its coverage that a (sequence, layer) may lose")
      ->capture_default_str();
  command->add_option("--chunk", a->chunk, "policies with `chunk`: auto, or the maximum tokens per piece")
      ->capture_default_str();
  command->add_option("--steps", a->steps, "number of global batches to draw")->capture_default_str();
  command->add_option("--seed", a->seed, "random seed of the draw")->capture_default_str();
  command
      ->add_option("--policies", a->policies,
                   "simulate only these policies, for example in_order,sab+order+optimal; --sweep: one to try on every "
                   "layout, or several to compare with the first (unless given: in_order, the paper's "
                   "sab+anchor:mean, and sab+order+chunk+optimal)")
      ->delimiter(',');
  command->add_flag("--frontier", a->frontier, "also print speed-up by deadline and by p when --policies is given");
  command->add_flag("--no-frontier", a->no_frontier, "do not print speed-up by deadline and by p")
      ->excludes("--frontier");
  add_sweep_options(*command, a->sweep);
  command->add_option("--threads", a->threads, "planner threads; 0: all cores")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  command->add_option("--json", a->json, "write the results to this file, as JSON");
  command->add_option("--trace", a->trace, "write a Chrome trace of one step of the last policy to this file");
  command->add_option("--svg", a->svg,
                      "draw one step before (in_order) and after (the last policy) balancing to this file");
  add_ring_options(*command, a->ring);
  command->callback([a, command] {
    check_together(*command);
    check_scoring_options(*command, a->spec);
    run(*a);
  });
}

}  // namespace sb
