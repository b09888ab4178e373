// One training step of Qwen2.5-0.5B and 3B shapes over one sequence of 8,192 tokens on CUDA, random weights: tokens/s,
// then the time of every class of operations at the step's sizes against its floor (FLOPs at the rate of a large
// product, bytes at the rate of a large copy, both measured in the same run). bench/peers/train_step_peers.py is the
// peer.
//   bench_step_cuda [0.5B|3B|all] [tokens] [--budget N] [--recompute none|attention|layer] [--steps N] [--no-classes]
//                   [--measure-products]
// With a budget attention is sparse: topk, blocks of 128.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "attention/cuda/cuda_attention.h"
#include "core/errors.h"
#include "core/random.h"
#include "device/context.h"
#include "device/cuda.h"
#include "device/cuda_products.h"
#include "device/event.h"
#include "device/memory.h"
#include "model/stage.h"
#include "ops/adamw.h"
#include "ops/embedding.h"
#include "ops/linear.h"
#include "ops/rmsnorm.h"
#include "ops/rope.h"
#include "ops/swiglu.h"

namespace {

using namespace sb;

constexpr int64_t kLossChunk = 4096;
constexpr DType kType = DType::bf16;

struct Case {
  std::string name;
  ModelConfig config;
  double peer;    // tokens/s of Hugging Face + PyTorch at 8,192 tokens (docs/results/engine-cuda.md)
  double target;  // times the peer
};

ModelConfig qwen(int64_t hidden, int64_t intermediate, int layers, int heads, int head_dim) {
  ModelConfig config;
  config.family = ModelConfig::Family::qwen2;
  config.vocab_size = 151936;
  config.hidden_size = hidden;
  config.intermediate_size = intermediate;
  config.layers = layers;
  config.heads = heads;
  config.kv_heads = 2;
  config.head_dim = head_dim;
  config.rope.theta = 1e6;
  config.max_position_embeddings = 32768;
  config.tie_word_embeddings = true;
  config.qkv_bias = true;
  return config;
}

// Normal-like numbers everywhere, fast: products of zeros would run too fast, and 3 billion exact normals take minutes.
void randomize(ParameterSet& parameters) {
  constexpr int64_t kPattern = (1 << 20) + 7;
  std::vector<float> pattern(static_cast<size_t>(kPattern));
  Random random(1);
  for (float& value : pattern) value = static_cast<float>(0.02 * random.normal());
  const HostCopy values = parameters.host_values();
  for (int i = 0; i < parameters.count(); ++i) {
    const TensorView value = parameters.part(values.view(), i);
    const bool norm = parameters.parameter(i).name.ends_with("norm.weight");
    for (int64_t e = 0; e < value.elements(); e += kPattern) {
      std::copy_n(pattern.begin(), std::min(kPattern, value.elements() - e), value.f32() + e);
    }
    if (norm) std::fill_n(value.f32(), value.elements(), 1.0f);
  }
  parameters.store_values(values);
}

MicroBatch random_batch(const ModelConfig& config, int64_t tokens) {
  MicroBatch batch;
  Random random(7);
  for (int64_t t = 0; t < tokens; ++t) {
    batch.tokens.push_back(static_cast<int32_t>(random.below(static_cast<uint64_t>(config.vocab_size))));
    batch.positions.push_back(static_cast<int32_t>(t));
    batch.labels.push_back(static_cast<int32_t>(random.below(static_cast<uint64_t>(config.vocab_size))));
    batch.weights.push_back(1.0f / static_cast<float>(tokens));
  }
  batch.cu_seqlens = {0, static_cast<int32_t>(tokens)};
  batch.sequence_ids = {0};
  return batch;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Median milliseconds of `body` on the stream.
double timed(const Exec& exec, int runs, const std::function<void()>& body) {
  std::vector<double> times;
  DeviceEvent begin(DeviceKind::cuda), end(DeviceKind::cuda);
  for (int i = 0; i <= runs; ++i) {
    begin.record(exec);
    body();
    end.record(exec);
    end.wait();
    if (i > 0) times.push_back(DeviceEvent::milliseconds_between(begin, end));
  }
  return median(times);
}

// What this GPU gives: FLOP/s of a bf16 product of 8192³, bytes/s of a copy (read and written).
struct Ceilings {
  double flops, bytes;
};

void fill_noise(const Exec& exec, TensorView tensor) {
  // bf16 bits of numbers between ±1 and ±2, from a short pattern.
  const HostCopy copy(tensor);
  Random random(3);
  std::vector<uint16_t> pattern(65537);
  for (uint16_t& value : pattern) value = static_cast<uint16_t>(random.below(2) << 15 | 0x3f80 | random.below(128));
  auto* bits = static_cast<uint16_t*>(copy.view().raw());
  for (int64_t i = 0; i < tensor.elements(); ++i) bits[i] = pattern[static_cast<size_t>(i % 65537)];
  copy.store();
}

Ceilings measure_ceilings(const Exec& exec) {
  constexpr int64_t kSize = 8192, kBytes = int64_t{2} << 30;
  Arena arena = make_arena("ceilings", 3 * Arena::rounded(kSize * kSize * 2) + 2 * kBytes, DeviceKind::cuda);
  const Shape square = {kSize, kSize};
  const TensorView a = arena.allocate(kType, square), b = arena.allocate(kType, square),
                   c = arena.allocate(kType, square);
  fill_noise(exec, a);
  fill_noise(exec, b);
  const double product = timed(exec, 10, [&] { linear_forward(exec, a, b, {}, c); });
  const TensorView from = arena.allocate(DType::f32, {kBytes / 4}), to = arena.allocate(DType::f32, {kBytes / 4});
  const double copy = timed(exec, 10, [&] { copy_tensor(exec, from, to); });
  return {2.0 * kSize * kSize * kSize / product * 1e3, 2.0 * kBytes / copy * 1e3};
}

struct ClassTime {
  std::string name;
  double milliseconds, floor;
};

// The classes of operations, each at the sizes and as often as one step has them.
class ClassBench {
 public:
  ClassBench(const Exec& exec, const ModelConfig& config, int64_t tokens, const Ceilings& ceilings)
      : exec_(exec),
        config_(config),
        tokens_(tokens),
        ceilings_(ceilings),
        arena_(make_arena("classes", 24'000'000'000, DeviceKind::cuda)),
        scratch_(make_arena("scratch", 6'000'000'000, DeviceKind::cuda)) {
    exec_.scratch = &scratch_;
  }

  std::vector<ClassTime> run(Attention& attention) {
    std::vector<ClassTime> times;
    times.push_back(products());
    attention_class(attention, times);
    times.push_back(passes());
    times.push_back(loss());
    times.push_back(embedding());
    times.push_back(optimizer());
    return times;
  }

 private:
  TensorView noise(Shape shape) {
    const TensorView tensor = arena_.allocate(kType, shape);
    fill_noise(exec_, tensor);
    return tensor;
  }
  TensorView floats(Shape shape) {
    const TensorView tensor = arena_.allocate(DType::f32, shape);
    zero_tensor(exec_, tensor);
    return tensor;
  }
  double flops_floor(double flops) const { return flops / ceilings_.flops * 1e3; }
  double bytes_floor(double bytes) const { return bytes / ceilings_.bytes * 1e3; }

  ClassTime products() {
    const ArenaScope scope(arena_);
    const int64_t h = config_.hidden_size, i = config_.intermediate_size, q = int64_t{config_.heads} * config_.head_dim,
                  kv = int64_t{config_.kv_heads} * config_.head_dim;
    double milliseconds = 0, flops = 0;
    fmt::print("  products: {:>24} {:>9} {:>9} {:>9}  TFLOP/s forward, input, weight\n", "tokens x in x out", "", "",
               "");
    for (const auto& [in, out, bias] :
         {std::tuple<int64_t, int64_t, bool>{h, q + 2 * kv, true}, {q, h, false}, {h, 2 * i, false}, {i, h, false}}) {
      const ArenaScope inner(arena_);
      const TensorView x = noise({tokens_, in}), w = noise({out, in}), b = noise({out}), y = noise({tokens_, out}),
                       dx = noise({tokens_, in}), dw = floats({out, in}), db = floats({out});
      const TensorView bias_or_none = bias ? b : TensorView(), residual = out == h ? y : TensorView();
      const double one = 2.0 * static_cast<double>(tokens_) * static_cast<double>(in) * static_cast<double>(out);
      const double forward = timed(exec_, 20, [&] { linear_forward(exec_, x, w, bias_or_none, y, residual); });
      const double input = timed(exec_, 20, [&] { linear_backward_input(exec_, y, w, dx); });
      const double weight =
          timed(exec_, 20, [&] { linear_backward_weight(exec_, x, y, dw, bias ? db : TensorView()); });
      fmt::print("  {:>34} {:9.0f} {:9.0f} {:9.0f}\n", fmt::format("{} x {} x {}", tokens_, in, out),
                 one / forward / 1e9, one / input / 1e9, one / weight / 1e9);
      milliseconds += forward + input + weight;
      flops += 3 * one;
    }
    return {"products of the layers", config_.layers * milliseconds, config_.layers * flops_floor(flops)};
  }

  void attention_class(Attention& attention, std::vector<ClassTime>& times) {
    const ArenaScope scope(arena_);
    const int d = config_.head_dim;
    const AttentionShape shape = {config_.heads, config_.kv_heads, d, static_cast<float>(1 / std::sqrt(d))};
    const Shape wide = {tokens_, config_.heads, d}, narrow = {tokens_, config_.kv_heads, d};
    const AttentionOperands operands = {noise(wide), noise(narrow), noise(narrow), noise(wide),
                                        floats({config_.heads, tokens_})};
    const AttentionGradients gradients = {noise(wide), noise(wide), noise(narrow), noise(narrow)};
    const std::vector<int32_t> cu_seqlens = {0, static_cast<int32_t>(tokens_)};
    const PackedSequences sequences = {cu_seqlens, {}};
    const auto state = attention.make_state();
    const double forward =
        timed(exec_, 20, [&] { attention.forward(exec_, 0, shape, sequences, operands, *state, false); });
    const double backward =
        timed(exec_, 20, [&] { attention.backward(exec_, 0, shape, sequences, operands, gradients, *state); });
    const double flops =
        4.0 * d * config_.heads * 0.5 * static_cast<double>(tokens_) * static_cast<double>(tokens_ + 1);
    times.push_back({fmt::format("attention forward ({:.0f} TFLOP/s)", flops / forward / 1e9), config_.layers * forward,
                     config_.layers * flops_floor(flops)});
    times.push_back({fmt::format("attention backward ({:.0f} TFLOP/s)", 2.5 * flops / backward / 1e9),
                     config_.layers * backward, config_.layers * flops_floor(2.5 * flops)});
  }

  // Norms, rope and SwiGLU, with what backward brings back.
  ClassTime passes() {
    const ArenaScope scope(arena_);
    const int64_t h = config_.hidden_size, i = config_.intermediate_size;
    const QkvShape shape = {config_.heads, config_.kv_heads, config_.head_dim};
    const TensorView x = noise({tokens_, h}), y = noise({tokens_, h}), dx = noise({tokens_, h}), w = noise({h}),
                     dw = floats({h}), rstd = floats({tokens_});
    const double norm = timed(exec_, 20, [&] { rmsnorm_forward(exec_, x, w, 1e-6f, y, rstd); });
    const double norm_back = timed(exec_, 20, [&] { rmsnorm_backward(exec_, x, w, rstd, y, dx, true, dw); });
    const TensorView gate_up = noise({tokens_, 2 * i}), inner = noise({tokens_, i});
    const double swiglu = timed(exec_, 20, [&] { swiglu_forward(exec_, gate_up, inner); });
    const double swiglu_back = timed(exec_, 20, [&] { swiglu_backward(exec_, gate_up, inner, gate_up, inner); });
    const int64_t half = shape.head_dim / 2;
    const TensorView qkv = noise({tokens_, shape.width()}), q = noise({tokens_, shape.heads, shape.head_dim}),
                     k = noise({tokens_, shape.kv_heads, shape.head_dim}),
                     v = noise({tokens_, shape.kv_heads, shape.head_dim}), cos = floats({tokens_, half}),
                     sin = floats({tokens_, half});
    const TensorView positions = arena_.allocate(DType::i32, {tokens_}), none;
    const HostCopy staged(positions);
    for (int32_t t = 0; t < tokens_; ++t) staged.view().as<int32_t>()[t] = t;
    staged.store();
    const double rope = timed(exec_, 20, [&] {
      qkv_rope_forward(exec_, shape, qkv, positions, cos, sin, none, none, 0, q, k, v, none, none);
    });
    const double rope_back = timed(exec_, 20, [&] {
      qkv_rope_backward(exec_, shape, q, k, v, positions, cos, sin, none, none, none, none, none, qkv, none, none);
    });
    const auto rate = [&](double bytes, double milliseconds) { return bytes / milliseconds / 1e9; };
    const double norm_bytes = 2.0 * x.bytes(), norm_back_bytes = 4.0 * x.bytes(),
                 swiglu_bytes = 1.0 * gate_up.bytes() + inner.bytes(),
                 swiglu_back_bytes = 2.0 * gate_up.bytes() + 2.0 * inner.bytes(),
                 rope_bytes = 2.0 * qkv.bytes() + 2.0 * cos.bytes();
    fmt::print(
        "  passes, TB/s: rmsnorm {:.2f}, backward {:.2f}; swiglu {:.2f}, backward {:.2f}; rope {:.2f}, backward "
        "{:.2f}\n",
        rate(norm_bytes, norm), rate(norm_back_bytes, norm_back), rate(swiglu_bytes, swiglu),
        rate(swiglu_back_bytes, swiglu_back), rate(rope_bytes, rope), rate(rope_bytes, rope_back));
    const double layer = 4 * norm + 2 * norm_back + swiglu + swiglu_back + rope + rope_back;
    const double bytes = 4 * norm_bytes + 2 * norm_back_bytes + swiglu_bytes + swiglu_back_bytes + 2 * rope_bytes;
    return {"norms, rope, swiglu", config_.layers * layer, config_.layers * bytes_floor(bytes)};
  }

  ClassTime loss() {
    const ArenaScope scope(arena_);
    const int64_t h = config_.hidden_size, v = config_.vocab_size;
    const TensorView hidden = noise({tokens_, h}), weight = noise({v, h}), dhidden = noise({tokens_, h}),
                     dweight = floats({v, h}), weights = floats({tokens_}),
                     labels = arena_.allocate(DType::i32, {tokens_});
    zero_tensor(exec_, labels);
    const HostMemory sums(sizeof(LossSums), DeviceKind::cuda);
    const double time = timed(exec_, 5, [&] {
      loss_forward_backward(exec_, hidden, weight, labels, weights, kLossChunk, {}, dhidden, dweight,
                            static_cast<LossSums*>(sums.data()));
    });
    // The logits are written, read and written again, whatever is done with them.
    const double flops = 6.0 * static_cast<double>(tokens_) * static_cast<double>(h) * static_cast<double>(v);
    return {"vocabulary projection and loss", time,
            flops_floor(flops) + bytes_floor(2.0 * static_cast<double>(tokens_) * static_cast<double>(v) * 2)};
  }

  ClassTime embedding() {
    const ArenaScope scope(arena_);
    const int64_t h = config_.hidden_size, v = config_.vocab_size;
    const TensorView table = noise({v, h}), x = noise({tokens_, h}), dtable = floats({v, h}),
                     ids = arena_.allocate(DType::i32, {tokens_});
    const MicroBatch batch = random_batch(config_, tokens_);
    const HostCopy staged(ids);
    std::copy(batch.tokens.begin(), batch.tokens.end(), staged.view().as<int32_t>());
    staged.store();
    const double time = timed(exec_, 10, [&] {
      embedding_forward(exec_, ids, table, x);
      embedding_backward(exec_, ids, x, dtable);
    });
    return {"embedding", time, bytes_floor(7.0 * x.bytes())};
  }

  ClassTime optimizer() {
    const ArenaScope scope(arena_);
    // The largest slice that fits, scaled to all parameters.
    const int64_t n = 400'000'000;
    const TensorView p = floats({n}), g = floats({n}), m = floats({n}), v = floats({n}), clip = floats({2}),
                     weights = arena_.allocate(kType, {n});
    const DecayRange all = {0, n, true};
    const double time = timed(exec_, 5, [&] {
      zero_tensor(exec_, g);
      clip_by_norm(exec_, g, 1.0, clip);
      adamw_update(exec_, {1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, 10, 1.0f}, std::span(&all, 1), {p, g, m, v, weights, clip});
    });
    const double share = static_cast<double>(parameters()) / static_cast<double>(n);
    // Zeros 4; norm 4; update: p, m, v both ways, g, weight.
    return {"zeros, norm, clip, AdamW", time * share, bytes_floor(38.0 * static_cast<double>(parameters()))};
  }

  int64_t parameters() const {
    const int64_t h = config_.hidden_size, q = int64_t{config_.heads} * config_.head_dim,
                  kv = int64_t{config_.kv_heads} * config_.head_dim;
    return config_.vocab_size * h + config_.layers * h * (2 * q + 2 * kv + 3 * config_.intermediate_size);
  }

  Exec exec_;
  ModelConfig config_;
  int64_t tokens_;
  Ceilings ceilings_;
  Arena arena_, scratch_;
};

struct Arguments {
  std::string model = "all";
  int64_t tokens = 8192;
  int64_t budget = 0;  // 0: dense
  std::string recompute = "none";
  int steps = 10;
  bool classes = true;
  bool measure_products = false;
};

Arguments parse_arguments(int argc, char** argv) {
  Arguments arguments;
  int place = 0;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const auto value = [&] {
      SB_USER_CHECK(i + 1 < argc, "{} needs a value", word);
      return std::string(argv[++i]);
    };
    if (word == "--budget")
      arguments.budget = std::stoll(value());
    else if (word == "--recompute")
      arguments.recompute = value();
    else if (word == "--steps")
      arguments.steps = std::stoi(value());
    else if (word == "--no-classes")
      arguments.classes = false;
    else if (word == "--measure-products")
      arguments.measure_products = true;
    else if (word.starts_with("-") || place > 1)
      throw UserError("{}: no such argument", word);
    else if (place++ == 0)
      arguments.model = word;
    else
      arguments.tokens = std::stoll(word);
  }
  SB_USER_CHECK(arguments.steps > 0 && arguments.tokens > 1, "steps and tokens must be positive");
  return arguments;
}

Recompute recompute_level(const std::string& name) {
  if (name == "none") return Recompute::none;
  if (name == "attention") return Recompute::attention;
  SB_USER_CHECK(name == "layer", "--recompute {}: none, attention or layer", name);
  return Recompute::layer;
}

double measure_step(const DeviceContext& context, const Case& c, const Arguments& arguments, Attention& attention) {
  const int64_t tokens = arguments.tokens;
  const Exec& exec = context.exec();
  StageOptions options;
  options.device = DeviceKind::cuda;
  options.dtype = kType;
  options.last_layer = c.config.layers;
  options.recompute = recompute_level(arguments.recompute);
  options.max_micro_batch_tokens = options.max_sequence_length = tokens;
  options.loss_chunk = kLossChunk;
  MemoryPlan plan = Stage::memory_plan(c.config, options, attention, 1);
  plan.add("optimizer", 2 * plan.items().front().bytes);
  fmt::print("{}", plan.table(cuda::device_info().total_bytes));
  Stage stage(c.config, options, attention, 1);
  ParameterSet& parameters = stage.parameters();
  randomize(parameters);
  const int64_t elements = parameters.flat_elements();
  Arena moments = make_arena("optimizer", 2 * Arena::rounded(parameters.flat_bytes()) + 64, DeviceKind::cuda);
  const AdamWBuffers buffers = {parameters.values(),
                                parameters.gradients(),
                                moments.allocate(DType::f32, {elements}),
                                moments.allocate(DType::f32, {elements}),
                                parameters.rounded_weights(),
                                moments.allocate(DType::f32, {2})};
  zero_tensor(exec, buffers.m);
  zero_tensor(exec, buffers.v);
  std::vector<DecayRange> ranges;
  for (int i = 0; i < parameters.count(); ++i) {
    const Parameter& parameter = parameters.parameter(i);
    ranges.push_back({parameter.offset, parameter.offset + parameter.elements(), parameter.decay});
  }
  const MicroBatch batch = random_batch(c.config, tokens);

  const int warm_up = std::min(arguments.steps, 3), steps = arguments.steps;
  std::vector<DeviceEvent> borders;
  for (int i = 0; i <= warm_up + steps; ++i) borders.emplace_back(DeviceKind::cuda);
  double first_loss = 0, last_loss = 0;
  borders[0].record(exec);
  for (int step = 1; step <= warm_up + steps; ++step) {
    parameters.zero_gradients(exec);
    stage.forward(exec, batch, 0, {});
    stage.backward(exec, batch, 0, {});
    clip_by_norm(exec, buffers.gradients, 1.0, buffers.clip);
    adamw_update(exec, {1e-5f, 0.9f, 0.95f, 1e-8f, 0.1f, step, 1.0f}, ranges, buffers);
    borders[static_cast<size_t>(step)].record(exec);
    last_loss = stage.loss(0).weighted;  // as the trainer reads it: while the device goes on
    if (step == 1) first_loss = last_loss;
  }
  context.synchronize();
  std::vector<double> times;
  for (int i = warm_up; i < warm_up + steps; ++i)
    times.push_back(
        DeviceEvent::milliseconds_between(borders[static_cast<size_t>(i)], borders[static_cast<size_t>(i) + 1]));
  fmt::print("  steps {:.2f} to {:.2f} ms; loss {:.4f} to {:.4f}\n", *std::min_element(times.begin(), times.end()),
             *std::max_element(times.begin(), times.end()), first_loss, last_loss);
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
             ceilings.bytes * 1e-12, measure ? "products by measurement" : "products by cuBLASLt's first proposal");
  std::vector<std::string> ratios;
  for (const Case& c : {Case{"0.5B", qwen(896, 4864, 24, 14, 64), 62968, 1.3},
                        Case{"3B", qwen(2048, 11008, 36, 16, 128), 18793, 1.15}}) {
    if (arguments.model != "all" && arguments.model != c.name) continue;
    const std::string attention_name =
        arguments.budget > 0 ? fmt::format("topk, budget {}", arguments.budget) : std::string("dense");
    fmt::print("Qwen2.5-{}, {} tokens, bf16, recompute {}, attention {}\n", c.name, tokens, arguments.recompute,
               attention_name);
    CudaAttentionOptions options;
    options.attention.selection.pattern = arguments.budget > 0 ? SelectionPattern::topk : SelectionPattern::dense;
    if (arguments.budget > 0) options.attention.selection.budget = arguments.budget;
    options.attention.layers = c.config.layers;
    const auto attention = make_cuda_attention(options);
    const double step = measure_step(context, c, arguments, *attention);
    std::vector<ClassTime> classes;
    if (arguments.classes) {
      ClassBench bench(context.exec(), c.config, tokens, ceilings);
      classes = bench.run(*attention);
    }
    double sum = 0, floor = 0;
    for (const ClassTime& time : classes) {
      fmt::print("  {:<40} {:8.2f} ms, floor {:8.2f}: {:5.2f} x\n", time.name, time.milliseconds, time.floor,
                 time.milliseconds / time.floor);
      sum += time.milliseconds;
      floor += time.floor;
    }
    if (arguments.classes)
      fmt::print("  {:<40} {:8.2f} ms, floor {:8.2f}; the step takes {:.2f} ms\n", "sum", sum, floor, step);
    const double rate = static_cast<double>(tokens) / step * 1e3;
    ratios.push_back(
        fmt::format("Qwen2.5-{} at {}, {}: {:.0f} ms, {:.0f} tokens/s", c.name, tokens, attention_name, step, rate));
    if (tokens == 8192 && arguments.budget == 0) {
      ratios.back() += fmt::format(", {:.2f} x the peer's {:.0f} (target {}: {})", rate / c.peer, c.peer, c.target,
                                   rate >= c.target * c.peer ? "met" : "MISSED");
    }
  }
  for (const std::string& line : ratios) fmt::print("{}\n", line);
} catch (const std::exception& failure) {
  fmt::print(stderr, "error: {}\n", failure.what());
  return 1;
}
