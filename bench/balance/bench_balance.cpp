// SparseBalance in the training loop, measured: the same global batches under several policies in turn, step by step,
// on two ranks of this machine.
//
//   bench_balance [--pp] [--batches 34] [--out DIR] [--profile FILE]     measures (starts its ranks itself) and sums up
//   bench_balance --batches 8 …                                          again and again: goes on where DIR ends
//   bench_balance --summary --out DIR                                    only sums up
//
// Lengths are a quarter of the pool chatqa2-like. Without --profile the program's `profile` command measures one.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "attention/sparse_attention.h"
#include "balance/length_pool.h"
#include "balance/simulate.h"
#include "comm/world.h"
#include "core/errors.h"
#include "core/random.h"
#include "train/balanced_planner_config.h"
#include "train/trainer.h"
#include "train/training_run.h"

namespace sb {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr int64_t kGlobalBatch = 8;
constexpr uint64_t kSeed = 1;
constexpr int64_t kWarmUp = 4;  // batches that are left out: predictions and caches are cold

struct Arguments {
  bool pipeline = false, summary = false;
  int64_t batches = 34;
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
      "          num_attention_heads: 1, num_key_value_heads: 1, head_dim: 64, initializer_range: {6} }}\n"
      "data: {{ synthetic: {{ task: chunk_recall, length: {0}, vocab_size: 1024 }} }}\n"
      "batch: {{ global_batch_size: {1}, micro_batch_sequences: 1 }}\n"
      "attention: {{ pattern: topk, block: 64, budget: 1024, local_blocks: 1, coverage_rows: 8 }}\n"
      "balance: {{ batching: sab, ordering: auto, tuning: optimal, profile: {2} }}\n"
      "parallel: {{ dp: {3}, pp: {4} }}\n"
      "optimizer: {{ learning_rate: 0, schedule: constant }}\n"
      "train: {{ max_steps: 1000000, threads: 1, tensorboard: false, output_dir: {5}, save_steps: 0 }}\n",
      longest, kGlobalBatch, arguments.profile.string(), arguments.pipeline ? 1 : 2, arguments.pipeline ? 2 : 1,
      (arguments.out / "run").string(), std::getenv("RNG") ? std::getenv("RNG") : "0.22");
}

// The same global batch for every policy, batch after batch. Segments of a sequence draw from a few tokens each, so
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
    constexpr int64_t kSegment = 192, kWords = 6;
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
  TurnsPlanner(std::vector<std::unique_ptr<BalancedPlanner>> planners, int64_t first_batch, fs::path results)
      : planners_(std::move(planners)), names_(planners_.size()), first_(first_batch), results_(std::move(results)) {}

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
    Json line = {{"policy", policy(step_)},
                 {"batch", batch(step_)},
                 {"step_ms", 1e-6 * static_cast<double>(measurement.step_ns)},
                 {"coverage", tokens > 0 ? held / tokens : 1.0},
                 {"baseline_ms", plan_.baseline_us / 1e3}};
    for (const Metric& one : planner.metrics()) line[one.name] = one.value;
    std::ofstream(results_, std::ios::app) << line.dump() << "\n";
  }

 private:
  size_t policy(int64_t step) const { return static_cast<size_t>((step - 1) % std::ssize(planners_)); }
  int64_t batch(int64_t step) const { return first_ + (step - 1) / std::ssize(planners_); }
  std::vector<std::unique_ptr<BalancedPlanner>> planners_;
  std::vector<std::string> names_;
  int64_t first_, step_ = 0;
  fs::path results_;
  Plan plan_;
};

