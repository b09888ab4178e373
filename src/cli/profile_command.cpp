#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstring>
#include <ctime>
#include <fstream>
#include <memory>
#include <numeric>
#include <thread>

#include "attention/sparse_attention.h"
#include "balance/profile_measure.h"
#include "cli/commands.h"
#include "core/errors.h"
#include "core/random.h"
#include "core/thread_pool.h"
#include "model/stage.h"
#include "train/balanced_planner_config.h"
#include "train/training_run.h"

namespace sb {
namespace {

struct Arguments {
  std::string model = "qwen2-25m", run, out = "profile.json", recompute = "attention";
  AttentionSpec spec;
  MeasureOptions measure;
  int threads = 0, layers = 3;
  bool tokens_given = false, threads_given = false;
};

using Clock = std::chrono::steady_clock;
double microseconds_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

// Passes everything on and takes the time. Forward runs twice when the parts are wanted: once with selection, once with
// the choices of the first run.
class TimedAttention final : public Attention {
 public:
  explicit TimedAttention(Attention& inner) : inner_(inner) {}
  std::unique_ptr<AttentionState> make_state() const override { return inner_.make_state(); }
  void forward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
               const AttentionOperands& operands, AttentionState& state, bool replay) override {
    auto begin = Clock::now();
    inner_.forward(exec, layer, shape, sequences, operands, state, replay);
    const double first = microseconds_since(begin);
    if (!parts) return;
    begin = Clock::now();
    inner_.forward(exec, layer, shape, sequences, operands, state, true);
    const double again = microseconds_since(begin);
    spent_forward += first + again;
    attention_forward += again;
    selection += std::max(0.0, first - again);
  }
  void backward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
                const AttentionOperands& operands, const AttentionGradients& gradients,
                AttentionState& state) override {
    const auto begin = Clock::now();
    inner_.backward(exec, layer, shape, sequences, operands, gradients, state);
    attention_backward += microseconds_since(begin);
  }
  int64_t scratch_bytes(const AttentionShape& shape, int64_t max_tokens, int threads) const override {
    return inner_.scratch_bytes(shape, max_tokens, threads);
  }
  int64_t state_bytes(const AttentionShape& shape, int64_t max_tokens) const override {
    return inner_.state_bytes(shape, max_tokens);
  }

  void reset() { spent_forward = attention_forward = attention_backward = selection = 0; }
  bool parts = true;
  double spent_forward = 0, attention_forward = 0, attention_backward = 0, selection = 0;

 private:
  Attention& inner_;
};

ModelConfig model_of(const ModelShape& shape, int layers) {
  ModelConfig config;
  config.vocab_size = shape.vocabulary;
  config.hidden_size = shape.hidden;
  config.intermediate_size = shape.intermediate;
  config.layers = layers;
  config.heads = static_cast<int>(shape.heads);
  config.kv_heads = static_cast<int>(shape.kv_heads);
  config.head_dim = static_cast<int>(shape.head_dim);
  config.tie_word_embeddings = shape.tied;
  config.qkv_bias = true;
  return config;
}

SparseAttention::Options attention_options(const AttentionSpec& spec, int layers) {
  SparseAttention::Options options;
  options.selection.block = static_cast<int>(spec.block);
  options.selection.query_block = static_cast<int>(spec.query_block);
  options.selection.budget = spec.budget;
  options.selection.sink_blocks = static_cast<int>(spec.sink_blocks);
  options.selection.local_blocks = static_cast<int>(spec.local_blocks);
  options.selection.dense_below = 0;  // the shapes say themselves what is dense
  options.layers = layers;
  return options;
}

// A few layers of the model, with and without its ends.
class Engine {
 public:
  Engine(const ModelShape& shape, const Arguments& arguments, int layers)
      : config_(model_of(shape, layers)),
        sparse_(attention_options(arguments.spec, layers)),
        attention_(sparse_),
        pool_(arguments.threads > 0 ? arguments.threads : available_cores()),
        layers_(layers) {
    StageOptions options;
    options.recompute = arguments.recompute == "none"    ? Recompute::none
                        : arguments.recompute == "layer" ? Recompute::layer
                                                         : Recompute::attention;
    options.max_micro_batch_tokens = options.max_sequence_length = arguments.measure.max_tokens;
    options.last_layer = layers;
    whole_ = std::make_unique<Stage>(config_, options, attention_, pool_.threads());
    whole_->initialize(1);
    options.first_layer = 1;
    options.last_layer = layers - 1;
    middle_ = std::make_unique<Stage>(config_, options, attention_, pool_.threads());
    middle_->initialize(1);
    const int64_t elements = arguments.measure.max_tokens * shape.hidden;
    memory_ = std::make_unique<Arena>("profile", 2 * Arena::rounded(elements * 4));
    input_ = memory_->allocate(DType::f32, {arguments.measure.max_tokens, shape.hidden});
    gradient_ = memory_->allocate(DType::f32, {arguments.measure.max_tokens, shape.hidden});
    Random random(7);
    for (TensorView view : {input_, gradient_})
      for (int64_t i = 0; i < elements; ++i) view.f32()[i] = static_cast<float>(random.uniform() - 0.5);
    exec_.pool = &pool_;
  }

