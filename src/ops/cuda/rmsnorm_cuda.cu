#include "device/kernel.cuh"
#include "ops/backends.h"
#include "ops/check_shape.h"
#include "ops/cuda/vector.cuh"
#include "ops/cuda_partial_sums.h"

namespace sb::cuda {
namespace {

constexpr int kWarps = 8;

// 16 bytes of a row, in registers.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T values[N];
  __device__ float operator[](int i) const { return to_float(values[i]); }
};

template <typename T, int N, int V>
__device__ void load_row(const T* from, int64_t width, int lane, Pack<T, N> (&to)[V]) {
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const int64_t c = (v * 32 + lane) * N;
    if (c < width) to[v] = *reinterpret_cast<const Pack<T, N>*>(from + c);
  }
}

// One warp a row, which is read once and kept in registers: width ≤ 32·N·V.
template <typename T, int N, int V>
__global__ void __launch_bounds__(kWarps * 32)
    forward_kernel(const T* x, const T* weight, float eps, int64_t rows, int64_t width, T* y, float* rstd) {
  const int lane = threadIdx.x % 32;
  for (int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; row < rows; row += int64_t{gridDim.x} * kWarps) {
    Pack<T, N> value[V];
    load_row(x + row * width, width, lane, value);
    float squares = 0;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if ((v * 32 + lane) * N >= width) continue;
#pragma unroll
      for (int i = 0; i < N; ++i) squares += value[v][i] * value[v][i];
    }
    const float r = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(width) + eps);
    if (lane == 0) rstd[row] = r;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int64_t c = (v * 32 + lane) * N;
      if (c >= width) continue;
      float w[N], out[N];
      load(weight + c, w);
#pragma unroll
      for (int i = 0; i < N; ++i) out[i] = value[v][i] * r * w[i];
      store(y + row * width + c, out);
    }
  }
}

// For any width: the row is read twice.
template <typename T, int N>
__global__ void __launch_bounds__(kWarps * 32)
    forward_any_kernel(const T* x, const T* weight, float eps, int64_t rows, int64_t width, T* y, float* rstd) {
  const int lane = threadIdx.x % 32;
  for (int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; row < rows; row += int64_t{gridDim.x} * kWarps) {
    const T* from = x + row * width;
    float squares = 0;
    for (int64_t c = lane * N; c < width; c += 32 * N) {
      float value[N];
      load(from + c, value);
#pragma unroll
      for (int i = 0; i < N; ++i) squares += value[i] * value[i];
    }
    const float r = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(width) + eps);
    if (lane == 0) rstd[row] = r;
    for (int64_t c = lane * N; c < width; c += 32 * N) {
      float value[N], w[N];
      load(from + c, value);
      load(weight + c, w);
#pragma unroll
      for (int i = 0; i < N; ++i) value[i] = value[i] * r * w[i];
      store(y + row * width + c, value);
    }
  }
}

// dx = r · (dy·w - x·r²·mean(dy·w·x))
template <typename T, int N>
__device__ float mean_product(const T* x, const T* weight, const T* dy, int64_t width, int lane) {
  float sum = 0;
#pragma unroll 4
  for (int64_t c = lane * N; c < width; c += 32 * N) {
    float value[N], w[N], g[N];
    load(x + c, value);
    load(weight + c, w);
    load(dy + c, g);
#pragma unroll
    for (int i = 0; i < N; ++i) sum += g[i] * w[i] * value[i];
  }
  return warp_sum(sum) / static_cast<float>(width);
}

// dx alone, for any width.
template <typename T, int N>
__global__ void __launch_bounds__(kWarps * 32)
    backward_input_kernel(const T* x, const T* weight, const float* rstd, const T* dy, int64_t rows, int64_t width,
                          T* dx, bool accumulate) {
  const int lane = threadIdx.x % 32;
  for (int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; row < rows; row += int64_t{gridDim.x} * kWarps) {
    const float r = rstd[row];
    const float pull = r * r * r * mean_product<T, N>(x + row * width, weight, dy + row * width, width, lane);
    for (int64_t c = lane * N; c < width; c += 32 * N) {
      float value[N], w[N], g[N], sum[N] = {};
      load(x + row * width + c, value);
      load(weight + c, w);
      load(dy + row * width + c, g);
      if (accumulate) load(dx + row * width + c, sum);
#pragma unroll
      for (int i = 0; i < N; ++i) sum[i] += r * g[i] * w[i] - pull * value[i];
      store(dx + row * width + c, sum);
    }
  }
}