std::string text_of(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

std::vector<SimulatedPolicy> policies(const Arguments& arguments, const BatchingOptions& batching) {
  std::vector<SimulatedPolicy> chosen;
  for (const std::string& name : policy_names(arguments.pipeline))
    for (const SimulatedPolicy& policy : standard_policies(batching, 0.1))
      if (policy.name == name) chosen.push_back(policy);
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

fs::path state_file(const Arguments& arguments, size_t policy) {
  return arguments.out / fmt::format("state-{}.json", policy);
}

int64_t batches_done(const Arguments& arguments) {
  std::ifstream in(arguments.out / "steps.jsonl");
  int64_t done = 0;
  for (std::string line; std::getline(in, line);) done = std::max(done, Json::parse(line)["batch"].get<int64_t>() + 1);
  return done;
}

void measure(const Arguments& arguments) {
  const std::unique_ptr<Communicator> world = open_world_communicator();
  const int64_t first = batches_done(arguments);
  world->barrier();
  const Setup setup = make_setup(arguments);
  const std::vector<SimulatedPolicy> all = policies(arguments, setup.options.plan.batching);
  const bool leads = world->rank() == 0;
  std::unique_ptr<TurnsPlanner> planner;
  std::vector<BalancedPlanner*> planners;
  if (leads) {
    std::vector<std::unique_ptr<BalancedPlanner>> own;
    for (const SimulatedPolicy& policy : all) {
      BalancedPlannerOptions options = setup.options;
      options.plan = policy.options;
      own.push_back(std::make_unique<BalancedPlanner>(run_profile(setup.config, setup.model), options));
      if (const fs::path state = state_file(arguments, own.size() - 1); fs::exists(state))
        own.back()->restore_state(text_of(state));
      planners.push_back(own.back().get());
    }
    planner = std::make_unique<TurnsPlanner>(std::move(own), first, arguments.out / "steps.jsonl");
  }

  SparseAttention attention(
      {setup.config.attention.selection, setup.model.layers, static_cast<int>(setup.config.attention.coverage_rows)});
  RepeatedBatches source(first, arguments.batches, std::ssize(all));
  std::FILE* nothing = std::fopen("/dev/null", "w");
  Console console(nothing, false, 1);
  TrainerParts parts{setup.model, attention, source, {}, console, [] { return false; }, &attention};
  parts.world = world.get();
  parts.local_ranks = world->size();
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
  for (size_t i = 0; i < planners.size(); ++i) std::ofstream(state_file(arguments, i)) << planners[i]->state();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

void sum_up(const Arguments& arguments) {
  const Setup setup = make_setup(arguments);
  const std::vector<SimulatedPolicy> all = policies(arguments, setup.options.plan.batching);
  std::vector<std::map<int64_t, Json>> steps(all.size());
  std::ifstream in(arguments.out / "steps.jsonl");
  for (std::string line; std::getline(in, line);) {
    const Json json = Json::parse(line);
    if (json["batch"].get<int64_t>() >= kWarmUp)
      steps[json["policy"].get<size_t>()][json["batch"].get<int64_t>()] = json;
  }
  const int64_t total = batches_done(arguments);

  // What the simulator says of the same batches: the profile as it was measured, coverage as it was learned.
  const LatencyModel latency(run_profile(setup.config, setup.model));
  const CostModel cost(latency, setup.options.spec, setup.options.layout);
  const std::vector<int64_t> lengths = pool();
  const BalanceState learned = parse_balance_states(text_of(state_file(arguments, all.size() - 1)), "state").back();
  const SimulateInput input{cost, learned.coverage, lengths, kGlobalBatch, total, kSeed, [] { return 0.0; }, nullptr};

  fmt::print("{} batches of {} sequences, lengths chatqa2-like / 4, {}; {} batches measured after {} of warm-up\n\n",
             total, kGlobalBatch, arguments.pipeline ? "pp 2" : "dp 2", steps[0].size(), std::min(total, kWarmUp));
  fmt::print("{:<20} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>10} {:>10}\n", "policy", "step ms", "speed-up", "simulated",
             "of it", "coverage", "budget", "step error", "planning");
  double last_speedup = 0, last_share = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    double own = 0, base = 0, covered = 0, budget = 0, planning = 0;
    std::vector<double> errors;
    for (const auto& [batch, json] : steps[i]) {
      const auto found = steps[0].find(batch);
      if (found == steps[0].end()) continue;
      own += json["step_ms"].get<double>();
      base += found->second["step_ms"].get<double>();
      covered += json["coverage"].get<double>();
      budget += json["budget"].get<double>();
      planning += json["planning_ms"].get<double>() + json["planning_wait_ms"].get<double>();
      errors.push_back(std::abs(json["predicted_step_ms"].get<double>() / json["step_ms"].get<double>() - 1));
    }
    const auto count = static_cast<double>(errors.size());
    const double simulated = simulate_policy(input, all[i]).speedup;
    last_speedup = base / own;
    last_share = last_speedup / simulated;
    fmt::print("{:<20} {:>9.1f} {:>8.3f}x {:>8.3f}x {:>7.1f} % {:>9.4f} {:>9.0f} {:>8.1f} % {:>8.2f} %\n", all[i].name,
               own / count, last_speedup, simulated, 100 * last_share, covered / count, budget / count,
               100 * median(errors), 100 * planning / own);
  }
  fmt::print("\n{} over in_order: {:.3f} times, {:.1f} % of what the simulator says\n", all.back().name, last_speedup,
             100 * last_share);
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
    else if (word == "--batches")
      arguments.batches = std::stoll(value());
    else if (word == "--out")
      arguments.out = value();
    else if (word == "--profile")
      arguments.profile = value();
    else
      throw UserError("unknown argument {}", word);
  }
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