  int layers() const { return layers_; }
  int threads() const { return pool_.threads(); }

  MeasuredTimes parts(const MeasuredShape& shape) {
    const MicroBatch batch = micro_batch(shape);
    const int64_t tokens = batch.size();
    MeasuredTimes times;
    attention_.parts = true;
    // Layers alone.
    attention_.reset();
    const int inner = layers_ - 2;
    const Shape rows{tokens, config_.hidden_size};
    auto begin = Clock::now();
    middle_->forward(exec_, batch, 0, TensorView(input_.f32(), rows));
    double forward = microseconds_since(begin) - attention_.spent_forward;
    begin = Clock::now();
    middle_->backward(exec_, batch, 0, TensorView(gradient_.f32(), rows));
    double backward = microseconds_since(begin) - attention_.attention_backward;
    times.linear_forward = forward / inner;
    times.linear_backward = backward / inner;
    times.attention_forward = attention_.attention_forward / inner;
    times.attention_backward = attention_.attention_backward / inner;
    times.selection = attention_.selection / inner;
    // With embedding and loss.
    attention_.reset();
    begin = Clock::now();
    whole_->forward(exec_, batch, 0, {});
    forward = microseconds_since(begin) - attention_.spent_forward;
    begin = Clock::now();
    whole_->backward(exec_, batch, 0, {});
    backward = microseconds_since(begin) - attention_.attention_backward;
    times.head_forward = std::max(0.0, forward - layers_ * times.linear_forward);
    times.head_backward = std::max(0.0, backward - layers_ * times.linear_backward);
    return times;
  }

  double whole(const MeasuredShape& shape) {
    const MicroBatch batch = micro_batch(shape);
    attention_.parts = false;
    const auto begin = Clock::now();
    whole_->forward(exec_, batch, 0, {});
    whole_->backward(exec_, batch, 0, {});
    return microseconds_since(begin);
  }

  // Between ranks of one process: a copy, and a sum of two buffers.
  double transfer(int64_t bytes) {
    std::vector<char> from(static_cast<size_t>(bytes), 1), to(static_cast<size_t>(bytes));
    const auto begin = Clock::now();
    std::memcpy(to.data(), from.data(), from.size());
    const double us = microseconds_since(begin);
    SB_CHECK(to.back() == 1);
    return us;
  }
  double reduction(int64_t bytes) {
    std::vector<float> sum(static_cast<size_t>(bytes / 4), 1.0f), more(sum.size(), 2.0f);
    const auto begin = Clock::now();
    pool_.parallel_slices(std::ssize(sum), [&](int64_t first, int64_t last, int) {
      for (int64_t i = first; i < last; ++i) sum[static_cast<size_t>(i)] += more[static_cast<size_t>(i)];
    });
    const double us = microseconds_since(begin);
    SB_CHECK(sum.back() == 3.0f);
    return us;
  }

 private:
  MicroBatch micro_batch(const MeasuredShape& shape) const {
    MicroBatch batch;
    Random random(11);
    for (size_t i = 0; i < shape.tokens.size(); ++i) {
      for (int64_t t = 0; t < shape.tokens[i]; ++t) {
        batch.tokens.push_back(static_cast<int32_t>(random.below(static_cast<uint64_t>(config_.vocab_size))));
        batch.labels.push_back(static_cast<int32_t>(random.below(static_cast<uint64_t>(config_.vocab_size))));
        batch.positions.push_back(static_cast<int32_t>(t));
        batch.weights.push_back(1e-4f);
      }
      batch.cu_seqlens.push_back(static_cast<int32_t>(batch.tokens.size()));
      batch.sequence_ids.push_back(static_cast<int64_t>(i));
    }
    for (int l = 0; l < layers_; ++l)
      for (int64_t budget : shape.budgets) batch.budgets.push_back(static_cast<int32_t>(budget));
    return batch;
  }

  ModelConfig config_;
  SparseAttention sparse_;
  TimedAttention attention_;
  ThreadPool pool_;
  int layers_;
  std::unique_ptr<Stage> whole_, middle_;
  std::unique_ptr<Arena> memory_;
  TensorView input_, gradient_;
  Exec exec_;
};

std::string machine_name(int threads) {
  std::ifstream info("/proc/cpuinfo");
  std::string line, name = "unknown processor";
  while (std::getline(info, line))
    if (line.starts_with("model name")) {
      name = line.substr(line.find(':') + 2);
      break;
    }
  return fmt::format("{}, {} threads", name, threads);
}

std::string today() {
  const std::time_t now = std::time(nullptr);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  return text;
}

