// SparseBalance in the training loop, measured: the same global batches under several policies in turn, step by step,
// on two ranks of this machine.
//
//   bench_balance [--pp] [--pattern topk|mass] [--global-batch 8] [--chunk TOKENS] [--batches 34] [--policies A,B]
//                 [--at-least POLICY:TIMES,…] [--out DIR] [--profile FILE]
//   bench_balance --summary [the same options]     sums up again what the first has measured
//
// It starts its ranks itself. With the same DIR it goes on where the last measurement of these policies ended, so that
// a long one can be cut into pieces. Lengths are a quarter of the pool chatqa2-like. Where FILE (profile.json in DIR)
// is not there, the program's `profile` command measures it. --chunk: sequences cut into pieces of so many tokens
// (`sab+order+chunk`) against whole ones. --at-least: exit code 1 unless the last policy is so many times as fast as
// the others named, and its speed-up over in_order within 10 % of the simulated one.

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
#include <set>
#include <sstream>

#include "attention/cpu/sparse_attention.h"
#include "bench/plan/workload.h"
#include "comm/world.h"
#include "core/errors.h"
#include "plan/schedule/schedule.h"
#include "plan/simulate/length_pool.h"
#include "plan/simulate/simulate.h"
#include "train/make_planner.h"
#include "train/trainer.h"
#include "train/training_run.h"

namespace sb {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr uint64_t kSeed = 1;
// Batches at the beginning of every piece that are left out: predictions and caches are cold.
constexpr int64_t kWarmUp = 8;

// How far the measured speed-up may be from the simulated one.
constexpr double kOfSimulated = 0.1;

struct Arguments {
  bool pipeline = false, summary = false;
  int64_t batches = 34, global_batch = 8, chunk = 0;
  std::vector<std::string> policies;  // in_order first
  std::vector<std::pair<std::string, double>> at_least;
  std::string pattern = "topk", model = "narrow";
  fs::path out = "bench_balance.out", profile;
};

std::vector<std::string> policy_names(const Arguments& arguments) {
  if (arguments.chunk > 0) return {"in_order", "sab+order", "sab+order+chunk"};
  if (arguments.pipeline)
    return {"in_order", "in_order+order", "in_order+optimal", "sab", "sab+order", "sab+order+optimal"};
  return {"in_order", "sab", "in_order+optimal", "sab+anchor:mean", "sab+order+optimal"};
}

std::vector<int64_t> pool() {
  std::vector<int64_t> lengths = find_lengths("chatqa2-like");
  for (int64_t& length : lengths) length = std::max<int64_t>(32, length / 4);
  return lengths;
}

std::string run_yaml(const Arguments& arguments, int64_t longest) {
  return fmt::format(
      "model:\n  init: {7}\n"
      "data: {{ synthetic: {{ task: chunk_recall, length: {0}, vocab_size: 1024 }} }}\n"
      "batch: {{ global_batch_size: {1}, micro_batch_sequences: 1 }}\n"
      "attention: {{ pattern: {6}, block: 64, budget: 2048, local_blocks: 1, coverage_rows: 8 }}\n"
      "balance: {{ batching: sab, ordering: auto, tuning: optimal, profile: {2} }}\n"
      "parallel: {{ dp: {3}, pp: {4} }}\n"
      "optimizer: {{ learning_rate: 0, schedule: constant }}\n"
      "train: {{ max_steps: 1000000, threads: 1, tensorboard: false, output_dir: {5}, save_steps: 0 }}\n",
      longest, arguments.global_batch, arguments.profile.string(), arguments.pipeline ? 1 : 2,
      arguments.pipeline ? 2 : 1, (arguments.out / "run").string(), arguments.pattern,
      bench::model_yaml(bench::find_model(arguments.model)));
}

// The same global batches for every policy.
class DrawnBatches final : public SequenceSource {
 public:
  DrawnBatches(int64_t global_batch, int64_t first_batch, int64_t batches) : first_(first_batch * global_batch) {
    const std::vector<int64_t> lengths = pool();
    LengthSampler sampler(lengths, kSeed);
    for (int64_t b = 0; b < first_batch + batches + 4; ++b)
      for (const Sequence& sequence : sampler.next(global_batch)) lengths_.push_back(sequence.tokens);
    longest_ = *std::max_element(lengths.begin(), lengths.end());
  }

  int64_t length(uint64_t position) const override { return lengths_[sequence_at(position)]; }
  int64_t valid_targets(uint64_t position) const override { return length(position) - 1; }
  int64_t max_length() const override { return longest_; }
  TokenSequence read(uint64_t position) const override {
    return bench::drawn_sequence(sequence_at(position), length(position));
  }

