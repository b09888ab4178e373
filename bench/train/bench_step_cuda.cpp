// Training steps of Qwen2.5 shapes on CUDA, random weights and tokens: tokens/s, memory planned and taken,
// then the time of every class of operations at the step's sizes against its floor (FLOPs at the rate of a large
// product, bytes at the rate of a large copy, both measured in the same run). bench/peers/train_step_peers.py is the
// peer.
//   bench_step_cuda [0.5B|3B|7B|14B|all] [tokens] [--lora RANK] [--dropout P] [--budget N] [--pattern topk|mass]
//                   [--score planes|moments] [--recompute none|attention|layer|chunk] [--steps N] [--warm-up N]
//                   [--packed N] [--tokens-per-step N] [--loss-chunk N] [--layer-chunk N] [--offload N] [--chunk N]
//                   [--offload-optimizer] [--no-classes] [--measure-products] [--portable] [--fp8]
// A micro-batch is one sequence of `tokens` (8,192), or sequences of --packed tokens; --tokens-per-step makes a step of
// several micro-batches. `all` is 0.5B and 3B. --lora: adapters on all products, alpha twice the rank, dropout 0.05
// unless given, the model itself frozen. With a budget attention is sparse, with blocks of 128. --offload: layer inputs
// in host memory (-1: as many as needed). --chunk: the sequence in pieces of so many tokens. --offload-optimizer:
// values and moments in host memory. --portable: attention's portable kernels instead of the GPU's own. --fp8: the
// layers' products from e4m3 codes (the classes are those of bf16, with the rates of fp8 products beside them on
// Hopper).

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "attention/gpu/cuda_attention.h"
#include "bench/train/step_classes.h"
#include "bench/train/watched_attention.h"
#include "core/errors.h"
#include "core/random.h"
#include "device/context.h"
#include "device/cuda.h"
#include "device/cuda_products.h"
#include "device/event.h"
#include "device/memory.h"
#include "model/stage/stage.h"
#include "ops/adamw.h"
#include "parallel/host_optimizer_state.h"

