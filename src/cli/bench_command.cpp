#include <CLI/CLI.hpp>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "attention/cpu/dense_attention.h"
#include "attention/cpu/sparse_attention.h"
#include "cli/commands.h"
#include "cli/output_file.h"
#include "core/errors.h"
#include "core/random.h"

namespace sb {
namespace {

struct AttentionBench {
  std::vector<int64_t> sequences = {16384};
  std::vector<double> densities = {0.1};
  int heads = 14, kv_heads = 2, head_dim = 64;
  int block = 128, query_block = 16, score_tokens = 0, score_channels = 32, threads = 0, repeats = 2;
  std::string pattern = "topk", selection = "causal", score = "moments", json;
};

double seconds(const std::function<void()>& body) {
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Best of several: other work on the machine only ever adds time.
double best_seconds(int repeats, const std::function<void()>& body) {
  double best = INFINITY;
  for (int i = 0; i < repeats; ++i) best = std::min(best, seconds(body));
  return best;
}

// Operands of one sequence, normal random numbers.
struct Operands {
  Operands(const AttentionShape& shape, int64_t tokens) : shape_(shape), tokens_(tokens) {
    Random random(1);
    const int64_t queries = tokens * shape.heads * shape.head_dim, keys = tokens * shape.kv_heads * shape.head_dim;
    for (auto* values : {&q_, &dout_}) values->resize(queries);
    for (auto* values : {&k_, &v_}) values->resize(keys);
    for (auto* values : {&q_, &dout_, &k_, &v_}) {
      for (float& x : *values) x = static_cast<float>(random.normal());
    }
    out_.resize(queries);
    dq_.resize(queries);
    dk_.resize(keys);
    dv_.resize(keys);
    lse_.resize(tokens * shape.heads);
  }
  AttentionOperands forward() {
    return {query(q_), key(k_), key(v_), query(out_), {lse_.data(), {shape_.heads, tokens_}}};
  }
  // The planes that scores judge by, from these very operands.
  PlaneSums plane_sums(ThreadPool& pool) const {
    Exec exec;
    exec.pool = &pool;
    return measure_planes(exec, shape_, q_.data(), k_.data(), tokens_);
  }
  AttentionGradients backward() { return {query(dout_), query(dq_), key(dk_), key(dv_)}; }

 private:
  TensorView query(std::vector<float>& x) { return {x.data(), {tokens_, shape_.heads, shape_.head_dim}}; }
  TensorView key(std::vector<float>& x) { return {x.data(), {tokens_, shape_.kv_heads, shape_.head_dim}}; }
  AttentionShape shape_;
  int64_t tokens_;
  std::vector<float> q_, k_, v_, dout_, out_, lse_, dq_, dk_, dv_;
};

struct Timing {
  double selection = 0, forward = 0, backward = 0;
  double attention() const { return forward + backward; }
  double total() const { return selection + attention(); }
};

// Selection is what the first forward takes beyond one that replays its selections.
Timing measure(Attention& attention, const AttentionShape& shape, int64_t tokens, int repeats, ThreadPool& pool,
               Operands& operands, BlockIndex* index) {
  Arena scratch("scratch", attention.scratch_bytes(shape, tokens, pool.threads()));
  const Exec exec{DeviceKind::cpu, &pool, nullptr, &scratch};
  const std::vector<int32_t> cu_seqlens = {0, static_cast<int32_t>(tokens)};
  const PackedSequences sequences{cu_seqlens, {}};
  const auto state = attention.make_state();
  const auto forward = [&](bool replay) {
    return best_seconds(repeats,
                        [&] { attention.forward(exec, 0, shape, sequences, operands.forward(), *state, replay); });
  };
  Timing timing;
  const double whole = forward(false);
  timing.forward = whole;
  if (index) {
    timing.forward = forward(true);
    timing.selection = std::max(0.0, whole - timing.forward);
    *index = SparseAttention::index(*state);
  }
  timing.backward = best_seconds(
      repeats, [&] { attention.backward(exec, 0, shape, sequences, operands.forward(), operands.backward(), *state); });
  return timing;
}

SparseAttention::Options sparse_options(const AttentionBench& options, int64_t tokens, double density) {
  SparseAttention::Options sparse;
  sparse.layers = 1;
  sparse.selection.pattern = parse_selection_pattern(options.pattern);
  sparse.selection.order = parse_selection_order(options.selection);
  sparse.selection.score = parse_block_score(options.score);
  sparse.selection.score_tokens = options.score_tokens;
  sparse.selection.score_channels = options.score_channels;
  sparse.selection.block = options.block;
  sparse.selection.query_block = options.query_block;
  // A query sees k keys, or all it has: (2·k·n - k²) / n² of the causal pairs.
  sparse.selection.budget =
      std::max<int64_t>(1, std::llround(static_cast<double>(tokens) * (1.0 - std::sqrt(1.0 - density))));
  sparse.selection.dense_below = 0;
  return sparse;
}

// Before anything is measured, which takes long.
void check_options(const AttentionBench& options) {
  check_output(options.json);
  SB_USER_CHECK(options.kv_heads >= 1 && options.heads % options.kv_heads == 0,
                "--heads {} is not a multiple of --kv-heads {}; change one of them", options.heads, options.kv_heads);
  for (const int64_t tokens : options.sequences)
    SB_USER_CHECK(tokens >= 1 && tokens <= (1 << 24), "--seq {}: must be between 1 and 16,777,216 tokens", tokens);
  for (const double density : options.densities) {
    SB_USER_CHECK(density > 0 && density <= 1, "--density {}: must be above 0 and at most 1", density);
    for (const int64_t tokens : options.sequences) {
      const SelectionConfig selection = sparse_options(options, tokens, density).selection;
      check_selection_config(selection);
      check_score_channels(selection, options.head_dim);
    }
  }
}

void run_attention_bench(const AttentionBench& options) {
  check_options(options);
  const AttentionShape shape{options.heads, options.kv_heads, options.head_dim,
                             1.0f / std::sqrt(static_cast<float>(options.head_dim))};
  ThreadPool pool(options.threads > 0 ? options.threads : available_cores());
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  std::printf(
      "%d:%d heads of %d channels, block %d, query block %d, %s by %s, %d threads; times in ms (GFLOP/s in "
      "parentheses); select: selection time over sparse forward + backward\n",
      options.heads, options.kv_heads, options.head_dim, options.block, options.query_block, options.pattern.c_str(),
      options.score.c_str(), pool.threads());
  std::printf("%8s %8s  %28s  %38s  %9s %9s %9s\n", "tokens", "density", "dense forward / backward",
              "sparse select / forward / backward", "speed-up", "of ideal", "select");
  for (const int64_t tokens : options.sequences) {
    Operands operands(shape, tokens);
    DenseAttention dense;
    const Timing whole = measure(dense, shape, tokens, options.repeats, pool, operands, nullptr);
    for (const double density : options.densities) {
      SparseAttention attention(sparse_options(options, tokens, density));
      attention.use({{operands.plane_sums(pool)}, {}});
      BlockIndex index;
      const Timing part = measure(attention, shape, tokens, options.repeats, pool, operands, &index);
      const double computed =
          static_cast<double>(index.token_pairs()) / static_cast<double>(index.causal_token_pairs());
      const double flops =
          2.0 * shape.head_dim * shape.heads * static_cast<double>(tokens) * static_cast<double>(tokens);
      const auto rate = [&](double share, double factor, double time) { return share * factor * flops / time / 1e9; };
      const double speedup = whole.total() / part.total();
      std::printf(
          "%8lld %7.1f%%  %7.0f (%4.0f) / %7.0f (%4.0f)  %5.1f / %7.1f (%4.0f) / %7.1f (%4.0f)  %8.2fx %8.0f%% "
          "%8.1f%%\n",
          static_cast<long long>(tokens), 100 * computed, 1e3 * whole.forward, rate(1, 1, whole.forward),
          1e3 * whole.backward, rate(1, 2.5, whole.backward), 1e3 * part.selection, 1e3 * part.forward,
          rate(computed, 1, part.forward), 1e3 * part.backward, rate(computed, 2.5, part.backward), speedup,
          100 * speedup * computed, 100 * part.selection / part.attention());
      std::fflush(stdout);
      rows.push_back({{"tokens", tokens},
                      {"density", computed},
                      {"dense_forward_ms", 1e3 * whole.forward},
                      {"dense_backward_ms", 1e3 * whole.backward},
                      {"selection_ms", 1e3 * part.selection},
                      {"sparse_forward_ms", 1e3 * part.forward},
                      {"sparse_backward_ms", 1e3 * part.backward},
                      {"speedup", speedup},
                      {"share_of_ideal", speedup * computed},
                      {"selection_share", part.selection / part.attention()}});
    }
  }
  if (options.json.empty()) return;
  write_output(options.json, nlohmann::ordered_json{{"threads", pool.threads()}, {"rows", rows}}.dump(1) + "\n");
}

}  // namespace

void add_bench_command(CLI::App& app) {
  CLI::App* bench = app.add_subcommand("bench", "benchmark parts of the engine on this machine");
  bench->require_subcommand(1);
  CLI::App* attention =
      bench->add_subcommand("attention", "compare dense and sparse attention: selection, forward, backward");
  auto options = std::make_shared<AttentionBench>();
  attention->add_option("--seq", options->sequences, "sequence length in tokens; may be repeated")
      ->capture_default_str();
  attention->add_option("--density", options->densities, "fraction of the causal pairs to compute; may be repeated")
      ->capture_default_str();
  attention->add_option("--heads", options->heads, "query heads")->check(CLI::Range(1, 1024))->capture_default_str();
  attention->add_option("--kv-heads", options->kv_heads, "key/value heads")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  attention->add_option("--head-dim", options->head_dim, "channels per head")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  attention->add_option("--block", options->block, "tokens per key block")->capture_default_str();
  attention
      ->add_option("--query-block", options->query_block, "tokens per query block, which share one list of key blocks")
      ->capture_default_str();
  attention
      ->add_option("--pattern", options->pattern, "how pairs are selected: topk, mass, topp, vertical_slash or window")
      ->capture_default_str();
  attention->add_option("--selection", options->selection, "selection order: causal or lookahead")
      ->capture_default_str();
  attention->add_option("--score", options->score, "how key blocks are scored: planes, moments or mean")
      ->capture_default_str();
  attention
      ->add_option("--score-tokens", options->score_tokens,
                   "score moments, mean: keys of a block that are scored together; 0: the whole block")
      ->capture_default_str();
  attention
      ->add_option("--score-channels", options->score_channels,
                   "score planes: channels per head used for scoring, those of the rotary planes with the most energy")
      ->capture_default_str();
  attention->add_option("--threads", options->threads, "worker threads; 0: all cores")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  attention->add_option("--repeats", options->repeats, "number of measurements; the fastest counts")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  attention->add_option("--json", options->json, "also write the results to this file, as JSON");
  attention->callback([options] { run_attention_bench(*options); });
}

}  // namespace sb
