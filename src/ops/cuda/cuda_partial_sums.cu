#include "ops/cuda_partial_sums.h"

#include <algorithm>

#include "device/kernel.cuh"
#include "ops/backends.h"
#include "ops/cuda/vector.cuh"

namespace sb::cuda {
namespace {

constexpr int kSlices = 8;  // warps of a block, each with its own rows

__global__ void add_partial_kernel(const float* partial, int rows, int64_t width, float* sums) {
  SB_SHARED(float, slices, [kSlices][32]);
  const int64_t column = int64_t{blockIdx.x} * 32 + threadIdx.x;
  float sum = 0;
  if (column < width) {
#pragma unroll 4
    for (int row = threadIdx.y; row < rows; row += kSlices) sum += partial[row * width + column];
  }
  slices[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= width) return;
  sum = 0;
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice) sum += slices[slice][threadIdx.x];
  sums[column] += sum;
}

// A block sums its share of the rows for 32·N columns.
template <typename T, int N>
__global__ void column_sums_kernel(const T* dy, const T* x, const float* rstd, int64_t rows, int64_t width,
                                   int64_t rows_per_block, float* partial) {
  SB_SHARED(float, slices, [kSlices][32 * N]);
  const int64_t column = (int64_t{blockIdx.x} * 32 + threadIdx.x) * N;
  const int64_t begin = blockIdx.y * rows_per_block, end = min(rows, begin + rows_per_block);
  float sum[N] = {};
  if (column < width) {
    for (int64_t row = begin + threadIdx.y; row < end; row += kSlices) {
      float g[N];
      load(dy + row * width + column, g);
      if (x != nullptr) {
        float value[N];
        load(x + row * width + column, value);
        const float r = rstd[row];
#pragma unroll
        for (int i = 0; i < N; ++i) sum[i] += g[i] * (value[i] * r);
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i) sum[i] += g[i];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < N; ++i) slices[threadIdx.y][threadIdx.x * N + i] = sum[i];
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.y) * 32 + static_cast<int>(threadIdx.x); i < 32 * N; i += 32 * kSlices) {
    float total = 0;
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) total += slices[slice][i];
    const int64_t to = int64_t{blockIdx.x} * 32 * N + i;
    if (to < width) partial[blockIdx.y * width + to] = total;
  }
}

}  // namespace

void add_partial_sums(const Exec& exec, const float* partial, int rows, int64_t width, float* sums) {
  launch_kernel(add_partial_kernel, {static_cast<unsigned>(ceil_div(width, 32)), dim3(32, kSlices), 0, stream_of(exec)},
                partial, rows, width, sums);
  SB_CUDA_LAUNCHED();
}

void add_column_sums(const Exec& exec, TensorView dy, int64_t rows, int64_t width, TensorView x, TensorView rstd,
                     float* sums) {
  if (rows == 0) return;
  const ArenaScope scope(*exec.scratch);
  float* partial = exec.scratch->allocate_array<float>(kPartialRows * width);
  constexpr int64_t kLeastRows = 4 * kSlices;
  const int64_t blocks = std::min<int64_t>(kPartialRows, ceil_div(rows, kLeastRows));
  const int64_t rows_per_block = ceil_div(rows, blocks);
  const auto used = static_cast<unsigned>(ceil_div(rows, rows_per_block));
  with_type(dy.dtype(), "column sums", [&](auto element) {
    using T = decltype(element);
    const auto launch = [&]<int N>() {
      const dim3 grid(static_cast<unsigned>(ceil_div(width, 32 * N)), used);
      launch_kernel(column_sums_kernel<T, N>, {grid, dim3(32, kSlices), 0, stream_of(exec)}, data<T>(dy), data<T>(x),
                    data<float>(rstd), rows, width, rows_per_block, partial);
    };
    if (vectors_fit<T>(width, {dy.raw(), x.raw()}))
      launch.template operator()<kVector<T>>();
    else
      launch.template operator()<1>();
  });
  SB_CUDA_LAUNCHED();
  add_partial_sums(exec, partial, static_cast<int>(used), width, sums);
}

}  // namespace sb::cuda
