// Times attention on CUDA as the trainer calls it, for every way to select: what selecting adds to forward and
// backward, and what measuring the coverage does. bf16, one sequence, random operands.
//   attention_cuda_patterns [part of a case's name]

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <string>
#include <thread>
#include <vector>

#include "attention/gpu/cuda_attention.h"
#include "bench/attention/device_tensor.h"
#include "device/cuda.h"
#include "device/memory.h"

namespace {

using namespace sb;

template <typename Body>
double median_ms(void* stream, int repeats, Body body) {
  const auto begin = cuda::make_event(), end = cuda::make_event();
  body();
  cuda::synchronize(stream);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  body();
  std::vector<double> times;
  constexpr int kRow = 6;  // so that nothing waits for the host
  for (int i = 0; i < repeats; ++i) {
    cuda::record(begin.get(), stream);
    for (int j = 0; j < kRow; ++j) body();
    cuda::record(end.get(), stream);
    cuda::synchronize(stream);
    times.push_back(cuda::milliseconds_between(begin.get(), end.get()) / kRow);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void run(const std::string& filter, const std::string& name, SelectionConfig selection, const AttentionShape& shape,
         int32_t tokens, int coverage_rows) {
  if (name.find(filter) == std::string::npos) return;
  const auto stream = cuda::make_stream();
  const int64_t heads = shape.heads, kv_heads = shape.kv_heads, d = shape.head_dim;
  const DeviceTensor q({tokens, heads, d}, DType::bf16, 1), k({tokens, kv_heads, d}, DType::bf16, 2),
      v({tokens, kv_heads, d}, DType::bf16, 3), dout({tokens, heads, d}, DType::bf16, 4),
      out({tokens, heads, d}, DType::bf16, 5), lse({heads, tokens}, DType::f32, 6),
      dq({tokens, heads, d}, DType::bf16, 7), dk({tokens, kv_heads, d}, DType::bf16, 8),
      dv({tokens, kv_heads, d}, DType::bf16, 9);
  const AttentionOperands operands{q.view(), k.view(), v.view(), out.view(), lse.view()};
  const std::vector<int32_t> cu{0, tokens};
  const PackedSequences sequences{cu, {}};
  double forward[2] = {}, replayed = 0, backward = 0, density = 0;
  for (const int rows : {0, coverage_rows}) {
    CudaAttentionOptions options;
    options.attention.layers = 1;
    options.attention.selection = selection;
    options.attention.coverage_rows = rows;
    const auto attention = make_cuda_attention(options);
    Arena scratch = make_arena("scratch", attention->scratch_bytes(shape, tokens, 1), DeviceKind::cuda);
    const Exec exec{.device = DeviceKind::cuda, .stream = stream.get(), .scratch = &scratch};
    const auto state = attention->make_state();
    const int repeats = 5;
    forward[rows > 0] = median_ms(stream.get(), repeats,
                                  [&] { attention->forward(exec, 0, shape, sequences, operands, *state, false); });
    if (rows == 0) {
      replayed = median_ms(stream.get(), repeats,
                           [&] { attention->forward(exec, 0, shape, sequences, operands, *state, true); });
      backward = median_ms(stream.get(), repeats, [&] {
        attention->backward(exec, 0, shape, sequences, operands, {dout.view(), dq.view(), dk.view(), dv.view()},
                            *state);
      });
    }
    density = attention->take_report().layers[0].density();
    if (coverage_rows == 0) break;
  }
  const double all = replayed + backward;
  fmt::print("{:<34} {:4.1f} % of the pairs, forward {:.3f} ms, backward {:.3f}; selecting {:.3f} ({:.1f} %)", name,
             100 * density, replayed, backward, forward[0] - replayed, 100 * (forward[0] - replayed) / all);
  if (coverage_rows > 0)
    fmt::print("; coverage of {} rows {:.3f} ({:.1f} %)", coverage_rows, forward[1] - forward[0],
               100 * (forward[1] - forward[0]) / all);
  fmt::print("\n");
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  using enum SelectionPattern;
  const std::string filter = argc > 1 ? argv[1] : "";
  const AttentionShape large{16, 2, 128, 1.0f / std::sqrt(128.0f)}, small{14, 2, 64, 0.125f};
  for (const int32_t tokens : {32768, 131072})
    for (const AttentionShape& shape : {large, small}) {
      const std::string what =
          fmt::format(" {}:{} d{} {}K", shape.heads, shape.kv_heads, shape.head_dim, tokens / 1024);
      SelectionConfig selection;
      selection.score = BlockScore::moments;
      selection.budget = tokens / 20;  // of the pairs 10 %
      run(filter, "topk" + what, selection, shape, tokens, 16);
      if (tokens > 32768 && shape.head_dim == 64) continue;
      selection.pattern = topp;
      run(filter, "topp" + what, selection, shape, tokens, 0);
      selection.pattern = mass;
      run(filter, "mass" + what, selection, shape, tokens, 0);
      selection.order = SelectionOrder::lookahead;
      run(filter, "mass, lookahead" + what, selection, shape, tokens, 0);
      selection.pattern = vertical_slash;
      selection.vertical_cap = 1000 * (tokens / 32768);
      selection.slash_cap = 16;
      run(filter, "vertical_slash" + what, selection, shape, tokens, 0);
    }
  return 0;
}