// Everything that a run's latencies depend on, as its configuration has it.
ModelShape take_from_run(Arguments& arguments) {
  // What is about to be measured need not have a name yet.
  const RunConfig config = load_run_config(arguments.run, {"balance.profile=h200-analytic"});
  SB_USER_CHECK(
      config.device == DeviceKind::cpu,
      "{}: device: cuda: only the CPU is measured so far; set balance.profile: h200-analytic (or h100-analytic, "
      "a100-analytic) instead",
      arguments.run);
  arguments.spec = attention_spec(config);
  arguments.recompute = config.train.recompute == Recompute::none    ? "none"
                        : config.train.recompute == Recompute::layer ? "layer"
                                                                     : "attention";
  if (!arguments.tokens_given)
    arguments.measure.max_tokens = packing_limits(config.batch, config.data.max_sequence_length).max_tokens;
  // Ranks of one machine share its cores.
  const int ranks = config.parallel.dp * config.parallel.pp * config.parallel.cp;
  if (!arguments.threads_given)
    arguments.threads = config.train.threads > 0 ? config.train.threads : std::max(1, available_cores() / ranks);
  arguments.model = arguments.run;
  return model_shape(run_model_config(config));
}

void run(Arguments arguments) {
  const ModelShape shape = arguments.run.empty() ? find_model_shape(arguments.model) : take_from_run(arguments);
  SB_USER_CHECK(arguments.layers >= 3,
                "--layers: three layers or more are needed to tell them from embedding and loss");
  arguments.spec.dense_below = 0;
  arguments.measure.spec = arguments.spec;
  // A layer costs the same in a model of fewer.
  const int layers = static_cast<int>(std::clamp<int64_t>(shape.layers, 3, arguments.layers));
  Engine engine(shape, arguments, layers);
  MeasureTarget target;
  target.parts = [&](const MeasuredShape& s) { return engine.parts(s); };
  target.whole = [&](const MeasuredShape& s) { return engine.whole(s); };
  target.transfer = [&](int64_t bytes) { return engine.transfer(bytes); };
  target.reduction = [&](int64_t bytes) { return engine.reduction(bytes); };
  target.layers = engine.layers();
  const bool terminal = isatty(STDERR_FILENO) != 0;
  const auto begin = Clock::now();
  arguments.measure.progress = [&](int done, int total, const std::string& what) {
    if (!terminal) return;
    const int filled = 30 * done / std::max(1, total);
    const double spent = microseconds_since(begin) / 1e6;
    // Small shapes come first, so the rest is guessed only when there is something to guess from.
    const std::string left = 4 * done >= total ? fmt::format("about {:.0f} s left", spent * (total - done) / done)
                                               : fmt::format("{:.0f} s", spent);
    fmt::print(stderr, "\r[{:<30}] {:>3} %  {:<16} {:<48}", std::string(static_cast<size_t>(std::min(filled, 30)), '#'),
               100 * done / std::max(1, total), left, what);
  };
  Profile profile = measure_profile(shape, target, arguments.measure);
  if (terminal) fmt::print(stderr, "\n");
  profile.name = arguments.out;
  profile.machine = machine_name(engine.threads());
  profile.date = today();
  profile.recompute = arguments.recompute;
  profile.gpus_per_node = engine.threads();
  std::ofstream file(arguments.out, std::ios::binary);
  file << write_profile(profile);
  file.flush();
  SB_USER_CHECK(file.good(), "{}: cannot be written", arguments.out);
  fmt::print("{}: {}\n{}, {} layers measured in {:.0f} s\n", arguments.model, describe(shape), profile.machine, layers,
             microseconds_since(begin) / 1e6);
  fmt::print("error on {} held-out micro-batches: median {:.1f} %, p95 {:.1f} %\nwritten to {}\n",
             profile.held_out.count, 100 * profile.held_out.median, 100 * profile.held_out.p95, arguments.out);
}

}  // namespace

void add_profile_command(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("profile", "measure this machine for a model shape, so that latencies can be predicted");
  auto a = std::make_shared<Arguments>();
  a->spec.budget = 1024;
  command->add_option("--model", a->model, "name, or config.json")->capture_default_str();
  command
      ->add_option("--run", a->run, "run.yaml: model, budget, blocks, recompute, longest micro-batch and threads of it")
      ->check(CLI::ExistingFile);
  command->add_option("--out", a->out, "file to write")->capture_default_str();
  command->add_option("--max-tokens", a->measure.max_tokens, "largest micro-batch to measure")->capture_default_str();
  command->add_option("--budget", a->spec.budget, "base budget of the run, keys per query")->capture_default_str();
  command->add_option("--block", a->spec.block, "tokens a key block")->capture_default_str();
  command->add_option("--query-block", a->spec.query_block, "tokens a query block")->capture_default_str();
  command->add_option("--recompute", a->recompute, "none, attention or layer, as the run will have it")
      ->check(CLI::IsMember({"none", "attention", "layer"}))
      ->capture_default_str();
  command->add_option("--layers", a->layers, "layers to build; the rest follows by multiplication")
      ->capture_default_str();
  command->add_option("--threads", a->threads, "0: all cores")->capture_default_str();
  command->add_option("--held-out", a->measure.held_out, "random micro-batches to check with")->capture_default_str();
  command->add_option("--repeats", a->measure.max_repeats, "most repeats of a measurement")->capture_default_str();
  command->callback([a, command] {
    a->tokens_given = command->count("--max-tokens") > 0;
    a->threads_given = command->count("--threads") > 0;
    run(*a);
  });
}

}  // namespace sb
