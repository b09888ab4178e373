#include <cub/device/device_radix_sort.cuh>

#include "device/kernel.cuh"
#include "ops/backends.h"
#include "ops/cuda/vector.cuh"

namespace sb::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kAtOnce = 8;

template <typename T, int N>
__global__ void __launch_bounds__(kThreads) forward_kernel(const int32_t* tokens, const T* table, int64_t first,
                                                           int64_t rows, int64_t count, int64_t width, T* x) {
  for (int64_t t = blockIdx.x; t < count; t += gridDim.x) {
    const int64_t row = tokens[t] - first;
    const bool here = 0 <= row && row < rows;
    const T* from = table + row * width;
    for (int64_t c = threadIdx.x * N; c < width; c += kThreads * N) {
      float value[N] = {};
      if (here) load(from + c, value);
      store(x + t * width + c, value);
    }
  }
}

__global__ void count_up(int32_t* to, int64_t count) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    to[i] = static_cast<int32_t>(i);
  }
}

// `tokens` ascend and `places` say where each came from, in order. The block that meets a token first adds all of its
// gradients, one after the other: no two blocks share a row of the table. Several are fetched at a time, since one
// token may be a large part of all.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(const int32_t* tokens, const int32_t* places, const T* dx, int64_t first_row, int64_t rows,
                    int64_t count, int64_t width, float* dtable) {
  const int64_t c = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * N;
  for (int64_t first = blockIdx.x; first < count; first += gridDim.x) {
    const int32_t token = tokens[first];
    if ((first > 0 && tokens[first - 1] == token) || c >= width) continue;
    if (token < first_row || token >= first_row + rows) continue;
    float* row = dtable + (token - first_row) * width + c;
    float sum[N];
    load_f32(row, sum);
    bool more = true;
    for (int64_t i = first; more; i += kAtOnce) {
      float value[kAtOnce][N];
      bool same[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        same[j] = i + j < count && tokens[i + j] == token;
        if (same[j]) load(dx + int64_t{places[i + j]} * width + c, value[j]);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (!same[j]) continue;
#pragma unroll
        for (int k = 0; k < N; ++k) sum[k] += value[j][k];
      }
      more = same[kAtOnce - 1];
    }
    store_f32(row, sum);
  }
}

size_t sort_bytes(int64_t count) {
  size_t bytes = 0;
  const int32_t* none = nullptr;
  int32_t* out = nullptr;
  SB_CUDA_CHECK(cub::DeviceRadixSort::SortPairs(nullptr, bytes, none, out, none, out, static_cast<int>(count)));
  return bytes;
}

}  // namespace

int64_t embedding_scratch_bytes(int64_t tokens) {
  return 3 * Arena::rounded(tokens * static_cast<int64_t>(sizeof(int32_t))) +
         Arena::rounded(static_cast<int64_t>(sort_bytes(tokens)));
}

void embedding_forward(const Exec& exec, TensorView tokens, TensorView table, TensorView x, int64_t first) {
  const int64_t count = x.dim(0), width = x.dim(1);
  if (count == 0 || width == 0) return;
  with_type(x.dtype(), "embedding_forward", [&](auto element) {
    using T = decltype(element);
    const auto launch = [&]<int N>() {
      launch_kernel(forward_kernel<T, N>, {grid_for(count), kThreads, 0, stream_of(exec)}, data<int32_t>(tokens),
                    data<T>(table), first, table.dim(0), count, width, data<T>(x));
    };
    if (vectors_fit<T>(width, {table.raw(), x.raw()}))
      launch.template operator()<kVector<T>>();
    else
      launch.template operator()<1>();
  });
  SB_CUDA_LAUNCHED();
}

void embedding_backward(const Exec& exec, TensorView tokens, TensorView dx, TensorView dtable, int64_t first,
                        int64_t vocabulary) {
  const int64_t count = dx.dim(0), width = dx.dim(1);
  if (count == 0 || width == 0) return;
  const ArenaScope scope(*exec.scratch);
  int32_t* places = exec.scratch->allocate_array<int32_t>(count);
  int32_t* sorted_tokens = exec.scratch->allocate_array<int32_t>(count);
  int32_t* sorted_places = exec.scratch->allocate_array<int32_t>(count);
  size_t bytes = sort_bytes(count);
  void* temporary = exec.scratch->allocate_bytes(static_cast<int64_t>(bytes));
  launch_kernel(count_up, {grid_for(ceil_div(count, 256)), 256, 0, stream_of(exec)}, places, count);
  SB_CUDA_LAUNCHED();
  // The radix sort is stable: places of equal tokens stay in order.
  int bits = 1;
  while (bits < 31 && (int64_t{1} << bits) < vocabulary) ++bits;
  SB_CUDA_CHECK(cub::DeviceRadixSort::SortPairs(temporary, bytes, data<int32_t>(tokens), sorted_tokens, places,
                                                sorted_places, static_cast<int>(count), 0, bits, stream_of(exec)));
  with_type(dx.dtype(), "embedding_backward", [&](auto element) {
    using T = decltype(element);
    const auto launch = [&]<int N>() {
      const dim3 grid(grid_for(count), static_cast<unsigned>(ceil_div(width, kThreads * N)));
      launch_kernel(backward_kernel<T, N>, {grid, kThreads, 0, stream_of(exec)}, sorted_tokens, sorted_places,
                    data<T>(dx), first, dtable.dim(0), count, width, dtable.f32());
    };
    if (vectors_fit<T>(width, {dx.raw(), dtable.raw()}))
      launch.template operator()<kVector<T>>();
    else
      launch.template operator()<1>();
  });
  SB_CUDA_LAUNCHED();
}

}  // namespace sb::cuda
