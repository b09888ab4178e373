// SparseBalance in the training loop, measured: the same global batches under several policies in turn, step by step,
// on two ranks of this machine.
//
//   bench_balance [--pp] [--pattern topk|mass] [--batches 34] [--policies A,B] [--out DIR] [--profile FILE]
//   bench_balance --summary [--pp] [--pattern topk|mass] --out DIR     sums up again what the first has measured
//
// It starts its ranks itself. With the same DIR it goes on where the last measurement of these policies ended, so that
// a long one can be cut into pieces. Lengths are a quarter of the pool chatqa2-like. Where FILE (profile.json in DIR)
// is not there, the program's `profile` command measures it.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "attention/cpu/sparse_attention.h"
#include "comm/world.h"
#include "core/errors.h"
#include "core/random.h"
#include "plan/simulate/length_pool.h"
#include "plan/simulate/simulate.h"
#include "train/make_planner.h"
#include "train/trainer.h"
#include "train/training_run.h"

namespace sb {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr int64_t kGlobalBatch = 8;
constexpr uint64_t kSeed = 1;
// Batches at the beginning of every piece that are left out: predictions and caches are cold.
constexpr int64_t kWarmUp = 8;

struct Arguments {
  bool pipeline = false, summary = false;
  int64_t batches = 34;
  std::vector<std::string> policies;  // in_order first
  std::string pattern = "topk";
  fs::path out = "bench_balance.out", profile;
};

std::vector<std::string> policy_names(bool pipeline) {
  if (pipeline) return {"in_order", "in_order+order", "in_order+optimal", "sab", "sab+order", "sab+order+optimal"};
  return {"in_order", "sab", "in_order+optimal", "sab+anchor:mean", "sab+order+optimal"};
}

std::vector<int64_t> pool() {
  std::vector<int64_t> lengths = find_lengths("chatqa2-like");
  for (int64_t& length : lengths) length = std::max<int64_t>(32, length / 4);
  return lengths;
}

std::string run_yaml(const Arguments& arguments, int64_t longest) {
  return fmt::format(
      "model:\n"
      "  init: {{ model_type: llama, vocab_size: 1024, hidden_size: 64, intermediate_size: 64, num_hidden_layers: 2,\n"
      "          num_attention_heads: 1, num_key_value_heads: 1, head_dim: 64, initializer_range: 0.25 }}\n"
      "data: {{ synthetic: {{ task: chunk_recall, length: {0}, vocab_size: 1024 }} }}\n"
      "batch: {{ global_batch_size: {1}, micro_batch_sequences: 1 }}\n"
      "attention: {{ pattern: {6}, block: 64, budget: 2048, local_blocks: 1, coverage_rows: 8 }}\n"
      "balance: {{ batching: sab, ordering: auto, tuning: optimal, profile: {2} }}\n"
      "parallel: {{ dp: {3}, pp: {4} }}\n"
      "optimizer: {{ learning_rate: 0, schedule: constant }}\n"
      "train: {{ max_steps: 1000000, threads: 1, tensorboard: false, output_dir: {5}, save_steps: 0 }}\n",
      longest, kGlobalBatch, arguments.profile.string(), arguments.pipeline ? 1 : 2, arguments.pipeline ? 2 : 1,
      (arguments.out / "run").string(), arguments.pattern);
}

// The same global batch for every policy, batch after batch. Segments of a sequence draw from two tokens each, so
// that key blocks differ and attention has something to choose.
class RepeatedBatches final : public SequenceSource {
 public:
  RepeatedBatches(int64_t first_batch, int64_t batches, int64_t policies) : first_(first_batch), policies_(policies) {
    const std::vector<int64_t> lengths = pool();
    LengthSampler sampler(lengths, kSeed);
    for (int64_t b = 0; b < first_batch + batches + 4; ++b)
      for (const Sequence& sequence : sampler.next(kGlobalBatch)) lengths_.push_back(sequence.tokens);
    longest_ = *std::max_element(lengths.begin(), lengths.end());
  }

  int64_t length(uint64_t position) const override { return lengths_[sequence_at(position)]; }
  int64_t valid_targets(uint64_t position) const override { return length(position) - 1; }
  int64_t max_length() const override { return longest_; }
  TokenSequence read(uint64_t position) const override {
    const size_t number = sequence_at(position);
    Random random(1000 + number);
    TokenSequence sequence;
    sequence.id = static_cast<int64_t>(number);
    constexpr int64_t kSegment = 192, kWords = 2;
    std::vector<int32_t> words(kWords);
    for (int64_t t = 0; t < lengths_[number]; ++t) {
      if (t % kSegment == 0)
        for (int32_t& word : words) word = static_cast<int32_t>(random.below(1024));
      sequence.tokens.push_back(words[random.below(kWords)]);
    }
    sequence.labels.assign(sequence.tokens.begin() + 1, sequence.tokens.end());
    sequence.labels.push_back(kIgnoredLabel);
    return sequence;
  }

