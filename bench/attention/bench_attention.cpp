// CPU attention against the machine's own matrix product, and block-sparse attention against dense.
// Without arguments: dense at S = 8192, d = 64, the share of OpenBLAS' sgemm rate (2048³, same threads, same run) that
// its useful FLOPs reach; then S = 16384, 14:2 heads, at 10 % and 100 % of the causal pairs, times faster than dense.

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

#include "attention/cpu/block_sparse.h"
#include "attention/cpu/dense_attention.h"
#include "core/random.h"
#include "device/blas.h"

namespace {

using namespace sb;

struct Options {
  int sequence = 0, heads = 14, kv_heads = 2, head_dim = 64, threads = available_cores(), repeats = 2;
  int block = 128, query_block = 16, permille = 100;
};

Options parse(int argc, char** argv) {
  Options o;
  const std::pair<const char*, int*> names[] = {{"--seq", &o.sequence},      {"--heads", &o.heads},
                                                {"--kv-heads", &o.kv_heads}, {"--head-dim", &o.head_dim},
                                                {"--threads", &o.threads},   {"--repeats", &o.repeats},
                                                {"--block", &o.block},       {"--query-block", &o.query_block},
                                                {"--permille", &o.permille}};
  for (int i = 1; i < argc; i += 2) {
    const auto* name = std::find_if(std::begin(names), std::end(names),
                                    [&](const auto& n) { return std::string(argv[i]) == n.first; });
    if (name == std::end(names) || i + 1 == argc) {
      fmt::print(stderr, "{}: known are", argv[i]);
      for (const auto& known : names) fmt::print(stderr, " {}", known.first);
      fmt::print(stderr, ", each with a number\n");
      std::exit(2);
    }
    *name->second = std::atoi(argv[i + 1]);
  }
  return o;
}

// Best of several: the machine may be disturbed, but is never faster than it is.
template <typename Body>
double best_seconds(int repeats, Body&& body) {
  double best = 1e30;
  for (int i = 0; i < repeats; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    body();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  return best;
}

std::vector<float> random_floats(int64_t count, uint64_t seed) {
  std::vector<float> x(count);
  uint64_t state = seed;
  for (float& value : x) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    value = static_cast<float>(static_cast<int32_t>(state >> 32)) * 0x1p-30f;
  }
  return x;
}

double sgemm_rate(ThreadPool& pool) {
  constexpr int64_t n = 2048;
  const std::vector<float> a = random_floats(n * n, 1), b = random_floats(n * n, 2);
  std::vector<float> c(n * n);
  Sgemm product;
  product.m = product.n = product.k = product.lda = product.ldb = product.ldc = n;
  product.a = a.data();
  product.b = b.data();
  product.c = c.data();
  return 2.0 * n * n * n / best_seconds(5, [&] { parallel_sgemm(pool, product); });
}

struct Times {
  double forward = 1e30, backward = 1e30;
  double both() const { return forward + backward; }
  void keep_best(const Times& other) {
    forward = std::min(forward, other.forward);
    backward = std::min(backward, other.backward);
  }
};

// One sequence with memory of its own.
class Bench {
 public:
  Bench(ThreadPool& pool, const AttentionShape& shape, int tokens)
      : pool_(pool),
        shape_(shape),
        tokens_(tokens),
        q_(random_floats(queries(), 3)),
        k_(random_floats(keys(), 4)),
        v_(random_floats(keys(), 5)),
        dout_(random_floats(queries(), 6)),
        out_(queries()),
        lse_(int64_t{tokens} * shape.heads),
        dq_(queries()),
        dk_(keys()),
        dv_(keys()),
        scratch_("scratch", block_sparse_scratch_bytes(shape, tokens, pool.threads())) {}

  Times dense(int repeats) {
    DenseAttention attention;
    const std::vector<int32_t> cu_seqlens = {0, tokens_};
    const PackedSequences sequences = {cu_seqlens, {}};
    const auto state = attention.make_state();
    return time(
        repeats, [&] { attention.forward(exec(), 0, shape_, sequences, operands(), *state, false); },
        [&] { attention.backward(exec(), 0, shape_, sequences, operands(), gradients(), *state); });
  }
  Times sparse(int repeats, const BlockIndex& index) {
    return time(
        repeats, [&] { block_sparse_forward(exec(), shape_, index, operands()); },
        [&] { block_sparse_backward(exec(), shape_, index, operands(), gradients()); });
  }
  double flops(double pairs_a_head) const { return 4.0 * shape_.head_dim * shape_.heads * pairs_a_head; }