namespace {

using namespace sb;

constexpr DType kType = DType::bf16;

struct Case {
  std::string name;
  ModelConfig config;
};

ModelConfig qwen(int64_t hidden, int64_t intermediate, int layers, int heads, int head_dim, int kv_heads = 2) {
  ModelConfig config;
  config.family = ModelConfig::Family::qwen2;
  config.vocab_size = 151936;
  config.hidden_size = hidden;
  config.intermediate_size = intermediate;
  config.layers = layers;
  config.heads = heads;
  config.kv_heads = kv_heads;
  config.head_dim = head_dim;
  config.rope.theta = 1e6;
  config.max_position_embeddings = 32768;
  config.tie_word_embeddings = hidden <= 2048;
  config.qkv_bias = true;
  return config;
}

// Normal-like numbers everywhere, fast: products of zeros would run too fast, and 3 billion exact normals take minutes.
constexpr int64_t kPattern = (1 << 20) + 7;

void randomize(const Exec& exec, ParameterSet& parameters) {
  Random random(1);
  // The gradients' memory serves where the values are not on the device.
  const TensorView values = parameters.has_values() ? parameters.values() : parameters.gradients();
  const int64_t pattern = std::min(kPattern, values.elements());
  const HostCopy start(TensorView(values.raw(), DType::f32, {pattern}, values.device()));
  for (int64_t i = 0; i < pattern; ++i) start.view().f32()[i] = static_cast<float>(0.02 * random.normal());
  start.store();
  repeat_start(exec, values, pattern);
  for (int i = 0; i < parameters.count(); ++i) {
    const Parameter& parameter = parameters.parameter(i);
    if (!parameter.name.ends_with("norm.weight")) continue;
    const HostCopy norm(values.rows(parameter.offset, parameter.offset + parameter.elements()));
    std::fill_n(norm.view().f32(), norm.view().elements(), 1.0f);
    norm.store();
  }
  round_parameters(exec, values, parameters.rounded_weights());
}

// The same of weights that are only kept rounded.
void randomize_rounded(const Exec& exec, ParameterSet& parameters) {
  Random random(2);
  std::vector<float> pattern(kPattern);
  for (float& value : pattern) value = static_cast<float>(0.02 * random.normal());
  parameters.store_rounded({"pattern", {kPattern}, 0, kPattern}, pattern.data());
  repeat_start(exec, parameters.rounded_weights(), kPattern);
  for (const FlatTensor& tensor : parameters.flat_tensors())
    if (tensor.name.ends_with("norm.weight"))
      parameters.store_rounded(tensor, std::vector<float>(static_cast<size_t>(tensor.end - tensor.begin), 1.0f).data());
}

MicroBatch random_batch(const ModelConfig& config, int64_t tokens, int64_t length, int64_t tokens_per_step,
                        uint64_t seed) {
  MicroBatch batch;
  Random random(seed);
  for (int64_t t = 0; t < tokens; ++t) {
    batch.tokens.push_back(static_cast<int32_t>(random.below(static_cast<uint64_t>(config.vocab_size))));
    batch.positions.push_back(static_cast<int32_t>(t % length));
    batch.labels.push_back(static_cast<int32_t>(random.below(static_cast<uint64_t>(config.vocab_size))));
    batch.weights.push_back(1.0f / static_cast<float>(tokens_per_step));
    if ((t + 1) % length != 0 && t + 1 < tokens) continue;
    batch.sequence_ids.push_back(batch.sequences());
    batch.cu_seqlens.push_back(static_cast<int32_t>(t + 1));
  }
  return batch;
}

struct Arguments {
  std::string model = "all";
  int64_t tokens = 8192;
  int64_t budget = 0;  // 0: dense
  std::string pattern = "topk", score = "planes";
  std::string recompute = "none";
  int steps = 10, warm_up = -1;  // -1: as many, at most 3
  int64_t packed = 0;            // 0: one sequence
  int64_t tokens_per_step = 0;   // 0: one micro-batch
  int64_t loss_chunk = 4096, layer_chunk = StageOptions().layer_chunk;
  int offload = -1;
  int64_t chunk = 0;  // 0: whole sequences
  bool offload_optimizer = false;
  LoraConfig lora;
  bool classes = true;
  bool measure_products = false;
  bool portable = false;
  bool fp8 = false;
};

Arguments parse_arguments(int argc, char** argv) {
  Arguments arguments;
  arguments.lora.dropout = 0.05;
  int place = 0;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const auto value = [&] {
      SB_USER_CHECK(i + 1 < argc, "{} needs a value", word);
      return std::string(argv[++i]);
    };
    if (word == "--budget")
      arguments.budget = std::stoll(value());
    else if (word == "--pattern")
      arguments.pattern = value();
    else if (word == "--score")
      arguments.score = value();
    else if (word == "--recompute")
      arguments.recompute = value();
    else if (word == "--steps")
      arguments.steps = std::stoi(value());
    else if (word == "--warm-up")
      arguments.warm_up = std::stoi(value());
    else if (word == "--packed")
      arguments.packed = std::stoll(value());
    else if (word == "--tokens-per-step")
      arguments.tokens_per_step = std::stoll(value());
    else if (word == "--loss-chunk")
      arguments.loss_chunk = std::stoll(value());
    else if (word == "--layer-chunk")
      arguments.layer_chunk = std::stoll(value());
    else if (word == "--offload")
      arguments.offload = std::stoi(value());
    else if (word == "--chunk")
      arguments.chunk = std::stoll(value());
    else if (word == "--offload-optimizer")
      arguments.offload_optimizer = true;
    else if (word == "--lora")
      arguments.lora.rank = std::stoi(value());
    else if (word == "--dropout")
      arguments.lora.dropout = std::stod(value());
    else if (word == "--no-classes")
      arguments.classes = false;
    else if (word == "--measure-products")
      arguments.measure_products = true;
    else if (word == "--fp8")
      arguments.fp8 = true;
    else if (word == "--portable")
      arguments.portable = true;
    else if (word.starts_with("-") || place > 1)
      throw UserError("{}: no such argument", word);
    else if (place++ == 0)
      arguments.model = word;
    else
      arguments.tokens = std::stoll(word);
  }
  SB_USER_CHECK(arguments.steps > 0 && arguments.tokens > 1, "steps and tokens must be positive");
  if (arguments.tokens_per_step == 0) arguments.tokens_per_step = arguments.tokens;
  SB_USER_CHECK(arguments.tokens_per_step % arguments.tokens == 0, "--tokens-per-step {} is no multiple of {} tokens",
                arguments.tokens_per_step, arguments.tokens);
  if (arguments.packed == 0) arguments.packed = arguments.tokens;
  SB_USER_CHECK(arguments.chunk == 0 || (arguments.packed == arguments.tokens && arguments.chunk % 128 == 0),
                "--chunk {}: a multiple of 128, without --packed", arguments.chunk);
  arguments.lora.alpha = 2.0 * arguments.lora.rank;
  if (!arguments.lora.enabled()) arguments.lora = {};
  if (arguments.lora.enabled()) arguments.classes = false;  // they are those of a model that is trained whole
  if (arguments.warm_up < 0) arguments.warm_up = std::min(arguments.steps, 3);
  return arguments;
}