 private:
  size_t sequence_at(uint64_t position) const {
    const auto step = static_cast<int64_t>(position) / kGlobalBatch,
               place = static_cast<int64_t>(position) % kGlobalBatch;
    return static_cast<size_t>((first_ + step / policies_) * kGlobalBatch + place);
  }
  int64_t first_, policies_, longest_ = 0;
  std::vector<int64_t> lengths_;
};

// Step s runs batch (s-1) / policies under policy (s-1) mod policies. Each policy has a planner of its own that sees
// its own steps only, as in a run of its own.
class TurnsPlanner final : public StepPlanner {
 public:
  TurnsPlanner(std::vector<std::unique_ptr<BalancedPlanner>> planners, std::vector<std::string> names, int64_t run,
               int64_t first_batch, fs::path results)
      : planners_(std::move(planners)),
        names_(std::move(names)),
        run_(run),
        first_(first_batch),
        results_(std::move(results)) {}

  int ahead() const override { return BalancedPlanner::kAhead * static_cast<int>(planners_.size()); }
  void announce(int64_t step, std::vector<Sequence> sequences) override {
    planners_[policy(step)]->announce(batch(step) + 1, std::move(sequences));
  }
  Plan next() override {
    ++step_;
    plan_ = planners_[policy(step_)]->next();
    plan_.step = step_;
    return plan_;
  }
  void learn(const StepMeasurement& measurement) override {
    StepMeasurement own = measurement;
    own.step = batch(step_) + 1;
    BalancedPlanner& planner = *planners_[policy(step_)];
    planner.learn(own);
    double held = 0, tokens = 0;
    for (const MeasuredCoverage& sample : measurement.coverage) {
      held += sample.sample.held * static_cast<double>(sample.tokens);
      tokens += static_cast<double>(sample.tokens);
    }
    Json line = {{"run", run_},
                 {"policy", names_[policy(step_)]},
                 {"batch", batch(step_)},
                 {"step_ms", 1e-6 * static_cast<double>(measurement.step_ns)},
                 {"coverage", tokens > 0 ? held / tokens : 1.0}};
    for (const Metric& one : planner.metrics()) line[one.name] = one.value;
    std::ofstream(results_, std::ios::app) << line.dump() << "\n";
  }

