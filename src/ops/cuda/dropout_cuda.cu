#include "device/kernel.cuh"
#include "ops/backends.h"
#include "ops/cuda/vector.cuh"
#include "ops/random/dropout_bits.h"

namespace sb::cuda {
namespace {

constexpr int kThreads = 256;

// A thread has the channels that one block of random bits decides; N of them are read and written at once.
template <typename T, int N, bool kAdd>
__global__ void __launch_bounds__(kThreads)
    dropout_kernel(const T* from, T* to, const int32_t* sequences, const int32_t* positions, int64_t rows,
                   int64_t width, int64_t first_group, uint64_t key, uint32_t stream, uint32_t threshold, float scale) {
  const int64_t groups = (width + kDropoutChannels - 1) / kDropoutChannels;
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < rows * groups; i += stride) {
    const int64_t row = i / groups, group = i % groups;
    const DropoutBits bits =
        dropout_bits(key, static_cast<uint32_t>(first_group + group), static_cast<uint32_t>(positions[row]),
                     static_cast<uint32_t>(sequences[row]), stream);
    const int64_t first = row * width + group * kDropoutChannels;
#pragma unroll
    for (int c = 0; c < kDropoutChannels; c += N) {
      if (group * kDropoutChannels + c >= width) break;
      float x[N], y[N] = {};
      load(from + first + c, x);
      if constexpr (kAdd) load(to + first + c, y);
#pragma unroll
      for (int k = 0; k < N; ++k) y[k] += bits.of(c + k) < threshold ? 0.0f : scale * x[k];
      store(to + first + c, y);
    }
  }
}

}  // namespace

void dropout(const Exec& exec, const DropoutRows& rows, TensorView from, TensorView to, bool add) {
  const int64_t count = from.dim(0), width = from.dim(1);
  SB_CHECK(rows.first_channel % kDropoutChannels == 0, "dropout from channel {} on", rows.first_channel);
  if (count == 0 || width == 0) return;
  with_type(from.dtype(), "dropout", [&](auto element) {
    using T = decltype(element);
    const auto launch = [&]<int N>() {
      const auto kernel = add ? dropout_kernel<T, N, true> : dropout_kernel<T, N, false>;
      const int64_t work = count * ceil_div(width, kDropoutChannels);
      launch_kernel(kernel, {grid_for(ceil_div(work, kThreads)), kThreads, 0, stream_of(exec)}, data<T>(from),
                    data<T>(to), data<int32_t>(rows.sequences), data<int32_t>(rows.positions), count, width,
                    rows.first_channel / kDropoutChannels, rows.key, rows.stream, dropout_threshold(rows.probability),
                    dropout_scale(rows.probability));
    };
    if (vectors_fit<T>(width, {from.raw(), to.raw()}))
      launch.template operator()<kVector<T>>();
    else
      launch.template operator()<1>();
  });
  SB_CUDA_LAUNCHED();
}

}  // namespace sb::cuda