// A thread's column of R rows, on its way.
template <int R>
struct ColumnOfRows {
  uint4 x[R], dy[R], dx[R];
  float rstd[R];
};

template <typename T, int N>
__device__ void unpack(const uint4& from, float (&to)[N]) {
  static_assert(sizeof(T) * N == sizeof(from));
  const auto pack = *reinterpret_cast<const Pack<T, N>*>(&from);
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = pack[i];
}

// dx and the block's part of dweight in one pass. blockDim.x threads have a row, a vector each, and blockDim.y such
// groups R rows each at a time; the next rows are fetched while the sums of these go through shared memory. A thread
// has the same columns of all its rows and keeps their part of dweight in registers.
template <typename T, int N, int R, int kMostThreads, int kBlocks>
__global__ void __launch_bounds__(kMostThreads, kBlocks)
    backward_kernel(const T* x, const T* weight, const float* rstd, const T* dy, int64_t rows, int64_t width, T* dx,
                    bool accumulate, float* partial) {
  SB_DYNAMIC_SHARED(float, sums);  // [width]
  SB_SHARED(float, products, [2][R][kMostThreads / 32]);
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = threadIdx.y;
  const int64_t c = int64_t{threadIdx.x} * N, stride = int64_t{gridDim.x} * blockDim.y * R;
  const bool inside = c < width;
  float w[N] = {}, dweight[N] = {};
  if (inside) load(weight + c, w);
  const auto fetch = [&](ColumnOfRows<R>& to, int64_t first) {
#pragma unroll
    for (int i = 0; i < R; ++i) {
      const int64_t row = first + i, at = row * width + c;
      if (row >= rows || !inside) continue;
      to.x[i] = *reinterpret_cast<const uint4*>(x + at);
      to.dy[i] = *reinterpret_cast<const uint4*>(dy + at);
      if (accumulate) to.dx[i] = *reinterpret_cast<const uint4*>(dx + at);
      to.rstd[i] = rstd[row];
    }
  };
  ColumnOfRows<R> now;
  int64_t block_first = int64_t{blockIdx.x} * blockDim.y * R;  // the same for all threads: they meet in every round
  fetch(now, block_first + group * R);
  for (int buffer = 0; block_first < rows; block_first += stride, buffer ^= 1) {
    const int64_t first = block_first + group * R;
    ColumnOfRows<R> next;
    fetch(next, first + stride);
#pragma unroll
    for (int i = 0; i < R; ++i) {
      float product = 0;
      if (first + i < rows && inside) {
        float value[N], g[N];
        unpack<T>(now.x[i], value);
        unpack<T>(now.dy[i], g);
#pragma unroll
        for (int k = 0; k < N; ++k) product += g[k] * w[k] * value[k];
      }
      product = warp_sum(product);
      if (lane == 0) products[buffer][i][group * warps + warp] = product;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < R; ++i) {
      if (first + i >= rows || !inside) continue;
      float product = 0;
      for (int other = 0; other < warps; ++other) product += products[buffer][i][group * warps + other];
      const float r = now.rstd[i], pull = r * r * r * (product / static_cast<float>(width));
      float value[N], g[N], sum[N] = {};
      unpack<T>(now.x[i], value);
      unpack<T>(now.dy[i], g);
      if (accumulate) unpack<T>(now.dx[i], sum);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        sum[k] += r * g[k] * w[k] - pull * value[k];
        dweight[k] += g[k] * (value[k] * r);
      }
      store(dx + (first + i) * width + c, sum);
    }
    now = next;
  }
  // Group after group, so that the order of the sum is fixed.
  for (int turn = 0; turn < static_cast<int>(blockDim.y); ++turn) {
    if (group == turn && inside) {
#pragma unroll
      for (int k = 0; k < N; ++k) sums[c + k] = turn == 0 ? dweight[k] : sums[c + k] + dweight[k];
    }
    __syncthreads();
  }
  if (group == 0 && inside) {
#pragma unroll
    for (int k = 0; k < N; ++k) partial[blockIdx.x * width + c + k] = sums[c + k];
  }
}

struct Backward {
  const Exec& exec;
  TensorView x, weight, rstd, dy, dx;
  bool accumulate;
  int64_t rows, width;
  float* dweight;  // nullptr: not wanted
};

// A thread has a vector of a row, so that rows of up to so many vectors can be worked on.
constexpr int kMostVectors = 640, kFewVectors = 256;