 private:
  int64_t queries() const { return int64_t{tokens_} * shape_.heads * shape_.head_dim; }
  int64_t keys() const { return int64_t{tokens_} * shape_.kv_heads * shape_.head_dim; }
  Exec exec() { return {DeviceKind::cpu, &pool_, nullptr, &scratch_}; }
  Shape query_shape() const { return {tokens_, shape_.heads, shape_.head_dim}; }
  Shape key_shape() const { return {tokens_, shape_.kv_heads, shape_.head_dim}; }
  AttentionOperands operands() {
    return {{q_.data(), query_shape()},
            {k_.data(), key_shape()},
            {v_.data(), key_shape()},
            {out_.data(), query_shape()},
            {lse_.data(), {shape_.heads, tokens_}}};
  }
  AttentionGradients gradients() {
    return {{dout_.data(), query_shape()},
            {dq_.data(), query_shape()},
            {dk_.data(), key_shape()},
            {dv_.data(), key_shape()}};
  }
  template <typename Forward, typename Backward>
  Times time(int repeats, Forward&& forward, Backward&& backward) {
    const double f = best_seconds(repeats, forward);
    return {f, best_seconds(repeats, backward)};
  }

  ThreadPool& pool_;
  AttentionShape shape_;
  int tokens_;
  std::vector<float> q_, k_, v_, dout_, out_, lse_, dq_, dk_, dv_;
  Arena scratch_;
};

// Sink, two local blocks and the own ones for every tile, and `extra` random blocks, half of them selected by later
// tokens.
BlockIndex staircase_index(ThreadPool& pool, const BlockIndexShape& shape, int tokens, double extra) {
  BlockIndex index;
  BlockIndexBuilder builder;
  const std::vector<int32_t> cu_seqlens = {0, tokens};
  builder.begin(index, shape, cu_seqlens, {}, pool.threads());
  pool.parallel_for(index.rows(), 64, [&](int64_t begin, int64_t end, int thread) {
    std::vector<int> first;
    std::vector<IndexEntry> entries;
    for (int64_t row = begin; row < end; ++row) {
      const auto place = index.place_of(row);
      const int begin_token = place.query_block * shape.query_block;
      const int rows = index.query_tokens(*place.sequence, place.query_block);
      const int competing = begin_token / shape.block, visible = (begin_token + rows - 1) / shape.block + 1;
      first.assign(visible, -1);
      std::fill(first.begin() + competing, first.end(), 0);
      for (int i = 0; i < std::min(competing, 2); ++i) first[competing - 1 - i] = 0;
      if (competing > 0) first[0] = 0;
      Random random(9, row);
      const int64_t free = std::count(first.begin(), first.end(), -1);
      const int64_t wanted = std::min(free, static_cast<int64_t>(extra + random.uniform()));
      for (int64_t i = 0; i < wanted; ++i) {
        int64_t pick = static_cast<int64_t>(random.below(free - i));
        int block = 0;
        while (first[block] >= 0 || pick-- > 0) ++block;
        const bool at_once = wanted == free || i < (wanted + 1) / 2;
        first[block] = at_once ? 0 : static_cast<int>(random.below(rows));
      }
      entries.clear();
      for (int block = 0; block < visible; ++block) {
        if (first[block] >= 0) entries.push_back({static_cast<uint16_t>(block), static_cast<uint8_t>(first[block])});
      }
      builder.set_row(thread, row, entries);
    }
  });
  builder.finish(pool);
  return index;
}

BlockIndex index_of_density(ThreadPool& pool, const BlockIndexShape& shape, int tokens, double density) {
  double low = 0, high = static_cast<double>(tokens) / shape.block;
  if (density >= 1) return staircase_index(pool, shape, tokens, high);
  for (int i = 0; i < 12; ++i) {
    const double middle = (low + high) / 2;
    const BlockIndex index = staircase_index(pool, shape, tokens, middle);
    const bool below =
        static_cast<double>(index.token_pairs()) < density * static_cast<double>(index.causal_token_pairs());
    (below ? low : high) = middle;
  }
  return staircase_index(pool, shape, tokens, high);
}

void print(const char* name, const Times& t, double flops) {
  fmt::print("{:<14} forward {:8.1f} ms {:7.1f} GFLOP/s   backward {:8.1f} ms {:7.1f} GFLOP/s\n", name, t.forward * 1e3,
             flops / t.forward * 1e-9, t.backward * 1e3, 2.5 * flops / t.backward * 1e-9);
}

AttentionShape shape_of(const Options& o) {
  return {o.heads, o.kv_heads, o.head_dim, 1.0f / std::sqrt(static_cast<float>(o.head_dim))};
}

double causal_pairs(double tokens) {
  return 0.5 * tokens * (tokens + 1);
}

std::string run_dense(ThreadPool& pool, const Options& o) {
  Bench bench(pool, shape_of(o), o.sequence);
  const double gemm = sgemm_rate(pool);
  const double flops = bench.flops(causal_pairs(o.sequence));
  fmt::print("dense, S = {}, {}:{} heads, d = {}, {} threads; sgemm 2048^3 {:.1f} GFLOP/s\n", o.sequence, o.heads,
             o.kv_heads, o.head_dim, o.threads, gemm * 1e-9);
  const Times t = bench.dense(o.repeats + 1);
  print("dense", t, flops);
  return fmt::format("dense S={}: share of sgemm forward {:.3f}, backward {:.3f}", o.sequence, flops / t.forward / gemm,
                     2.5 * flops / t.backward / gemm);
}

std::string run_sparse(ThreadPool& pool, const Options& o, std::vector<double> densities) {
  Bench bench(pool, shape_of(o), o.sequence);
  fmt::print("sparse, S = {}, {}:{} heads, d = {}, block {}, query block {}, {} threads\n", o.sequence, o.heads,
             o.kv_heads, o.head_dim, o.block, o.query_block, o.threads);
  struct Run {
    BlockIndex index;
    double density;
    Times times;
  };
  std::vector<Run> runs;
  for (const double wanted : densities) {
    Run run;
    run.index = index_of_density(pool, {o.block, o.query_block, o.kv_heads}, o.sequence, wanted);
    run.density = static_cast<double>(run.index.token_pairs()) / static_cast<double>(run.index.causal_token_pairs());
    runs.push_back(std::move(run));
  }
  // In turns, so that a disturbance of the machine meets all of them.
  Times dense;
  for (int i = 0; i < o.repeats; ++i) {
    dense.keep_best(bench.dense(1));
    for (Run& run : runs) run.times.keep_best(bench.sparse(run.density < 0.5 ? 2 : 1, run.index));
  }
  const double flops = bench.flops(causal_pairs(o.sequence));
  print("dense", dense, flops);
  std::string summary;
  for (const Run& run : runs) {
    print(fmt::format("{:.2f} % of pairs", 100 * run.density).c_str(), run.times, run.density * flops);
    summary +=
        fmt::format("{}sparse S={} at {:.2f} %: forward {:.2f}x, backward {:.2f}x, both {:.2f}x dense",
                    summary.empty() ? "" : "\n", o.sequence, 100 * run.density, dense.forward / run.times.forward,
                    dense.backward / run.times.backward, dense.both() / run.times.both());
  }
  return summary;
}

}  // namespace

int main(int argc, char** argv) {
  Options o = parse(argc, argv);
  ThreadPool pool(o.threads);
  if (o.sequence > 0) {
    const std::string dense = run_dense(pool, o), sparse = run_sparse(pool, o, {o.permille * 1e-3});
    fmt::print("{}\n{}\n", dense, sparse);
    return 0;
  }
  o.sequence = 8192;
  const std::string dense = run_dense(pool, o);
  o.sequence = 16384;
  const std::string sparse = run_sparse(pool, o, {0.1, 1.0});
  fmt::print("{}\n{}\n", dense, sparse);
  return 0;
}