 private:
  size_t sequence_at(uint64_t position) const { return static_cast<size_t>(first_) + position; }
  int64_t first_, longest_ = 0;
  std::vector<int64_t> lengths_;
};

// What a step's operations add up to: of the busiest stage, and as the planned schedule has them, without transfers.
// Milliseconds.
struct Operations {
  double busy = 0, scheduled = 0;
};

// `times(micro-batch, stage, backward)`: milliseconds.
template <typename Times>
Operations add_up(const Plan& plan, const Times& times) {
  Operations most;
  for (size_t r = 0; r < plan.ranks.size(); ++r) {
    const PlannedRank& rank = plan.ranks[r];
    PipelineTimes own;
    own.stages = static_cast<int>(rank.micro_batches.front().forward_us.size());
    own.micro_batches = static_cast<int>(rank.micro_batches.size());
    std::vector<double> busy(static_cast<size_t>(own.stages), 0.0);
    std::vector<int> order;
    for (int i = 0; i < own.micro_batches; ++i) {
      order.push_back(i);
      for (int s = 0; s < own.stages; ++s) {
        own.forward.push_back(times(r, i, s, false));
        own.backward.push_back(times(r, i, s, true));
        busy[static_cast<size_t>(s)] += own.forward.back() + own.backward.back();
      }
    }
    most.busy = std::max(most.busy, std::ranges::max(busy));
    most.scheduled = std::max(most.scheduled, rank_schedule(rank, own.stages)->makespan(own, order));
  }
  return most;
}

// A policy's planner, and what its steps showed: step s runs batch first + s - 1.
class RecordedPlanner final : public StepPlanner {
 public:
  RecordedPlanner(std::unique_ptr<BalancedPlanner> planner, std::string name, int64_t run, int64_t first_batch,
                  fs::path results)
      : planner_(std::move(planner)),
        name_(std::move(name)),
        run_(run),
        first_(first_batch),
        results_(std::move(results)) {}

  int ahead() const override { return BalancedPlanner::kAhead; }
  void announce(int64_t step, std::vector<Sequence> sequences) override {
    planner_->announce(first_ + step, std::move(sequences));
  }
  Plan next() override {
    Plan plan = planner_->next();
    plan.step -= first_;
    plans_.push_back(plan);
    return plan;
  }
  void learn(const StepMeasurement& measurement) override {
    StepMeasurement own = measurement;
    own.step += first_;
    planner_->learn(own);
    double held = 0, tokens = 0;
    for (const MeasuredCoverage& sample : measurement.coverage) {
      held += sample.sample.held * static_cast<double>(sample.tokens);
      tokens += static_cast<double>(sample.tokens);
    }
    Json line = {{"run", run_},
                 {"policy", name_},
                 {"batch", own.step - 1},
                 {"step_ms", 1e-6 * static_cast<double>(measurement.step_ns)},
                 {"coverage", tokens > 0 ? held / tokens : 1.0}};
    const Plan plan = std::move(plans_.front());
    plans_.pop_front();
    const Operations planned = add_up(plan, [&](size_t r, int i, int s, bool backward) {
      const PlannedMicroBatch& micro_batch = plan.ranks[r].micro_batches[static_cast<size_t>(i)];
      return 1e-3 * (backward ? micro_batch.backward_us : micro_batch.forward_us)[static_cast<size_t>(s)];
    });
    const Operations ran = add_up(plan, [&](size_t r, int i, int s, bool backward) {
      const MicroBatchTimes& times = measurement.ranks[r][static_cast<size_t>(i)];
      return 1e-6 * static_cast<double>((backward ? times.backward : times.forward)[static_cast<size_t>(s)]);
    });
    line["busy_ms"] = ran.busy;
    line["planned_busy_ms"] = planned.busy;
    line["scheduled_ms"] = ran.scheduled;
    for (const Metric& one : planner_->metrics()) line[one.name] = one.value;
    std::ofstream(results_, std::ios::app) << line.dump() << "\n";
  }
  std::string state() const override { return planner_->state(); }

