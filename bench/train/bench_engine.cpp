// One training step of a 25M-parameter Qwen2 shape over one 2048-token sequence, against the time its matrix products
// would take at the rate of OpenBLAS's sgemm measured in the same run; dense attention alone against the same rate;
// peak memory against the plan. The ratios stand at the end.

#include <fmt/format.h>

#include <cmath>
#include <fstream>
#include <string>
#include <vector>

#include "attention/cpu/dense_attention.h"
#include "bench/timing.h"
#include "core/cpu_isa.h"
#include "core/random.h"
#include "model/stage/stage.h"
#include "ops/adamw.h"

namespace {

using namespace sb;

constexpr int64_t kTokens = 2048, kAttentionTokens = 8192;
constexpr int kSteps = 5;

ModelConfig model_25m() {
  ModelConfig config;
  config.family = ModelConfig::Family::qwen2;
  config.vocab_size = 8192;
  config.hidden_size = 512;
  config.intermediate_size = 1408;
  config.layers = 8;
  config.heads = 8;
  config.kv_heads = 2;
  config.head_dim = 64;
  config.max_position_embeddings = 32768;
  config.tie_word_embeddings = true;
  config.qkv_bias = true;
  return config;
}

// Products of attention over one causal sequence: 4·d a pair and head forward, 2.5 times that backward.
double attention_forward_flops(int heads, int head_dim, int64_t tokens) {
  return 4.0 * head_dim * heads * (0.5 * static_cast<double>(tokens) * static_cast<double>(tokens + 1));
}

double step_flops(const ModelConfig& c) {
  const double layer = static_cast<double>(c.hidden_size) *
                       static_cast<double>((2 * c.heads + 2 * c.kv_heads) * c.head_dim + 3 * c.intermediate_size);
  const double matrices = c.layers * layer + static_cast<double>(c.hidden_size * c.vocab_size);
  return 3.0 * 2.0 * matrices * kTokens + 3.5 * c.layers * attention_forward_flops(c.heads, c.head_dim, kTokens);
}

// A line of /proc/self/status in bytes: VmRSS now, VmHWM the largest so far.
int64_t process_memory(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    int64_t kib = 0;
    if (word == key + ":" && status >> kib) return kib * 1024;
  }
  return 0;
}

struct StepTimes {
  double forward = 1e300, backward = 1e300, update = 1e300, total = 1e300;
};

// What a step of the trainer runs, on one process and one sequence.
StepTimes measure_steps(const ModelConfig& config, Recompute recompute, ThreadPool& pool, MemoryPlan& plan) {
  DenseAttention attention;
  const StageOptions options = {.first_layer = 0,
                                .last_layer = config.layers,
                                .recompute = recompute,
                                .max_micro_batch_tokens = kTokens,
                                .max_sequence_length = kTokens};
  plan = Stage::memory_plan(config, options, attention, pool.threads());
  Stage stage(config, options, attention, pool.threads());
  stage.initialize(1);
  const int64_t parameters = stage.parameters().flat_elements();
  plan.add("optimizer", 2 * parameters * static_cast<int64_t>(sizeof(float)));
  std::vector<float> m(static_cast<size_t>(parameters)), v(m.size());
  const TensorView m_view(m.data(), Shape{parameters}), v_view(v.data(), Shape{parameters});
  const Exec exec = {.pool = &pool};

  MicroBatch batch;
  Random random(7);
  for (int64_t t = 0; t < kTokens; ++t) {
    batch.tokens.push_back(static_cast<int32_t>(random.below(static_cast<uint64_t>(config.vocab_size))));
    batch.positions.push_back(static_cast<int32_t>(t));
    batch.labels.push_back(static_cast<int32_t>(random.below(static_cast<uint64_t>(config.vocab_size))));
    batch.weights.push_back(1.0f / kTokens);
  }
  batch.cu_seqlens = {0, static_cast<int32_t>(kTokens)};
  batch.sequence_ids = {0};

  StepTimes best;
  for (int step = 0; step <= kSteps; ++step) {  // the first only warms up
    StepTimes now;
    now.forward = bench::seconds_of([&] {
      stage.parameters().zero_gradients();
      stage.forward(exec, batch, 0, {});
    });
    now.backward = bench::seconds_of([&] { stage.backward(exec, batch, 0, {}); });
    now.update = bench::seconds_of([&] {
      const double norm = std::sqrt(squared_norm(exec, stage.parameters().gradients()));
      const AdamWStep adamw = {
          1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, step + 1, static_cast<float>(std::min(1.0, 1.0 / (norm + 1e-6)))};
      adamw_update(exec, adamw, stage.parameters().values(), stage.parameters().gradients(), m_view, v_view);
    });
    now.total = now.forward + now.backward + now.update;
    if (step > 0 && now.total < best.total) best = now;
  }
  return best;
}

struct AttentionTimes {
  double forward, backward;
};