// Which planes are taken does not matter for time.
LearnedSelection equal_energies(const ModelConfig& config) {
  const std::vector<double> ones(static_cast<size_t>(config.kv_heads) * static_cast<size_t>(config.head_dim), 1.0);
  const std::vector<double> zeros(ones.size());
  LearnedSelection learned;
  learned.planes.assign(static_cast<size_t>(config.layers), PlaneSums{1, ones, zeros, ones});
  return learned;
}

Recompute recompute_level(const std::string& name) {
  if (name == "none") return Recompute::none;
  if (name == "attention") return Recompute::attention;
  if (name == "chunk") return Recompute::chunk;
  SB_USER_CHECK(name == "layer", "--recompute {}: none, attention, layer or chunk", name);
  return Recompute::layer;
}

StageOptions stage_options(const ModelConfig& config, const Arguments& arguments) {
  StageOptions options;
  options.device = DeviceKind::cuda;
  options.dtype = kType;
  options.last_layer = config.layers;
  options.recompute = recompute_level(arguments.recompute);
  options.max_micro_batch_tokens = arguments.chunk > 0 ? arguments.chunk : arguments.tokens;
  options.max_sequence_length = arguments.packed;
  if (arguments.chunk > 0) {
    options.max_cut_sequence = arguments.tokens;
    options.slots = static_cast<int>((arguments.tokens + arguments.chunk - 1) / arguments.chunk);
  }
  options.with_values = !arguments.offload_optimizer;
  options.loss_chunk = arguments.loss_chunk;
  options.layer_chunk = arguments.layer_chunk;
  options.lora = arguments.lora;
  options.fp8 = arguments.fp8;
  return options;
}

// What the run will take; with options.offload as asked for, or as it has to be, and options.kept_codes as there is
// room.
MemoryPlan plan_memory(const ModelConfig& config, const Arguments& arguments, const Attention& attention, int64_t limit,
                       StageOptions& options) {
  const auto plan = [&](int offload) {
    options.offload = offload;
    MemoryPlan own = Stage::memory_plan(config, options, attention, 1);
    const int64_t elements = Stage::declare_parameters(config, options).flat_elements();
    if (arguments.offload_optimizer) {
      own.add("optimizer", HostOptimizerState::device_bytes(elements));
      own.add_on_host("optimizer, offloaded", HostOptimizerState::host_bytes(elements));
    } else {
      own.add("optimizer", 2 * own.items().front().bytes);
    }
    return own;
  };
  options.kept_codes = 0;
  const int offload = arguments.offload < 0 ? Stage::least_offload(options, limit, plan) : arguments.offload;
  const auto keeping = [&](int kept_codes) {
    options.kept_codes = kept_codes;
    return plan(offload);
  };
  return keeping(Stage::most_kept_codes(options, limit, keeping));
}