 private:
  std::unique_ptr<BalancedPlanner> planner_;
  std::deque<Plan> plans_;  // of steps that are not measured yet
  std::string name_;
  int64_t run_, first_;
  fs::path results_;
};

std::string text_of(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

SimulatedPolicy find_policy(const std::string& name, const BatchingOptions& batching, int64_t chunk) {
  for (const SimulatedPolicy& policy : standard_policies(batching, 0.1, chunk)) {
    if (policy.name != name) continue;
    SB_USER_CHECK(chunk > 0 || name.find("+chunk") == std::string::npos, "--policies: {} needs --chunk TOKENS", name);
    return policy;
  }
  throw UserError("--policies: {} is none", name);
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

// A policy's training run. Policies take turns, each with a planner and memory of its own, as in a run of its own.
class PolicyRun {
 public:
  struct Place {
    int64_t number, first_batch;  // of the measurement, and where it begins
  };
  PolicyRun(const Arguments& arguments, const Setup& setup, const std::string& name, const Place& place,
            Communicator& world)
      : config_(setup.config),
        attention_(
            {config_.attention.selection, setup.model.layers, static_cast<int>(config_.attention.coverage_rows)}),
        source_(arguments.global_batch, place.first_batch, arguments.batches),
        state_file_(state_file(arguments, name)) {
    BalancedPlannerOptions options = setup.options;
    options.plan = find_policy(name, setup.options.plan.batching, arguments.chunk).options;
    config_.balance.chunk = options.plan.chunk.tokens;
    config_.train.output_dir = arguments.out / fmt::format("run-{}-rank-{}", name, world.rank());
    fs::remove_all(config_.train.output_dir);
    TrainerParts parts{setup.model, attention_, source_, {}, console_, [] { return false; }, &attention_};
    parts.world = &world;
    parts.cores = std::max(1, available_cores() / world.size());
    options.plan.batching.max_sequences = most_sequences(config_, Trainer::packing(config_, parts));
    if (world.rank() == 0) {
      auto planner = std::make_unique<BalancedPlanner>(run_profile(setup.config, setup.model), options);
      if (fs::exists(state_file_)) planner->restore_state(text_of(state_file_));
      planner_ = std::make_unique<RecordedPlanner>(std::move(planner), name, place.number, place.first_batch,
                                                   arguments.out / "steps.jsonl");
    }
    parts.planner = planner_.get();
    directory_ = std::make_unique<RunDirectory>(config_);
    trainer_ = std::make_unique<Trainer>(config_, parts, *directory_);
  }
  ~PolicyRun() {
    trainer_.reset();
    directory_.reset();
    fs::remove_all(config_.train.output_dir);
  }
  void step() { trainer_->step(); }
  void save() const {
    if (planner_) std::ofstream(state_file_) << planner_->state();
  }

 private:
  RunConfig config_;
  SparseAttention attention_;
  DrawnBatches source_;
  fs::path state_file_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> nothing_{std::fopen("/dev/null", "w"), std::fclose};
  Console console_{nothing_.get(), false, 1};
  std::unique_ptr<RecordedPlanner> planner_;  // rank 0's
  std::unique_ptr<RunDirectory> directory_;
  std::unique_ptr<Trainer> trainer_;
};

void measure(const Arguments& arguments) {
  const std::unique_ptr<Communicator> world = open_world_communicator();
  PolicyRun::Place place{0, 0};
  for (const Json& step : measured_steps(arguments)) {
    place.number = std::max(place.number, step["run"].get<int64_t>() + 1);
    if (step["policy"] == arguments.policies.back())
      place.first_batch = std::max(place.first_batch, step["batch"].get<int64_t>() + 1);
  }
  world->barrier();  // rank 0 writes only after all have read
  const Setup setup = make_setup(arguments);
  std::vector<std::unique_ptr<PolicyRun>> runs;
  for (const std::string& name : arguments.policies)
    runs.push_back(std::make_unique<PolicyRun>(arguments, setup, name, place, *world));
  for (int64_t batch = 0; batch < arguments.batches; ++batch)
    for (const auto& run : runs) run->step();
  for (const auto& run : runs) run->save();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

// Speed-up over in_order that the simulator predicts for the batches that count.
double simulated_speedup(const CostModel& cost, const CoverageModel& coverage, const SimulatedPolicy& policy,
                         int64_t global_batch, const std::set<int64_t>& batches) {
  const std::vector<int64_t> lengths = pool();
  LengthSampler sampler(lengths, kSeed);
  ExpectedBudgets expected;
  double before = 0, after = 0;
  for (int64_t batch = 0; !batches.empty() && batch <= *batches.rbegin(); ++batch) {
    const std::vector<Sequence> sequences = sampler.next(global_batch);
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
  double busy = 0, planned_busy = 0, scheduled = 0;
  std::vector<double> errors, ratios;
  std::set<int64_t> batches;
};

// Whether the bars that were asked for are met.
bool sum_up(const Arguments& arguments) {
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
    total.busy += step["busy_ms"].get<double>();
    total.planned_busy += step["planned_busy_ms"].get<double>();
    total.scheduled += step["scheduled_ms"].get<double>();
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
      "{}, {}, global batches of {} sequences, one a micro-batch{}, lengths chatqa2-like / 4; the first {} batches of "
      "every piece do not count\n\n{:<20} {:>7} {:>8} {:>9} {:>8} {:>10} {:>7} {:>19} {:>7} {:>10} {:>9}\n",
      arguments.pipeline ? "pp 2" : "dp 2", arguments.pattern, arguments.global_batch,
      arguments.chunk > 0 ? fmt::format(" (chunk: pieces and packs of at most {} tokens)", arguments.chunk) : "",
      kWarmUp, "policy", "batches", "step ms", "speed-up", "median", "simulated", "of it", "coverage (in order)",
      "budget", "step error", "planning");
  double speedup = 0, share = 0;  // of the last policy
  std::string last;
  std::map<std::string, double> mean_ms;
  for (const std::string& name : policy_names(arguments)) {
    const auto found = totals.find(name);
    if (found == totals.end()) continue;
    const Totals& total = found->second;
    const auto count = static_cast<double>(total.errors.size());
    const double simulated =
        simulated_speedup(cost, learned.coverage, find_policy(name, setup.options.plan.batching, arguments.chunk),
                          arguments.global_batch, total.batches);
    mean_ms[name] = total.own / count;
    last = name;
    speedup = total.base / total.own;
    share = speedup / simulated;
    fmt::print(
        "{:<20} {:>7} {:>8.1f} {:>8.3f}x {:>7.3f}x {:>9.3f}x {:>5.1f} % {:>10.4f} ({:.4f}) {:>7.0f} {:>8.1f} % "
        "{:>7.2f} %\n",
        name, total.errors.size(), total.own / count, speedup, median(total.ratios), simulated, 100 * share,
        total.covered / count, total.base_covered / count, total.budget / count, 100 * median(total.errors),
        100 * total.planning / total.own);
  }
  fmt::print("\nwhere the time goes, ms a step:\n{:<20} {:>8} {:>21} {:>18} {:>14}\n", "policy", "step",
             "its times, as planned", "the busiest stage", "that, planned");
  for (const std::string& name : policy_names(arguments)) {
    const auto found = totals.find(name);
    if (found == totals.end()) continue;
    const Totals& total = found->second;
    const auto count = static_cast<double>(total.errors.size());
    fmt::print("{:<20} {:>8.1f} {:>21.1f} {:>18.1f} {:>14.1f}\n", name, total.own / count, total.scheduled / count,
               total.busy / count, total.planned_busy / count);
  }
  fmt::print("\n{} over in_order: {:.3f} times, {:.1f} % of what the simulator says\n", last, speedup, 100 * share);
  bool met = arguments.at_least.empty() || std::abs(share - 1) <= kOfSimulated;
  for (const auto& [name, times] : arguments.at_least) {
    SB_USER_CHECK(mean_ms.contains(name) && mean_ms.contains(last), "--at-least: {} and {} were not both measured",
                  name, last);
    const double measured = mean_ms.at(name) / mean_ms.at(last);
    fmt::print("{} over {}: {:.3f} times, asked for {:.2f}\n", last, name, measured, times);
    met = met && measured >= times;
  }
  if (!arguments.at_least.empty())
    fmt::print("{}\n", met ? "all that was asked for is met" : "NOT all that was asked for is met");
  return met;
}

std::vector<std::string> words(const std::string& list) {
  std::istringstream in(list);
  std::vector<std::string> found;
  for (std::string word; std::getline(in, word, ',');) found.push_back(word);
  return found;
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
    else if (word == "--model")
      arguments.model = value();
    else if (word == "--pattern")
      arguments.pattern = value();
    else if (word == "--batches")
      arguments.batches = std::stoll(value());
    else if (word == "--out")
      arguments.out = value();
    else if (word == "--global-batch")
      arguments.global_batch = std::stoll(value());
    else if (word == "--chunk")
      arguments.chunk = std::stoll(value());
    else if (word == "--policies")
      arguments.policies = words(value());
    else if (word == "--at-least") {
      for (const std::string& one : words(value())) {
        const size_t colon = one.rfind(':');
        SB_USER_CHECK(colon != std::string::npos, "--at-least: POLICY:TIMES, for example in_order:1.3");
        arguments.at_least.emplace_back(one.substr(0, colon), std::stod(one.substr(colon + 1)));
      }
    } else if (word == "--profile")
      arguments.profile = value();
    else
      throw UserError("unknown argument {}", word);
  }
  if (arguments.policies.empty()) arguments.policies = policy_names(arguments);
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
    const int code = launch_local_ranks(2, std::vector<std::string>(argv, argv + argc)).exit_code;
    if (code != 0) return code;
  }
  return sum_up(arguments) ? 0 : 1;
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