 private:
  size_t policy(int64_t step) const { return static_cast<size_t>((step - 1) % std::ssize(planners_)); }
  int64_t batch(int64_t step) const { return first_ + (step - 1) / std::ssize(planners_); }
  std::vector<std::unique_ptr<BalancedPlanner>> planners_;
  std::vector<std::string> names_;
  int64_t run_, first_, step_ = 0;
  fs::path results_;
  Plan plan_;
};

std::string text_of(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

std::vector<SimulatedPolicy> find_policies(const std::vector<std::string>& names, const BatchingOptions& batching) {
  std::vector<SimulatedPolicy> chosen;
  for (const std::string& name : names) {
    const size_t before = chosen.size();
    for (const SimulatedPolicy& policy : standard_policies(batching, 0.1))
      if (policy.name == name) chosen.push_back(policy);
    SB_USER_CHECK(chosen.size() > before, "--policies: {} is none", name);
  }
  return chosen;
}

struct Setup {
  RunConfig config;
  ModelConfig model;
  BalancedPlannerOptions options;  // but for the policy
};

Setup make_setup(const Arguments& arguments) {
  const std::vector<int64_t> lengths = pool();
  const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
  Setup setup;
  setup.config = parse_run_config(run_yaml(arguments, longest), "bench_balance");
  setup.model = run_model_config(setup.config);
  setup.options.plan.batching.micro_batch_sequences = 1;
  setup.options.plan.batching.micro_batch_tokens = longest;
  setup.options.spec = attention_spec(setup.config);
  setup.options.layout.dp = setup.config.parallel.dp;
  setup.options.layout.pp = setup.config.parallel.pp;
  return setup;
}

// What a policy learned, in the company it ran in.
fs::path state_file(const Arguments& arguments, const std::string& policy) {
  std::string name = arguments.policies.back() + "-" + policy;
  for (char& c : name)
    if (c == '+' || c == ':') c = '_';
  return arguments.out / ("state-" + name + ".json");
}

std::vector<Json> measured_steps(const Arguments& arguments) {
  std::ifstream in(arguments.out / "steps.jsonl");
  std::vector<Json> steps;
  for (std::string line; std::getline(in, line);) steps.push_back(Json::parse(line));
  return steps;
}

void measure(const Arguments& arguments) {
  const std::unique_ptr<Communicator> world = open_world_communicator();
  int64_t first = 0, number = 0;
  for (const Json& step : measured_steps(arguments)) {
    number = std::max(number, step["run"].get<int64_t>() + 1);
    if (step["policy"] == arguments.policies.back()) first = std::max(first, step["batch"].get<int64_t>() + 1);
  }
  world->barrier();  // rank 0 writes only after all have read
  const Setup setup = make_setup(arguments);
  const std::vector<SimulatedPolicy> all = find_policies(arguments.policies, setup.options.plan.batching);
  std::unique_ptr<TurnsPlanner> planner;
  std::vector<BalancedPlanner*> planners;
  if (world->rank() == 0) {
    std::vector<std::unique_ptr<BalancedPlanner>> own;
    for (const SimulatedPolicy& policy : all) {
      BalancedPlannerOptions options = setup.options;
      options.plan = policy.options;
      own.push_back(std::make_unique<BalancedPlanner>(run_profile(setup.config, setup.model), options));
      if (const fs::path state = state_file(arguments, policy.name); fs::exists(state))
        own.back()->restore_state(text_of(state));
      planners.push_back(own.back().get());
    }
    planner = std::make_unique<TurnsPlanner>(std::move(own), arguments.policies, number, first,
                                             arguments.out / "steps.jsonl");
  }

  SparseAttention attention(
      {setup.config.attention.selection, setup.model.layers, static_cast<int>(setup.config.attention.coverage_rows)});
  RepeatedBatches source(first, arguments.batches, std::ssize(all));
  std::FILE* nothing = std::fopen("/dev/null", "w");
  Console console(nothing, false, 1);
  TrainerParts parts{setup.model, attention, source, {}, console, [] { return false; }, &attention};
  parts.world = world.get();
  parts.cores = std::max(1, available_cores() / world->size());
  parts.planner = planner.get();
  RunConfig config = setup.config;
  config.train.output_dir = arguments.out / fmt::format("run-{}-rank-{}", first, world->rank());
  fs::remove_all(config.train.output_dir);
  {
    RunDirectory directory(config);
    Trainer trainer(config, parts, directory);
    for (int64_t i = 0; i < arguments.batches * std::ssize(all); ++i) trainer.step();
  }
  fs::remove_all(config.train.output_dir);
  std::fclose(nothing);
  for (size_t i = 0; i < planners.size(); ++i)
    std::ofstream(state_file(arguments, arguments.policies[i])) << planners[i]->state();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

// Speed-up over in_order that the simulator predicts for the batches that count.
double simulated_speedup(const CostModel& cost, const CoverageModel& coverage, const SimulatedPolicy& policy,
                         const std::set<int64_t>& batches) {
  const std::vector<int64_t> lengths = pool();
  LengthSampler sampler(lengths, kSeed);
  ExpectedBudgets expected;
  double before = 0, after = 0;
  for (int64_t batch = 0; !batches.empty() && batch <= *batches.rbegin(); ++batch) {
    const std::vector<Sequence> sequences = sampler.next(kGlobalBatch);
    const Plan plan = plan_step(batch, cost, coverage, sequences, policy.options, expected);
    learn_budgets(plan, cost.spec(), sequences, expected);
    if (!batches.contains(batch)) continue;
    before += plan.baseline_us;
    after += plan.makespan_us;
  }
  return after > 0 ? before / after : 1;
}

struct Totals {
  double own = 0, base = 0, covered = 0, base_covered = 0, budget = 0, planning = 0;
  std::vector<double> errors, ratios;
  std::set<int64_t> batches;
};

void sum_up(const Arguments& arguments) {
  const Setup setup = make_setup(arguments);
  std::map<std::pair<int64_t, int64_t>, Json> in_order;  // by run and batch
  std::map<std::string, Totals> totals;
  const std::vector<Json> steps = measured_steps(arguments);
  std::map<int64_t, int64_t> first;  // batch of every run
  for (const Json& step : steps) {
    const auto batch = step["batch"].get<int64_t>();
    const auto found = first.try_emplace(step["run"].get<int64_t>(), batch).first;
    found->second = std::min(found->second, batch);
  }
  for (const Json& step : steps)
    if (step["policy"] == "in_order") in_order[{step["run"].get<int64_t>(), step["batch"].get<int64_t>()}] = step;
  for (const Json& step : steps) {
    const auto batch = step["batch"].get<int64_t>();
    const auto base = in_order.find({step["run"].get<int64_t>(), batch});
    if (base == in_order.end() || batch < first.at(step["run"].get<int64_t>()) + kWarmUp) continue;
    Totals& total = totals[step["policy"].get<std::string>()];
    const auto own_ms = step["step_ms"].get<double>(), base_ms = base->second["step_ms"].get<double>();
    total.own += own_ms;
    total.base += base_ms;
    total.ratios.push_back(base_ms / own_ms);
    total.covered += step["coverage"].get<double>();
    total.base_covered += base->second["coverage"].get<double>();
    total.budget += step["budget"].get<double>();
    total.planning += step["planning_ms"].get<double>() + step["planning_wait_ms"].get<double>();
    total.errors.push_back(std::abs(step["predicted_step_ms"].get<double>() / own_ms - 1));
    total.batches.insert(batch);
  }

  // The simulator knows the profile as it was measured and the coverage as the last policy learned it.
  const LatencyModel latency(run_profile(setup.config, setup.model));
  const CostModel cost(latency, setup.options.spec, setup.options.layout);
  const fs::path state = state_file(arguments, arguments.policies.back());
  SB_USER_CHECK(fs::exists(state), "{}: nothing was measured there", arguments.out.string());
  const BalanceState learned = parse_balance_states(text_of(state), state.string()).back();

  fmt::print(
      "{}, {}, global batches of {} sequences, one a micro-batch, lengths chatqa2-like / 4; the first {} batches of "
      "every piece do not count\n\n{:<20} {:>7} {:>8} {:>9} {:>8} {:>10} {:>7} {:>19} {:>7} {:>10} {:>9}\n",
      arguments.pipeline ? "pp 2" : "dp 2", arguments.pattern, kGlobalBatch, kWarmUp, "policy", "batches", "step ms",
      "speed-up", "median", "simulated", "of it", "coverage (in order)", "budget", "step error", "planning");
  double speedup = 0, share = 0;
  for (const std::string& name : policy_names(arguments.pipeline)) {
    const auto found = totals.find(name);
    if (found == totals.end()) continue;
    const Totals& total = found->second;
    const auto count = static_cast<double>(total.errors.size());
    const double simulated = simulated_speedup(
        cost, learned.coverage, find_policies({name}, setup.options.plan.batching).front(), total.batches);
    speedup = total.base / total.own;
    share = speedup / simulated;
    fmt::print(
        "{:<20} {:>7} {:>8.1f} {:>8.3f}x {:>7.3f}x {:>9.3f}x {:>5.1f} % {:>10.4f} ({:.4f}) {:>7.0f} {:>8.1f} % "
        "{:>7.2f} %\n",
        name, total.errors.size(), total.own / count, speedup, median(total.ratios), simulated, 100 * share,
        total.covered / count, total.base_covered / count, total.budget / count, 100 * median(total.errors),
        100 * total.planning / total.own);
  }
  fmt::print("\n{} over in_order: {:.3f} times, {:.1f} % of what the simulator says\n",
             policy_names(arguments.pipeline).back(), speedup, 100 * share);
}

int run(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const auto value = [&] {
      SB_USER_CHECK(i + 1 < argc, "{} needs a value", word);
      return std::string(argv[++i]);
    };
    if (word == "--pp")
      arguments.pipeline = true;
    else if (word == "--summary")
      arguments.summary = true;
    else if (word == "--pattern")
      arguments.pattern = value();
    else if (word == "--batches")
      arguments.batches = std::stoll(value());
    else if (word == "--out")
      arguments.out = value();
    else if (word == "--policies") {
      std::istringstream list(value());
      for (std::string name; std::getline(list, name, ',');) arguments.policies.push_back(name);
    } else if (word == "--profile")
      arguments.profile = value();
    else
      throw UserError("unknown argument {}", word);
  }
  if (arguments.policies.empty()) arguments.policies = policy_names(arguments.pipeline);
  SB_USER_CHECK(arguments.policies.front() == "in_order", "--policies: in_order must come first, to compare with");
  fs::create_directories(arguments.out);
  if (arguments.profile.empty()) arguments.profile = arguments.out / "profile.json";
  if (launched_ranks() > 1) {
    measure(arguments);
    return 0;
  }
  if (!fs::exists(arguments.profile)) {
    const std::vector<int64_t> lengths = pool();
    std::ofstream(arguments.out / "run.yaml") << run_yaml(arguments, *std::max_element(lengths.begin(), lengths.end()));
    const std::string command =
        fmt::format("{} profile --run {} --max-tokens 4096 --repeats 7 --held-out 8 --out {}", SB_PROGRAM,
                    (arguments.out / "run.yaml").string(), arguments.profile.string());
    SB_USER_CHECK(std::system(command.c_str()) == 0, "failed: {}", command);
  }
  if (!arguments.summary) {
    const int code = launch_local_ranks(2, std::vector<std::string>(argv, argv + argc));
    if (code != 0) return code;
  }
  sum_up(arguments);
  return 0;
}

}  // namespace
}  // namespace sb

int main(int argc, char** argv) {
  try {
    return sb::run(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
