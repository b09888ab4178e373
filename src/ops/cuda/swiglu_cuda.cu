#include "device/kernel.cuh"
#include "ops/backends.h"
#include "ops/cuda/swiglu.cuh"

namespace sb::cuda {
namespace {

constexpr int kMostThreads = 384;

template <typename T, int N>
__device__ uint32_t largest_of(const float (&values)[N]) {
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) bits = max(bits, magnitude_bits<T>(values[i]));
  return bits;
}

// Block (row, piece) has a piece of a row, a vector a thread; a row is cut so that few threads have nothing to do, and
// no index is divided.
template <typename T, int N>
__global__ void __launch_bounds__(kMostThreads)
    forward_kernel(const T* gate_up, int64_t width, T* h, uint32_t* largest) {
  const int64_t row = blockIdx.x, c = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * N;
  float gate[N] = {}, up[N];
  if (c < width) {
    load(gate_up + 2 * row * width + c, gate);
    load(gate_up + (2 * row + 1) * width + c, up);
#pragma unroll
    for (int i = 0; i < N; ++i) gate[i] = gate[i] * sigmoid<T>(gate[i]) * up[i];
    store(h + row * width + c, gate);
  }
  if (largest != nullptr) note_largest(largest_of<T>(gate), largest);
}

template <typename T, int N, bool kWithForward>
__global__ void __launch_bounds__(kMostThreads)
    backward_kernel(const T* gate_up, const T* dh, int64_t width, T* dgate_up, T* h) {
  const int64_t row = blockIdx.x, c = (int64_t{blockIdx.y} * blockDim.x + threadIdx.x) * N;
  if (c >= width) return;
  float gate[N], up[N], g[N], inner[N];
  load(gate_up + 2 * row * width + c, gate);
  load(gate_up + (2 * row + 1) * width + c, up);
  load(dh + row * width + c, g);
#pragma unroll
  for (int i = 0; i < N; ++i) inner[i] = swiglu_gradient<T>(gate[i], up[i], g[i]);
  store(dgate_up + 2 * row * width + c, gate);
  store(dgate_up + (2 * row + 1) * width + c, up);
  if constexpr (kWithForward) store(h + row * width + c, inner);
}

struct RowPieces {
  dim3 grid;
  unsigned threads;
  RowPieces(int64_t rows, int64_t vectors) {
    const int64_t pieces = ceil_div(vectors, kMostThreads);
    threads = static_cast<unsigned>(ceil_div(ceil_div(vectors, pieces), 32) * 32);
    grid = dim3(static_cast<unsigned>(rows), static_cast<unsigned>(pieces));
  }
};

}  // namespace

void swiglu_forward(const Exec& exec, TensorView gate_up, TensorView h, TensorView largest) {
  const int64_t rows = h.dim(0), width = h.dim(1);
  if (rows == 0 || width == 0) return;
  with_type(h.dtype(), "swiglu_forward", [&](auto element) {
    using T = decltype(element);
    const auto launch = [&]<int N>() {
      const RowPieces pieces(rows, ceil_div(width, N));
      launch_kernel(forward_kernel<T, N>, {pieces.grid, pieces.threads, 0, stream_of(exec)}, data<T>(gate_up), width,
                    data<T>(h), data<uint32_t>(largest));
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
      const RowPieces pieces(rows, ceil_div(width, N));
      const auto kernel = h.empty() ? backward_kernel<T, N, false> : backward_kernel<T, N, true>;
      launch_kernel(kernel, {pieces.grid, pieces.threads, 0, stream_of(exec)}, data<T>(gate_up), data<T>(dh), width,
                    data<T>(dgate_up), data<T>(h));
    };
    if (vectors_fit<T>(width, {gate_up.raw(), dh.raw(), dgate_up.raw(), h.raw()}))
      launch.template operator()<kVector<T>>();
    else
      launch.template operator()<1>();
  });
  SB_CUDA_LAUNCHED();
}

}  // namespace sb::cuda
