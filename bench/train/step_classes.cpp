#include "bench/train/step_classes.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <tuple>
#include <utility>

#include "core/random.h"
#include "device/cuda.h"
#include "device/event.h"
#include "device/memory.h"
#include "ops/adamw.h"
#include "ops/cross_entropy.h"
#include "ops/embedding.h"
#include "ops/fp8/fp8.h"
#include "ops/linear.h"
#include "ops/rmsnorm.h"
#include "ops/rope.h"
#include "ops/swiglu.h"

namespace sb {
namespace {

constexpr DType kType = DType::bf16;

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

// bf16 bits of numbers between ±1 and ±2, from a short pattern.
void fill_noise(const Exec& exec, TensorView tensor) {
  const int64_t length = std::min<int64_t>(tensor.elements(), (1 << 20) + 7);
  const HostCopy copy(TensorView(tensor.raw(), tensor.dtype(), {length}, tensor.device()));
  Random random(3);
  auto* bits = static_cast<uint16_t*>(copy.view().raw());
  for (int64_t i = 0; i < length; ++i)
    bits[i] = static_cast<uint16_t>(random.below(2) << 15 | 0x3f80 | random.below(128));
  copy.store();
  repeat_start(exec, tensor, length);
}

// The classes of operations, each at the sizes and as often as one step has them.
class ClassBench {
 public:
  ClassBench(const Exec& exec, const ModelConfig& config, const MicroBatch& batch, int64_t loss_chunk,
             const Ceilings& ceilings)
      : exec_(exec),
        config_(config),
        batch_(batch),
        tokens_(batch.size()),
        loss_chunk_(loss_chunk),
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
    double milliseconds = 0, flops = 0, clear_and_add = 0, in_fp8 = 0, casts = 0;
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
      // As of the first micro-batch of a step: written, not added to.
      const TensorView dbias = bias ? db : TensorView();
      const double weight = timed(exec_, 20, [&] { linear_backward_weight(exec_, x, y, dw, dbias, false); });
      clear_and_add += timed(exec_, 20, [&] {
        zero_tensor(exec_, dw);
        linear_backward_weight(exec_, x, y, dw, dbias);
      });
      clear_and_add -= weight;
      fmt::print("  {:>34} {:9.0f} {:9.0f} {:9.0f}\n", fmt::format("{} x {} x {}", tokens_, in, out),
                 one / forward / 1e9, one / input / 1e9, one / weight / 1e9);
      milliseconds += forward + input + weight;
      flops += 3 * one;
      if (cuda::device_info().major == 9) add_fp8(x, w, y, dx, dw, in_fp8, casts);
    }
    if (in_fp8 > 0)
      fmt::print("  the same in fp8: {:.1f} ms, and {:.1f} ms for codes of x, W and dy\n", config_.layers * in_fp8,
                 config_.layers * casts);
    fmt::print("  clearing the layers' gradients and adding to them instead of writing them: {:+.2f} ms\n",
               config_.layers * clear_and_add);
    return {"products of the layers", config_.layers * milliseconds, config_.layers * flops_floor(flops)};
  }

  // A product forward and backward from e4m3 codes, and rounding to them as a layer does that knows nothing of its
  // tensors.
  void add_fp8(TensorView x, TensorView w, TensorView y, TensorView dx, TensorView dw, double& products,
               double& casts) {
    const ArenaScope scope(arena_);
    const auto codes = [&](TensorView of) { return fp8_allocate(arena_, of.dim(0), of.dim(1), Fp8Layout::both); };
    const Fp8Matrix of_x = codes(x), of_w = codes(w), of_y = codes(y);
    const auto only = [](Fp8Matrix matrix, Fp8Layout layout) {
      (layout == Fp8Layout::by_row ? matrix.by_column : matrix.by_row) = nullptr;
      return matrix;
    };
    fp8_quantize(exec_, y, of_y);
    for (const auto& [tensor, matrix] : {std::pair{x, of_x}, {w, of_w}}) {
      for (const Fp8Layout layout : {Fp8Layout::by_row, Fp8Layout::by_column})
        casts += timed(exec_, 20, [&] { fp8_quantize(exec_, tensor, only(matrix, layout)); });
    }
    casts += timed(exec_, 20, [&] { fp8_quantize(exec_, y, of_y); });
    const double forward = timed(exec_, 20, [&] { fp8_multiply(exec_, fp8_rows(of_x), fp8_rows(of_w), {}, {}, y); });
    const double input = timed(exec_, 20, [&] { fp8_multiply(exec_, fp8_rows(of_y), fp8_columns(of_w), {}, {}, dx); });
    const double weight =
        timed(exec_, 20, [&] { fp8_multiply(exec_, fp8_columns(of_y), fp8_columns(of_x), {}, {}, dw); });
    const double one = 2e-9 * static_cast<double>(x.elements()) * static_cast<double>(w.dim(0));
    fmt::print("  {:>34} {:9.0f} {:9.0f} {:9.0f}\n", "fp8", one / forward, one / input, one / weight);
    products += forward + input + weight;
  }

