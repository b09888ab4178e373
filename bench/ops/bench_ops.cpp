// Every CPU operation at the sizes of a 25M-parameter Qwen2 layer over 2048 tokens: products as a share of OpenBLAS's
// sgemm rate, the rest in GB/s. Ends with the share that all products together reach.

#include <fmt/format.h>

#include <vector>

#include "bench/timing.h"
#include "core/cpu_isa.h"
#include "ops/adamw.h"
#include "ops/cross_entropy.h"
#include "ops/embedding.h"
#include "ops/linear.h"
#include "ops/rmsnorm.h"
#include "ops/rope.h"
#include "ops/swiglu.h"

namespace {

using namespace sb;

constexpr int64_t kTokens = 2048, kHidden = 512, kIntermediate = 1408, kVocabulary = 8192, kChunk = 1024;
constexpr QkvShape kShape = {8, 2, 64};
constexpr int kRuns = 7;

class Bench {
 public:
  explicit Bench(int threads)
      : pool_(threads),
        scratch_("scratch", loss_scratch_bytes(DeviceKind::cpu, DType::f32, kVocabulary, kChunk)),
        rate_(bench::sgemm_rate(threads)) {
    exec_ = {.pool = &pool_, .scratch = &scratch_};
  }

  void products() {
    for (const auto& [name, in, out] : {std::tuple<const char*, int64_t, int64_t>{"qkv", kHidden, kShape.width()},
                                        {"attention out", kHidden, kHidden},
                                        {"gate and up", kHidden, 2 * kIntermediate},
                                        {"down", kIntermediate, kHidden}}) {
      const TensorView x = tensor({kTokens, in}), w = tensor({out, in}), b = tensor({out}), y = tensor({kTokens, out}),
                       dx = tensor({kTokens, in}), dw = tensor({out, in}), db = tensor({out});
      const double flop = 2.0 * kTokens * static_cast<double>(in * out);
      product(fmt::format("{} forward", name), flop, [&] { linear_forward(exec_, x, w, b, y); });
      product(fmt::format("{} backward input", name), flop, [&] { linear_backward_input(exec_, y, w, dx); });
      product(fmt::format("{} backward weight", name), flop, [&] { linear_backward_weight(exec_, x, y, dw, db); });
    }
    const TensorView hidden = tensor({kTokens, kHidden}), weight = tensor({kVocabulary, kHidden}),
                     weights = tensor({kTokens}), dhidden = tensor({kTokens, kHidden}),
                     dweight = tensor({kVocabulary, kHidden});
    const std::vector<int32_t> labels(kTokens, 7);
    LossSums sums;
    const TensorView label_view(labels.data(), Shape{kTokens});
    const double flop = 2.0 * kTokens * static_cast<double>(kHidden * kVocabulary);
    product("loss forward", flop,
            [&] { loss_forward(exec_, hidden, weight, label_view, weights, kChunk, TensorView(), &sums); });
    product("loss forward + backward", 3 * flop, [&] {
      loss_forward_backward(exec_, hidden, weight, label_view, weights, kChunk, TensorView(), dhidden, dweight, &sums);
    });
  }