AttentionTimes measure_attention(const ModelConfig& config, ThreadPool& pool) {
  DenseAttention attention;
  const int64_t n = kAttentionTokens;
  const AttentionShape shape = {config.heads, config.kv_heads, config.head_dim,
                                1.0f / std::sqrt(static_cast<float>(config.head_dim))};
  const Shape wide = {n, config.heads, config.head_dim}, narrow = {n, config.kv_heads, config.head_dim};
  Arena arena("operands", 4 * Arena::rounded(4 * wide.elements()) + 4 * Arena::rounded(4 * narrow.elements()) +
                              Arena::rounded(4 * n * config.heads));
  Random random(3);
  const auto tensor = [&](const Shape& dims) {
    const TensorView view = arena.allocate(DType::f32, dims);
    for (int64_t i = 0; i < view.elements(); ++i) view.f32()[i] = static_cast<float>(random.uniform() - 0.5);
    return view;
  };
  const AttentionOperands operands = {.q = tensor(wide),
                                      .k = tensor(narrow),
                                      .v = tensor(narrow),
                                      .out = tensor(wide),
                                      .lse = tensor({config.heads, n})};
  const AttentionGradients gradients = {
      .dout = tensor(wide), .dq = tensor(wide), .dk = tensor(narrow), .dv = tensor(narrow)};
  const std::vector<int32_t> cu_seqlens = {0, static_cast<int32_t>(n)};
  const PackedSequences sequences = {.cu_seqlens = cu_seqlens, .budgets = {}};
  Arena scratch("scratch", attention.scratch_bytes(shape, n, pool.threads()));
  const Exec exec = {.pool = &pool, .scratch = &scratch};
  const auto state = attention.make_state();
  AttentionTimes times;
  times.forward =
      bench::best_seconds(3, [&] { attention.forward(exec, 0, shape, sequences, operands, *state, false); });
  times.backward =
      bench::best_seconds(3, [&] { attention.backward(exec, 0, shape, sequences, operands, gradients, *state); });
  return times;
}

const char* verdict(bool met) {
  return met ? "met" : "MISSED";
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : available_cores();
  const ModelConfig config = model_25m();
  ThreadPool pool(threads);
  fmt::print(
      "Qwen2 shape: hidden {}, {} layers, intermediate {}, {}:{} heads of {}, vocabulary {}; {} tokens; {} "
      "threads, {}\n",
      config.hidden_size, config.layers, config.intermediate_size, config.heads, config.kv_heads, config.head_dim,
      config.vocab_size, kTokens, threads, cpu_isa() == CpuIsa::avx512 ? "AVX-512" : "AVX2");

  MemoryPlan plan;
  const int64_t before = process_memory("VmRSS");
  const StepTimes step = measure_steps(config, Recompute::none, pool, plan);
  const double peak = static_cast<double>(process_memory("VmHWM") - before);
  fmt::print("{}", plan.table());

  // Before and after, and the larger counts: a disturbed reference must not flatter us.
  double rate = bench::sgemm_rate(threads);
  MemoryPlan recompute_plan;
  const StepTimes recompute = measure_steps(config, Recompute::attention, pool, recompute_plan);
  const AttentionTimes attention = measure_attention(config, pool);
  rate = std::max(rate, bench::sgemm_rate(threads));

  const double ideal = step_flops(config) / rate;
  const auto print_step = [&](const char* name, const StepTimes& t) {
    fmt::print("step, {:<22} {:7.1f} ms: forward {:.1f}, backward {:.1f}, optimizer {:.1f}; {:.0f} tokens/s\n", name,
               t.total * 1e3, t.forward * 1e3, t.backward * 1e3, t.update * 1e3, kTokens / t.total);
  };
  print_step("recompute none", step);
  print_step("recompute attention", recompute);
  fmt::print("products {:.1f} GFLOP at sgemm 2048^3 {:.1f} GFLOP/s: {:.1f} ms\n", step_flops(config) * 1e-9,
             rate * 1e-9, ideal * 1e3);
  const double attention_flops = attention_forward_flops(config.heads, config.head_dim, kAttentionTokens);
  const double forward_share = attention_flops / attention.forward / rate;
  const double backward_share = 2.5 * attention_flops / attention.backward / rate;
  const double memory_ratio = peak / static_cast<double>(plan.total());
  fmt::print("peak memory / plan                      {:.3f}  (bar 0.95 to 1.05: {})\n", memory_ratio,
             verdict(std::abs(memory_ratio - 1.0) <= 0.05));
  fmt::print("dense attention 8192, d 64, forward     {:.3f} of sgemm  (bar >= 0.55: {})\n", forward_share,
             verdict(forward_share >= 0.55));
  fmt::print("dense attention 8192, d 64, backward    {:.3f} of sgemm  (bar >= 0.50: {})\n", backward_share,
             verdict(backward_share >= 0.50));
  fmt::print("step with recompute attention / products {:.3f}\n", recompute.total / ideal);
  fmt::print("step / products at sgemm rate           {:.3f}  (bar <= 1.6: {})\n", step.total / ideal,
             verdict(step.total <= 1.6 * ideal));
}