template <typename T, int R, int kMostThreads, int kBlocks>
void launch_backward(const Backward& b) {
  constexpr int N = kVector<T>;
  const ArenaScope scope(*b.exec.scratch);
  float* partial = b.exec.scratch->allocate_array<float>(kPartialRows * b.width);
  const int64_t threads = ceil_div(ceil_div(b.width, N), 32) * 32, groups = std::max<int64_t>(1, kFewVectors / threads);
  const int blocks = static_cast<int>(std::min<int64_t>(kPartialRows, ceil_div(b.rows, groups * R)));
  const dim3 block(static_cast<unsigned>(threads), static_cast<unsigned>(groups));
  launch_kernel(backward_kernel<T, N, R, kMostThreads, kBlocks>,
                {static_cast<unsigned>(blocks), block, static_cast<size_t>(b.width) * sizeof(float), stream_of(b.exec)},
                data<T>(b.x), data<T>(b.weight), data<float>(b.rstd), data<T>(b.dy), b.rows, b.width, data<T>(b.dx),
                b.accumulate, partial);
  SB_CUDA_LAUNCHED();
  if (b.dweight != nullptr) add_partial_sums(b.exec, partial, blocks, b.width, b.dweight);
}

// In two passes. dweight first: dx may take the place of dy.
template <typename T>
void launch_backward_any(const Backward& b) {
  if (b.dweight != nullptr) add_column_sums(b.exec, b.dy, b.rows, b.width, b.x, b.rstd, b.dweight);
  const auto launch = [&]<int N>() {
    launch_kernel(backward_input_kernel<T, N>, {grid_for(ceil_div(b.rows, kWarps)), kWarps * 32, 0, stream_of(b.exec)},
                  data<T>(b.x), data<T>(b.weight), data<float>(b.rstd), data<T>(b.dy), b.rows, b.width, data<T>(b.dx),
                  b.accumulate);
  };
  if (vectors_fit<T>(b.width, {b.x.raw(), b.weight.raw(), b.dy.raw(), b.dx.raw()}))
    launch.template operator()<kVector<T>>();
  else
    launch.template operator()<1>();
  SB_CUDA_LAUNCHED();
}

}  // namespace

void rmsnorm_forward(const Exec& exec, TensorView x, TensorView weight, float eps, TensorView y, TensorView rstd) {
  const int64_t rows = rstd.elements(), width = last_dim(x);
  if (rows == 0) return;
  const unsigned grid = grid_for(ceil_div(rows, kWarps));
  with_type(x.dtype(), "rmsnorm_forward", [&](auto element) {
    using T = decltype(element);
    constexpr int kLane = 32 * kVector<T>;  // columns of a vector a lane
    const auto launch = [&](auto* kernel) {
      launch_kernel(kernel, {grid, kWarps * 32, 0, stream_of(exec)}, data<T>(x), data<T>(weight), eps, rows, width,
                    data<T>(y), data<float>(rstd));
    };
    if (!vectors_fit<T>(width, {x.raw(), weight.raw(), y.raw()}))
      launch(forward_any_kernel<T, 1>);
    else if (width <= 1024)
      launch(forward_kernel<T, kVector<T>, 1024 / kLane>);
    else if (width <= 2048)
      launch(forward_kernel<T, kVector<T>, 2048 / kLane>);
    else if (width <= 4096)
      launch(forward_kernel<T, kVector<T>, 4096 / kLane>);
    else
      launch(forward_any_kernel<T, kVector<T>>);
  });
  SB_CUDA_LAUNCHED();
}

void rmsnorm_backward(const Exec& exec, TensorView x, TensorView weight, TensorView rstd, TensorView dy, TensorView dx,
                      bool accumulate, TensorView dweight) {
  const Backward b = {exec, x,          weight,          rstd,        dy,
                      dx,   accumulate, rstd.elements(), last_dim(x), dweight.empty() ? nullptr : dweight.f32()};
  if (b.rows == 0) return;
  with_type(x.dtype(), "rmsnorm_backward", [&](auto element) {
    using T = decltype(element);
    const bool fits = vectors_fit<T>(b.width, {x.raw(), weight.raw(), dy.raw(), dx.raw()});
    const int64_t vectors = ceil_div(b.width, kVector<T>);
    if (fits && vectors <= kFewVectors)
      launch_backward<T, 3, kFewVectors, 2>(b);
    else if (fits && vectors <= kMostVectors)
      launch_backward<T, 1, kMostVectors, 1>(b);
    else
      launch_backward_any<T>(b);
  });
}

}  // namespace sb::cuda