double gib(int64_t bytes) {
  return static_cast<double>(bytes) / static_cast<double>(int64_t{1} << 30);
}

// A micro-batch by itself, or its pieces forward and, in reverse, backward; the loss.
double run_micro_batch(const Exec& exec, Stage& stage, const MicroBatch& batch, std::span<const MicroBatch> pieces) {
  if (pieces.empty()) {
    stage.forward(exec, batch, 0, {});
    stage.backward(exec, batch, 0, {});
    return stage.loss(0).weighted;  // as the trainer reads it: while the device goes on
  }
  double loss = 0;
  const auto count = static_cast<int>(pieces.size());
  for (int i = 0; i < count; ++i) stage.forward(exec, pieces[static_cast<size_t>(i)], i, {});
  for (int i = count - 1; i >= 0; --i) {
    stage.backward(exec, pieces[static_cast<size_t>(i)], i, {});
    loss += stage.loss(i).weighted;
  }
  return loss;
}

// AdamW over all parameters, with values and moments on the device or in host memory.
class Optimizer {
 public:
  Optimizer(const Exec& exec, ParameterSet& parameters, bool on_host)
      : parameters_(parameters),
        arena_(make_arena("optimizer", (on_host ? 0 : 2 * Arena::rounded(parameters.flat_bytes())) + 64,
                          DeviceKind::cuda)) {
    const Shape all{parameters.flat_elements()};
    if (on_host) host_ = std::make_unique<HostOptimizerState>(all.elements(), DeviceKind::cuda);
    clip_ = arena_.allocate(DType::f32, {2});
    for (TensorView* moment : {&m_, &v_}) {
      if (on_host) continue;
      *moment = arena_.allocate(DType::f32, all);
      zero_tensor(exec, *moment);
    }
    if (on_host) {
      // What the weights were rounded from.
      const HostCopy values(parameters.gradients());
      std::copy_n(values.view().f32(), all.elements(), host_->values().f32());
    }
  }

  void update(const Exec& exec, int64_t number) {
    const AdamWStep step{1e-5f, 0.9f, 0.95f, 1e-8f, 0.1f, number, 1.0f};
    clip_by_norm(exec, parameters_.gradients(), 1.0, clip_);
    parameters_.weights_changed();
    const auto range = [&](int64_t begin, int64_t end, const TensorView& values, const TensorView& m,
                           const TensorView& v) {
      std::vector<DecayRange> ranges;
      for (int i = 0; i < parameters_.count(); ++i) {
        const Parameter& own = parameters_.parameter(i);
        const int64_t from = std::max(begin, own.offset), to = std::min(end, own.offset + own.elements());
        if (from < to) ranges.push_back({from - begin, to - begin, own.decay});
      }
      adamw_update(exec, step, ranges,
                   {values, parameters_.gradients().rows(begin, end), m, v,
                    parameters_.rounded_weights().rows(begin, end), clip_});
    };
    const int64_t elements = parameters_.flat_elements();
    if (!host_) return range(0, elements, parameters_.values(), m_, v_);
    host_->update(exec, 0, elements, [&](const HostOptimizerState::Window& window) {
      range(window.begin, window.end, window.values, window.first_moment, window.second_moment);
    });
  }

 private:
  ParameterSet& parameters_;
  std::unique_ptr<HostOptimizerState> host_;
  Arena arena_;
  TensorView clip_, m_, v_;
};

