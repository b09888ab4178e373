// Times attention of a sequence's last piece, 4K queries on all keys before them, against that of the whole sequence:
// (query, key) pairs per second, forward and backward, as the trainer calls them, on lists that were selected before.
// Both take turns, each after a rest, as the card remembers what it did before. The backward of a piece adds to sums in
// fp32, that of the whole writes bf16. bf16, topk of 10 % of the pairs, random operands. Exit code 1 where a piece has
// less than 90 % of the whole's pairs per second.
//   attention_prefix_bench [part of a case's name]

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "attention/gpu/cuda_attention.h"
#include "bench/attention/device_tensor.h"
#include "device/cuda.h"
#include "device/memory.h"

namespace {

using namespace sb;

constexpr int64_t kPiece = 4096;
constexpr double kBar = 0.9;

// Results, which need no values before.
class Room {
 public:
  Room(Shape shape, DType dtype)
      : arena_(make_arena("results", shape.elements() * dtype_bytes(dtype), DeviceKind::cuda)),
        view_(arena_.allocate(dtype, shape)) {}
  const TensorView& view() const { return view_; }

 private:
  Arena arena_;
  TensorView view_;
};

// The whole sequence, and its pieces: everything before the last 4K tokens, and these.
class Bench {
 public:
  Bench(const AttentionShape& shape, int64_t prefix)
      : shape_(shape),
        prefix_(prefix),
        tokens_(prefix + kPiece),
        q_(wide(), DType::bf16, 1),
        k_(narrow(), DType::bf16, 2),
        v_(narrow(), DType::bf16, 3),
        dout_(wide(), DType::bf16, 4),
        out_(wide(), DType::bf16),
        dq_(wide(), DType::bf16),
        dk_(narrow(), DType::bf16),
        dv_(narrow(), DType::bf16),
        lse_({shape.heads, tokens_}, DType::f32),
        piece_lse_({shape.heads, kPiece}, DType::f32),
        dk_sum_(narrow(), DType::f32, 5),
        dv_sum_(narrow(), DType::f32, 6),
        attention_(make_cuda_attention(options())),
        whole_state_(attention_->make_state()),
        piece_state_(attention_->make_state()) {}

  // Whether the piece keeps up in both directions.
  bool run(const std::string& name) {
    const Attention::PieceLimits limits{prefix_, tokens_, DType::bf16, 2, 0, 1, true};
    scratch_ = make_arena(
        "scratch",
        std::max(attention_->scratch_bytes(shape_, tokens_, 1), attention_->piece_bytes(shape_, limits, 1).scratch),
        DeviceKind::cuda);
    const double whole_pairs = selected([&] { forward_whole(false); });
    forward_prefix();
    const double piece_pairs = selected([&] { forward_piece(false); });
    const bool forward = compare(
        name + " forward", whole_pairs, piece_pairs, [&] { forward_whole(true); }, [&] { forward_piece(true); });
    const bool backward = compare(
        name + " backward", whole_pairs, piece_pairs, [&] { backward_whole(); }, [&] { backward_piece(); });
    return forward && backward;
  }

 private:
  Shape wide() const { return {tokens_, shape_.heads, shape_.head_dim}; }
  Shape narrow() const { return {tokens_, shape_.kv_heads, shape_.head_dim}; }
  CudaAttentionOptions options() const {
    CudaAttentionOptions options;
    options.attention.layers = 1;
    options.attention.selection.score = BlockScore::moments;
    options.attention.selection.budget = tokens_ / 20;  // a query sees half of the tokens on average
    return options;
  }
  Exec exec() { return {.device = DeviceKind::cuda, .pool = &pool_, .stream = stream_.get(), .scratch = &scratch_}; }

  // Pairs that a forward selected.
  double selected(const std::function<void()>& forward) {
    attention_->take_report();
    forward();
    cuda::synchronize(stream_.get());
    return static_cast<double>(attention_->take_report().total().pairs);
  }

  AttentionOperands operands() const { return {q_.view(), k_.view(), v_.view(), out_.view(), lse_.view()}; }
  void forward_whole(bool replay) {
    attention_->forward(exec(), 0, shape_, {whole_, {}}, operands(), *whole_state_, replay);
  }
  void backward_whole() {
    attention_->backward(exec(), 0, shape_, {whole_, {}}, operands(),
                         {dout_.view(), dq_.view(), dk_.view(), dv_.view()}, *whole_state_);
  }

