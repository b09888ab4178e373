// One attention layer of a ring of GPUs, by thread ranks that share one GPU and its transfers through host memory: what
// selecting pairs and making lists takes on the host and on the device. `topk`, budget 8,192, 16:2 heads of 128, bf16,
// random operands. Times are those of the slowest rank, by the clock; selecting is a forward less one with the lists of
// the last.
//   bench_ring_cuda [tokens]
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <thread>
#include <vector>

#include "bench/attention/device_tensor.h"
#include "comm/device/device_communicator.h"
#include "comm/thread_communicator.h"
#include "device/context.h"
#include "parallel/ring/gpu/cuda_ring_attention.h"

namespace {

using namespace sb;

struct Times {
  double first = 0, forward = 0, replayed = 0, backward = 0;  // milliseconds
  double density = 0;
  double layer() const { return forward + backward; }
  double selecting() const { return forward - replayed; }
};

// Of a rank's call, from when all ranks are ready until all are done.
template <typename Body>
double milliseconds(const DeviceContext& context, Communicator& world, Body body) {
  context.synchronize();
  world.barrier();
  const auto begin = std::chrono::steady_clock::now();
  body();
  context.synchronize();
  world.barrier();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

template <typename Body>
double median_ms(const DeviceContext& context, Communicator& world, int repeats, Body body) {
  std::vector<double> times;
  for (int i = 0; i < repeats; ++i) times.push_back(milliseconds(context, world, body));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

Times run(int32_t whole, int ranks, bool on_device) {
  const AttentionShape shape{16, 2, 128, 1.0f / std::sqrt(128.0f)};
  RingAttention::Options options;
  options.selection.budget = 8192;
  options.layers = 1;
  options.dtype = DType::bf16;
  options.lists_on_device = on_device;
  const int threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / ranks);
  Times times;
  run_thread_ranks(ranks, [&](Communicator& world) {
    ThreadPool pool(threads);
    const DeviceContext context(DeviceKind::cuda, pool);
    const auto group = world.split(0, world.rank(), "cp");
    const auto data = make_staged_communicator(world, {DeviceKind::cuda, context.exec().stream});
    const auto ring = make_cuda_ring_attention(*group, *data, options);
    const std::vector<int32_t> cu_seqlens = {0, whole};
    const ContextLayout layout(options.placement, ranks, options.selection.block, cu_seqlens);
    const std::vector<int32_t> local = layout.local_cu_seqlens(world.rank());
    const int64_t count = local.back();
    const Shape queries = {count, shape.heads, shape.head_dim}, keys = {count, shape.kv_heads, shape.head_dim};
    const auto seed = static_cast<uint64_t>(100 * world.rank());
    const DeviceTensor q(queries, DType::bf16, seed), k(keys, DType::bf16, seed + 1), v(keys, DType::bf16, seed + 2),
        dout(queries, DType::bf16, seed + 3), out(queries, DType::bf16, 0), lse({shape.heads, count}, DType::f32, 0),
        dq(queries, DType::bf16, 0), dk(keys, DType::bf16, 0), dv(keys, DType::bf16, 0);
    const AttentionOperands operands{q.view(), k.view(), v.view(), out.view(), lse.view()};
    const AttentionGradients gradients{dout.view(), dq.view(), dk.view(), dv.view()};
    const PackedSequences sequences{local, {}, cu_seqlens};
    Arena scratch = make_arena("scratch", ring->scratch_bytes(shape, count, threads), DeviceKind::cuda);
    Exec exec = context.exec();
    exec.scratch = &scratch;
    const auto state = ring->make_state();
    const auto forward = [&](bool replay) { ring->forward(exec, 0, shape, sequences, operands, *state, replay); };
    const int repeats = on_device ? 7 : 3;
    Times own;
    own.first = milliseconds(context, world, [&] { forward(false); });
    own.forward = median_ms(context, world, repeats, [&] { forward(false); });
    own.replayed = median_ms(context, world, repeats, [&] { forward(true); });
    const auto backward = [&] { ring->backward(exec, 0, shape, sequences, operands, gradients, *state); };
    backward();
    own.backward = median_ms(context, world, repeats, backward);
    own.density = ring->take_report().layers[0].density();
    data->barrier();
    if (world.rank() == 0) times = own;
  });
  return times;
}

}  // namespace

int main(int argc, char** argv) {
  const int only = argc > 1 ? std::atoi(argv[1]) : 0;
  fmt::print("{:>7} {:>3} {:<7} {:>9} {:>9} {:>9} {:>9} {:>9} {:>10}\n", "tokens", "cp", "lists", "pairs %", "first ms",
             "layer ms", "forward", "backward", "selecting");
  for (const int32_t tokens : {32768, 65536}) {
    if (only != 0 && tokens != only) continue;
    for (const int ranks : {1, 2, 4}) {
      double layer[2] = {};
      for (const bool on_device : {true, false}) {
        if (ranks == 1 && !on_device) continue;  // no ring: for comparison
        const Times times = run(tokens, ranks, on_device);
        layer[on_device] = times.layer();
        fmt::print("{:>7} {:>3} {:<7} {:>9.1f} {:>9.1f} {:>9.2f} {:>9.2f} {:>9.2f} {:>10.2f}\n", tokens, ranks,
                   on_device ? "device" : "host", 100 * times.density, times.first, times.layer(), times.replayed,
                   times.backward, times.selecting());
        std::fflush(stdout);
      }
      if (ranks > 1) fmt::print("{:>7} {:>3} host over device: {:.2f}\n", tokens, ranks, layer[0] / layer[1]);
    }
  }
}