  void attention_class(Attention& attention, std::vector<ClassTime>& times) {
    const ArenaScope scope(arena_);
    const int d = config_.head_dim;
    const AttentionShape shape = {config_.heads, config_.kv_heads, d, static_cast<float>(1 / std::sqrt(d))};
    const Shape wide = {tokens_, config_.heads, d}, narrow = {tokens_, config_.kv_heads, d};
    const AttentionOperands operands = {noise(wide), noise(narrow), noise(narrow), noise(wide),
                                        floats({config_.heads, tokens_})};
    const AttentionGradients gradients = {noise(wide), noise(wide), noise(narrow), noise(narrow)};
    const PackedSequences sequences = {batch_.cu_seqlens, {}};
    const auto state = attention.make_state();
    const double forward =
        timed(exec_, 20, [&] { attention.forward(exec_, 0, shape, sequences, operands, *state, false); });
    const double backward =
        timed(exec_, 20, [&] { attention.backward(exec_, 0, shape, sequences, operands, gradients, *state); });
    double pairs = 0;
    for (size_t i = 1; i < batch_.cu_seqlens.size(); ++i) {
      const double length = batch_.cu_seqlens[i] - batch_.cu_seqlens[i - 1];
      pairs += 0.5 * length * (length + 1);
    }
    const double flops = 4.0 * d * config_.heads * pairs;
    times.push_back({fmt::format("attention forward ({:.0f} TFLOP/s)", flops / forward / 1e9), config_.layers * forward,
                     config_.layers * flops_floor(flops)});
    times.push_back({fmt::format("attention backward ({:.0f} TFLOP/s)", 2.5 * flops / backward / 1e9),
                     config_.layers * backward, config_.layers * flops_floor(2.5 * flops)});
  }

  // Norms, rope and SwiGLU, with what backward brings back without recompute.
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
    std::copy(batch_.positions.begin(), batch_.positions.end(), staged.view().as<int32_t>());
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
    const double layer = 2 * norm + 2 * norm_back + swiglu + swiglu_back + rope + rope_back;
    const double bytes = 2 * norm_bytes + 2 * norm_back_bytes + swiglu_bytes + swiglu_back_bytes + 2 * rope_bytes;
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
      loss_forward_backward(exec_, hidden, weight, labels, weights, loss_chunk_, {}, dhidden, dweight,
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
    const HostCopy staged(ids);
    std::copy(batch_.tokens.begin(), batch_.tokens.end(), staged.view().as<int32_t>());
    staged.store();
    const double time = timed(exec_, 10, [&] {
      embedding_forward(exec_, ids, table, x);
      embedding_backward(exec_, ids, x, dtable);
    });
    // A token that is a third of all, as in padded or synthetic data.
    for (int64_t i = 0; i < tokens_; i += 3) staged.view().as<int32_t>()[i] = 5;
    staged.store();
    fmt::print("  embedding backward, a third of the tokens alike: {:.2f} ms\n",
               timed(exec_, 3, [&] { embedding_backward(exec_, ids, x, dtable); }));
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
      clip_by_norm(exec_, g, 1.0, clip);
      adamw_update(exec_, {1e-4f, 0.9f, 0.95f, 1e-8f, 0.1f, 10, 1.0f}, std::span(&all, 1), {p, g, m, v, weights, clip});
    });
    const double share = static_cast<double>(parameters()) / static_cast<double>(n);
    // Norm 4; update: p, m, v both ways, g, weight.
    return {"norm, clip, AdamW", time * share, bytes_floor(34.0 * static_cast<double>(parameters()))};
  }

  int64_t parameters() const {
    const int64_t h = config_.hidden_size, q = int64_t{config_.heads} * config_.head_dim,
                  kv = int64_t{config_.kv_heads} * config_.head_dim;
    return config_.vocab_size * h + config_.layers * h * (2 * q + 2 * kv + 3 * config_.intermediate_size);
  }

  Exec exec_;
  ModelConfig config_;
  const MicroBatch& batch_;
  int64_t tokens_, loss_chunk_;
  Ceilings ceilings_;
  Arena arena_, scratch_;
};

}  // namespace

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void repeat_start(const Exec& exec, TensorView tensor, int64_t elements) {
  const auto part = [&](int64_t begin, int64_t end) {
    return TensorView(static_cast<char*>(tensor.raw()) + begin * dtype_bytes(tensor.dtype()), tensor.dtype(),
                      {end - begin}, tensor.device());
  };
  for (int64_t done = elements; done < tensor.elements(); done *= 2) {
    const int64_t more = std::min(done, tensor.elements() - done);
    copy_tensor(exec, part(0, more), part(done, done + more));
  }
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

std::vector<ClassTime> measure_classes(const Exec& exec, const ModelConfig& config, const MicroBatch& batch,
                                       int64_t loss_chunk, const Ceilings& ceilings, Attention& attention) {
  return ClassBench(exec, config, batch, loss_chunk, ceilings).run(attention);
}

}  // namespace sb