  // The tokens before the piece leave their statistics for it. What else they leave is not used.
  void forward_prefix() {
    const int32_t cu_seqlens[] = {0, static_cast<int32_t>(prefix_)};
    PackedSequences sequences{cu_seqlens, {}};
    sequences.piece = {0, tokens_, std::span(pages_).first(1)};
    const Room lse({shape_.heads, prefix_}, DType::f32);
    const auto state = attention_->make_state();
    attention_->forward(exec(), 0, shape_, sequences,
                        {q_.view().rows(0, prefix_), k_.view(), v_.view(), out_.view().rows(0, prefix_), lse.view()},
                        *state, false);
    cuda::synchronize(stream_.get());
  }
  PackedSequences piece() const {
    PackedSequences sequences{own_, {}};
    sequences.piece = {prefix_, tokens_, pages_};
    return sequences;
  }
  AttentionOperands piece_operands() const {
    return {q_.view().rows(prefix_, tokens_), k_.view(), v_.view(), out_.view().rows(prefix_, tokens_),
            piece_lse_.view()};
  }
  void forward_piece(bool replay) {
    attention_->forward(exec(), 0, shape_, piece(), piece_operands(), *piece_state_, replay);
  }
  void backward_piece() {
    attention_->backward(
        exec(), 0, shape_, piece(), piece_operands(),
        {dout_.view().rows(prefix_, tokens_), dq_.view().rows(prefix_, tokens_), dk_sum_.view(), dv_sum_.view()},
        *piece_state_);
  }

  // Milliseconds of a call, over so many in a row that neither the host nor a launch counts.
  double row_ms(const std::function<void()>& body, int calls) {
    std::this_thread::sleep_for(std::chrono::milliseconds(150));
    const auto begin = cuda::make_event(), end = cuda::make_event();
    body();
    cuda::record(begin.get(), stream_.get());
    for (int i = 0; i < calls; ++i) body();
    cuda::record(end.get(), stream_.get());
    cuda::synchronize(stream_.get());
    return cuda::milliseconds_between(begin.get(), end.get()) / calls;
  }

  bool compare(const std::string& name, double whole_pairs, double piece_pairs, const std::function<void()>& whole,
               const std::function<void()>& piece) {
    constexpr double kRowMs = 40;
    const auto calls = [&](const std::function<void()>& body) {
      body();  // compiled and warm
      return std::clamp(static_cast<int>(kRowMs / row_ms(body, 2)), 2, 100);
    };
    const int whole_calls = calls(whole), piece_calls = calls(piece);
    std::vector<double> whole_times, piece_times;
    for (int turn = 0; turn < 3; ++turn) {
      whole_times.push_back(row_ms(whole, whole_calls));
      piece_times.push_back(row_ms(piece, piece_calls));
    }
    std::ranges::sort(whole_times);
    std::ranges::sort(piece_times);
    const double whole_rate = whole_pairs / whole_times[1], piece_rate = piece_pairs / piece_times[1];
    const double flops = 4.0 * shape_.head_dim * shape_.group() * (name.ends_with("backward") ? 2.5 : 1);
    const double share = piece_rate / whole_rate;
    fmt::print(
        "{:<34} whole {:8.3f} ms {:4.0f} TFLOP/s | piece {:8.3f} ms {:4.0f} TFLOP/s, {:4.1f} % of the pairs | "
        "{:.3f} of the whole's pairs per second{}\n",
        name, whole_times[1], flops * whole_rate / 1e9, piece_times[1], flops * piece_rate / 1e9,
        100 * piece_pairs / whole_pairs, share, share < kBar ? ", BELOW THE BAR" : "");
    std::fflush(stdout);
    return share >= kBar;
  }

  AttentionShape shape_;
  int64_t prefix_, tokens_;
  DeviceTensor q_, k_, v_, dout_;
  Room out_, dq_, dk_, dv_, lse_, piece_lse_;
  DeviceTensor dk_sum_, dv_sum_;
  std::unique_ptr<SelectingAttention> attention_;
  std::unique_ptr<AttentionState> whole_state_, piece_state_;
  std::shared_ptr<void> stream_ = cuda::make_stream();
  Arena scratch_{"none", 0};
  ThreadPool pool_{4};
  std::vector<int32_t> whole_{0, static_cast<int32_t>(tokens_)}, own_{0, static_cast<int32_t>(kPiece)};
  std::vector<KeyPage> pages_{{0, 0}, {prefix_, prefix_}};
};

}  // namespace

int main(int argc, char** argv) {
  const std::string filter = argc > 1 ? argv[1] : "";
  bool all = true;
  for (const auto& [heads, d] : {std::pair{16, 128}, {14, 64}})
    for (const int64_t prefix : {32768, 131072}) {
      const std::string name = fmt::format("4K on {}K {}:2 d{}", prefix / 1024, heads, d);
      if (name.find(filter) == std::string::npos) continue;
      all = Bench({heads, 2, d, 1.f / std::sqrt(static_cast<float>(d))}, prefix).run(name) && all;
    }
  return all ? 0 : 1;
}