double measure_step(const DeviceContext& context, const Case& c, const Arguments& arguments,
                    WatchedAttention& attention, std::span<const MicroBatch> batches) {
  const Exec& exec = context.exec();
  const int64_t free_before = cuda::device_info().free_bytes;
  StageOptions options = stage_options(c.config, arguments);
  constexpr int64_t kOutsideThePlan = int64_t{1} << 30;  // kernels, attention's work lists
  const MemoryPlan plan = plan_memory(c.config, arguments, attention, free_before - kOutsideThePlan, options);
  fmt::print("{}  {} layer inputs in host memory\n", plan.table(free_before), options.offload);
  std::fflush(stdout);
  plan.check_fits(free_before, "fewer tokens, or --recompute layer");
  Stage stage(c.config, options, attention, 1);
  ParameterSet& parameters = stage.parameters();
  randomize(exec, parameters);
  if (arguments.lora.enabled()) randomize_rounded(exec, stage.frozen_parameters());
  Optimizer optimizer(exec, parameters, arguments.offload_optimizer);
  std::vector<std::vector<MicroBatch>> pieces(batches.size());
  for (size_t i = 0; i < batches.size() && arguments.chunk > 0; ++i)
    for (int64_t begin = 0; begin < arguments.tokens; begin += arguments.chunk)
      pieces[i].push_back(cut_piece(batches[i], begin, std::min(begin + arguments.chunk, arguments.tokens)));
  const int64_t micro_batches = arguments.tokens_per_step / arguments.tokens;

  const int warm_up = arguments.warm_up, steps = arguments.steps;
  std::vector<DeviceEvent> borders;
  for (int i = 0; i <= warm_up + steps; ++i) borders.emplace_back(DeviceKind::cuda);
  double first_loss = 0, last_loss = 0;
  borders[0].record(exec);
  for (int step = 1; step <= warm_up + steps; ++step) {
    if (step == warm_up + 1) attention.restart();
    parameters.begin_gradients(exec);
    last_loss = 0;
    // One micro-batch is enough to warm up.
    for (int64_t i = 0; i < (step <= warm_up ? 1 : micro_batches); ++i) {
      const size_t which = static_cast<size_t>(i) % batches.size();
      last_loss += run_micro_batch(exec, stage, batches[which], pieces[which]);
    }
    optimizer.update(exec, step);
    borders[static_cast<size_t>(step)].record(exec);
    if (step == warm_up + 1) first_loss = last_loss;
  }
  context.synchronize();
  const int64_t taken = free_before - cuda::device_info().free_bytes;
  std::vector<double> times;
  for (int i = warm_up; i < warm_up + steps; ++i)
    times.push_back(
        DeviceEvent::milliseconds_between(borders[static_cast<size_t>(i)], borders[static_cast<size_t>(i) + 1]));
  fmt::print("  steps {:.2f} to {:.2f} ms; loss {:.4f} to {:.4f}\n", *std::min_element(times.begin(), times.end()),
             *std::max_element(times.begin(), times.end()), first_loss, last_loss);
  double all = 0, of_attention = 0;
  for (const double time : times) all += time;
  const auto spent = attention.milliseconds();
  for (const double time : spent) of_attention += time;
  fmt::print("  attention with selection: {:.1f} ms forward, {:.1f} recomputed, {:.1f} backward: {:.1f} % of a step\n",
             spent[WatchedAttention::kForward] / steps, spent[WatchedAttention::kRecomputed] / steps,
             spent[WatchedAttention::kBackward] / steps, 100 * of_attention / all);
  fmt::print("  memory: {:.2f} GiB planned, {:.2f} taken (cudaMemGetInfo): {:+.1f} %\n", gib(plan.total()), gib(taken),
             100.0 * (static_cast<double>(plan.total()) / static_cast<double>(taken) - 1));
  return median(times);
}

}  // namespace