  void passes() {
    const TensorView x = tensor({kTokens, kHidden}), y = tensor({kTokens, kHidden}), norm = tensor({kHidden}),
                     dnorm = tensor({kHidden}), rstd = tensor({kTokens}), dx = tensor({kTokens, kHidden});
    pass("rmsnorm forward", x.bytes() + y.bytes(), [&] { rmsnorm_forward(exec_, x, norm, 1e-6f, y, rstd); });
    pass("rmsnorm backward", x.bytes() + y.bytes() + 2 * dx.bytes(),
         [&] { rmsnorm_backward(exec_, x, norm, rstd, y, dx, true, dnorm); });

    const TensorView gate_up = tensor({kTokens, 2 * kIntermediate}), h = tensor({kTokens, kIntermediate}),
                     dgate_up = tensor({kTokens, 2 * kIntermediate});
    pass("swiglu forward", gate_up.bytes() + h.bytes(), [&] { swiglu_forward(exec_, gate_up, h); });
    pass("swiglu backward", 2 * gate_up.bytes() + h.bytes(), [&] { swiglu_backward(exec_, gate_up, h, dgate_up); });

    const TensorView qkv = tensor({kTokens, kShape.width()}), q = tensor({kTokens, kShape.heads, kShape.head_dim}),
                     k = tensor({kTokens, kShape.kv_heads, kShape.head_dim}),
                     v = tensor({kTokens, kShape.kv_heads, kShape.head_dim}), cos = tensor({kTokens, 32}),
                     sin = tensor({kTokens, 32});
    std::vector<int32_t> tokens(kTokens), positions(kTokens);
    for (int64_t t = 0; t < kTokens; ++t) {
      positions[t] = static_cast<int32_t>(t);
      tokens[t] = static_cast<int32_t>(t * 7919 % kVocabulary);
    }
    const TensorView position_view(positions.data(), Shape{kTokens}), token_view(tokens.data(), Shape{kTokens});
    const TensorView none;
    pass("qkv + rope forward", 2 * qkv.bytes(), [&] {
      qkv_rope_forward(exec_, kShape, qkv, position_view, cos, sin, none, none, 1e-6f, q, k, v, none, none);
    });
    pass("qkv + rope backward", 2 * qkv.bytes(), [&] {
      qkv_rope_backward(exec_, kShape, q, k, v, position_view, cos, sin, none, none, none, none, none, qkv, none, none);
    });

    const TensorView table = tensor({kVocabulary, kHidden});
    pass("embedding forward", 2 * x.bytes(), [&] { embedding_forward(exec_, token_view, table, x); });
    pass("embedding backward", 3 * x.bytes(), [&] { embedding_backward(exec_, token_view, x, table); });

    const int64_t parameters = 25'000'000;
    const TensorView p = tensor({parameters}), g = tensor({parameters}), m = tensor({parameters}),
                     s = tensor({parameters});
    const AdamWStep step = {1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, 10, 1.0f};
    pass("adamw, 25M", 7 * p.bytes(), [&] { adamw_update(exec_, step, p, g, m, s); });
    pass("squared norm, 25M", g.bytes(), [&] { squared_norm(exec_, g); });
  }

  void report() const {
    fmt::print("products together: {:.3f} of OpenBLAS sgemm at 2048^3 ({:.1f} GFLOP/s on {} threads)\n",
               product_flop_ / product_seconds_ / rate_, rate_ * 1e-9, pool_.threads());
  }

 private:
  TensorView tensor(Shape shape) {
    memory_.emplace_back(static_cast<size_t>(shape.elements()), 0.01f);
    return {memory_.back().data(), shape};
  }
  void product(const std::string& name, double flop, const std::function<void()>& body) {
    const double seconds = bench::best_seconds(kRuns, body);
    product_flop_ += flop;
    product_seconds_ += seconds;
    fmt::print("{:<32} {:8.3f} ms {:7.1f} GFLOP/s  {:.3f} of sgemm\n", name, seconds * 1e3, flop / seconds * 1e-9,
               flop / seconds / rate_);
  }
  void pass(const std::string& name, int64_t bytes, const std::function<void()>& body) {
    const double seconds = bench::best_seconds(kRuns, body);
    fmt::print("{:<32} {:8.3f} ms {:7.1f} GB/s\n", name, seconds * 1e3, static_cast<double>(bytes) / seconds * 1e-9);
  }

  ThreadPool pool_;
  Arena scratch_;
  double rate_;
  Exec exec_;
  std::vector<std::vector<float>> memory_;
  double product_flop_ = 0, product_seconds_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : available_cores();
  fmt::print("{} tokens, {} threads, {}\n", kTokens, threads, cpu_isa() == CpuIsa::avx512 ? "AVX-512" : "AVX2");
  Bench bench(threads);
  bench.passes();
  bench.products();
  bench.report();
}
