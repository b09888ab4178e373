// CPU attention against the machine's own matrix product. Without arguments: dense attention, S = 8192, d = 64, and the
// share of OpenBLAS' sgemm rate (2048³, same threads, same run) that its useful FLOPs reach.

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

#include "attention/dense_attention.h"
#include "core/random.h"
#include "device/blas.h"

namespace {

using namespace sb;

struct Options {
  int sequence = 8192, heads = 4, kv_heads = 1, head_dim = 64, threads = available_cores(), repeats = 3;
};

Options parse(int argc, char** argv) {
  Options o;
  const std::pair<const char*, int*> names[] = {{"--seq", &o.sequence},      {"--heads", &o.heads},
                                                {"--kv-heads", &o.kv_heads}, {"--head-dim", &o.head_dim},
                                                {"--threads", &o.threads},   {"--repeats", &o.repeats}};
  for (int i = 1; i < argc; i += 2) {
    const auto* name = std::find_if(std::begin(names), std::end(names),
                                    [&](const auto& n) { return std::string(argv[i]) == n.first; });
    if (name == std::end(names) || i + 1 == argc) {
      fmt::print(stderr, "{}: known are --seq --heads --kv-heads --head-dim --threads --repeats, each with a number\n",
                 argv[i]);
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

double sgemm_rate(ThreadPool& pool, int repeats) {
  constexpr int64_t n = 2048;
  const std::vector<float> a = random_floats(n * n, 1), b = random_floats(n * n, 2);
  std::vector<float> c(n * n);
  Sgemm product;
  product.m = product.n = product.k = product.lda = product.ldb = product.ldc = n;
  product.a = a.data();
  product.b = b.data();
  product.c = c.data();
  return 2.0 * n * n * n / best_seconds(repeats + 2, [&] { parallel_sgemm(pool, product); });
}

}  // namespace

int main(int argc, char** argv) {
  const Options o = parse(argc, argv);
  ThreadPool pool(o.threads);
  const AttentionShape shape = {o.heads, o.kv_heads, o.head_dim, 1.0f / std::sqrt(static_cast<float>(o.head_dim))};
  DenseAttention attention;
  const int64_t tokens = o.sequence;
  Arena scratch("scratch", attention.scratch_bytes(shape, tokens, o.threads));
  const Exec exec{DeviceKind::cpu, &pool, nullptr, &scratch};

  const int64_t queries = tokens * o.heads * o.head_dim, keys = tokens * o.kv_heads * o.head_dim;
  const std::vector<float> q = random_floats(queries, 3), k = random_floats(keys, 4), v = random_floats(keys, 5),
                           dout = random_floats(queries, 6);
  std::vector<float> out(queries), lse(tokens * o.heads), dq(queries), dk(keys), dv(keys);
  const Shape query_shape = {tokens, o.heads, o.head_dim}, key_shape = {tokens, o.kv_heads, o.head_dim};
  const AttentionOperands operands = {{q.data(), query_shape},
                                      {k.data(), key_shape},
                                      {v.data(), key_shape},
                                      {out.data(), query_shape},
                                      {lse.data(), {o.heads, tokens}}};
  const AttentionGradients gradients = {
      {dout.data(), query_shape}, {dq.data(), query_shape}, {dk.data(), key_shape}, {dv.data(), key_shape}};
  const std::vector<int32_t> cu_seqlens = {0, o.sequence};
  const PackedSequences sequences = {cu_seqlens, {}};
  const auto state = attention.make_state();

  const double gemm = sgemm_rate(pool, o.repeats);
  const double forward =
      best_seconds(o.repeats, [&] { attention.forward(exec, 0, shape, sequences, operands, *state, false); });
  const double backward =
      best_seconds(o.repeats, [&] { attention.backward(exec, 0, shape, sequences, operands, gradients, *state); });
  const double flops = 4.0 * o.head_dim * o.heads * (0.5 * tokens * (tokens + 1));
  fmt::print("dense attention, S = {}, {}:{} heads, d = {}, {} threads\n", o.sequence, o.heads, o.kv_heads, o.head_dim,
             o.threads);
  fmt::print("sgemm 2048^3      {:9.1f} GFLOP/s\n", gemm * 1e-9);
  fmt::print("forward  {:8.1f} ms {:9.1f} GFLOP/s\n", forward * 1e3, flops / forward * 1e-9);
  fmt::print("backward {:8.1f} ms {:9.1f} GFLOP/s\n", backward * 1e3, 2.5 * flops / backward * 1e-9);
  fmt::print("share of sgemm: forward {:.3f}, backward {:.3f}\n", flops / forward / gemm,
             2.5 * flops / backward / gemm);
  return 0;
}