int main(int argc, char** argv) try {
  const Arguments arguments = parse_arguments(argc, argv);
  const int64_t tokens = arguments.tokens;
  const bool measure = arguments.measure_products;
  if (!cuda::problem().empty()) {
    fmt::print("no GPU: {}\n", cuda::problem());
    return 1;
  }
  ThreadPool pool(1);
  DeviceContext context(DeviceKind::cuda, pool, norm_scratch_bytes(DeviceKind::cuda));
  context.exec().products->measure_algorithms(measure);
  const cuda::DeviceInfo info = cuda::device_info();
  const Ceilings ceilings = measure_ceilings(context.exec());
  fmt::print("{}: product of 8192^3 {:.0f} TFLOP/s, copy {:.2f} TB/s; {}\n", info.name, ceilings.flops * 1e-12,
             ceilings.bytes * 1e-12, measure ? "products by measurement" : "products by cuBLASLt's proposals");
  std::vector<std::string> results;
  for (const Case& c :
       {Case{"0.5B", qwen(896, 4864, 24, 14, 64)}, Case{"3B", qwen(2048, 11008, 36, 16, 128)},
        Case{"7B", qwen(3584, 18944, 28, 28, 128, 4)}, Case{"14B", qwen(5120, 13824, 48, 40, 128, 8)}}) {
    const bool of_all = c.name == "0.5B" || c.name == "3B";
    if (arguments.model != c.name && !(arguments.model == "all" && of_all)) continue;
    const std::string attention_name =
        (arguments.budget > 0 ? fmt::format("{} by {}, budget {}", arguments.pattern, arguments.score, arguments.budget)
                              : std::string("dense")) +
        (arguments.portable ? ", portable kernels" : "") +
        (arguments.lora.enabled() ? fmt::format(", adapters of rank {}", arguments.lora.rank) : "");
    fmt::print("Qwen2.5-{}, {} tokens, bf16, recompute {}, attention {}\n", c.name, tokens, arguments.recompute,
               attention_name);
    CudaAttentionOptions options;
    SelectionConfig& selection = options.attention.selection;
    selection.pattern = arguments.budget > 0 ? parse_selection_pattern(arguments.pattern) : SelectionPattern::dense;
    selection.score = parse_block_score(arguments.score);
    if (arguments.budget > 0) selection.budget = arguments.budget;
    options.attention.layers = c.config.layers;
    options.portable = arguments.portable;
    const auto attention = make_cuda_attention(options);
    attention->use(equal_energies(c.config));
    std::vector<MicroBatch> batches;
    for (uint64_t seed : {7, 8})
      batches.push_back(random_batch(c.config, tokens, arguments.packed, arguments.tokens_per_step, seed));
    WatchedAttention watched(*attention);
    const double step = measure_step(context, c, arguments, watched, batches);
    std::vector<ClassTime> classes;
    if (arguments.classes)
      classes = measure_classes(context.exec(), c.config, batches.front(), arguments.loss_chunk, ceilings, *attention);
    double sum = 0, floor = 0;
    for (const ClassTime& time : classes) {
      fmt::print("  {:<40} {:8.2f} ms, floor {:8.2f}: {:5.2f} x\n", time.name, time.milliseconds, time.floor,
                 time.milliseconds / time.floor);
      sum += time.milliseconds;
      floor += time.floor;
    }
    if (arguments.classes)
      fmt::print("  {:<40} {:8.2f} ms, floor {:8.2f}; the step takes {:.2f} ms\n", "sum", sum, floor, step);
    const double rate = static_cast<double>(arguments.tokens_per_step) / step * 1e3;
    results.push_back(
        fmt::format("Qwen2.5-{} at {}, {}: {:.0f} ms, {:.0f} tokens/s", c.name, tokens, attention_name, step, rate));
    if (arguments.tokens_per_step > tokens)
      results.back() += fmt::format(" ({} tokens per step)", arguments.tokens_per_step);
    if (arguments.chunk > 0)
      results.back() += fmt::format(", pieces of {}, recompute {}", arguments.chunk, arguments.recompute);
    if (arguments.offload_optimizer) results.back() += ", values and moments in host memory";
    if (arguments.packed < tokens) results.back() += fmt::format(", sequences of {}", arguments.packed);
    if (arguments.fp8) results.back() += ", fp8";
  }
  for (const std::string& line : results) fmt::print("{}\n", line);
} catch (const std::exception& failure) {
  fmt::print(stderr, "error: {}\n", failure.what());
  return 1;
}
