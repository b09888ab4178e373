#include "ops/backends.h"
#include "ops/cuda/vector.cuh"

namespace sb::cuda {
namespace {

constexpr int kThreads = 256;

template <typename T>
__device__ float sigmoid(float x) {
  if constexpr (sizeof(T) == 4) {
    return 1.0f / (1.0f + expf(-x));
  } else {
    return __fdividef(1.0f, 1.0f + __expf(-x));
  }
}

// A block has kThreads·N columns of a row at a time.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const T* gate_up, int64_t pieces, int64_t pieces_per_row, int64_t width, T* h) {
  for (int64_t piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
    const int64_t row = piece / pieces_per_row;
    const int64_t c = (piece % pieces_per_row * kThreads + threadIdx.x) * N;
    if (c >= width) continue;
    float gate[N], up[N];
    load(gate_up + 2 * row * width + c, gate);
    load(gate_up + (2 * row + 1) * width + c, up);
#pragma unroll
    for (int i = 0; i < N; ++i) gate[i] = gate[i] * sigmoid<T>(gate[i]) * up[i];
    store(h + row * width + c, gate);
  }
}

// Here a thread has two vectors, kThreads apart, all under way before the first is used.
constexpr int kVectors = 2;

template <typename T, int N, bool kWithForward>
__global__ void __launch_bounds__(kThreads) backward_kernel(const T* gate_up, const T* dh, int64_t pieces,
                                                            int64_t pieces_per_row, int64_t width, T* dgate_up, T* h) {
  for (int64_t piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
    const int64_t row = piece / pieces_per_row;
    const int64_t first = (piece % pieces_per_row * kThreads * kVectors + threadIdx.x) * N;
    float gate[kVectors][N], up[kVectors][N], g[kVectors][N];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int64_t c = first + int64_t{v} * kThreads * N;
      if (c >= width) continue;
      load(gate_up + 2 * row * width + c, gate[v]);
      load(gate_up + (2 * row + 1) * width + c, up[v]);
      load(dh + row * width + c, g[v]);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int64_t c = first + int64_t{v} * kThreads * N;
      if (c >= width) continue;
      float inner[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float s = sigmoid<T>(gate[v][i]), silu = gate[v][i] * s;
        inner[i] = silu * up[v][i];
        gate[v][i] = g[v][i] * up[v][i] * (s * (1.0f + gate[v][i] * (1.0f - s)));
        up[v][i] = g[v][i] * silu;
      }
      store(dgate_up + 2 * row * width + c, gate[v]);
      store(dgate_up + (2 * row + 1) * width + c, up[v]);
      if constexpr (kWithForward) store(h + row * width + c, inner);
    }
  }
}

}  // namespace

void swiglu_forward(const Exec& exec, TensorView gate_up, TensorView h) {
  const int64_t rows = h.dim(0), width = h.dim(1);
  if (rows == 0 || width == 0) return;
  with_type(h.dtype(), "swiglu_forward", [&](auto element) {
    using T = decltype(element);
    const auto launch = [&]<int N>() {
      const int64_t per_row = ceil_div(width, kThreads * N);
      forward_kernel<T, N><<<grid_for(rows * per_row), kThreads, 0, stream_of(exec)>>>(data<T>(gate_up), rows * per_row,
                                                                                       per_row, width, data<T>(h));
    };
    if (vectors_fit<T>(width, {gate_up.raw(), h.raw()}))
      launch.template operator()<kVector<T>>();
    else
      launch.template operator()<1>();
  });
  SB_CUDA_LAUNCHED();
}

void swiglu_backward(const Exec& exec, TensorView gate_up, TensorView dh, TensorView dgate_up, TensorView h) {
  const int64_t rows = dh.dim(0), width = dh.dim(1);
  if (rows == 0 || width == 0) return;
  with_type(dh.dtype(), "swiglu_backward", [&](auto element) {
    using T = decltype(element);
    const auto launch = [&]<int N>() {
      const int64_t per_row = ceil_div(width, kThreads * kVectors * N);
      const unsigned grid = grid_for(rows * per_row);
      if (h.empty())
        backward_kernel<T, N, false><<<grid, kThreads, 0, stream_of(exec)>>>(
            data<T>(gate_up), data<T>(dh), rows * per_row, per_row, width, data<T>(dgate_up), nullptr);
      else
        backward_kernel<T, N, true><<<grid, kThreads, 0, stream_of(exec)>>>(
            data<T>(gate_up), data<T>(dh), rows * per_row, per_row, width, data<T>(dgate_up), data<T>(h));
    };
    if (vectors_fit<T>(width, {gate_up.raw(), dh.raw(), dgate_up.raw(), h.raw()}))
      launch.template operator()<kVector<T>>();
    else
      launch.template operator()<1>();
  });
  SB_CUDA_LAUNCHED();
}

}  // namespace sb::cuda
