#include "device/kernel.cuh"
#include "ops/backends.h"
#include "ops/cuda/vector.cuh"

namespace sb::cuda {
namespace {

constexpr int kThreads = 256;

template <typename T, int N>
__global__ void __launch_bounds__(kThreads) add_kernel(const T* a, const T* b, int64_t count, T* y) {
  const int64_t stride = int64_t{gridDim.x} * kThreads * N;
  for (int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * N; i < count; i += stride) {
    float first[N], second[N];
    load(a + i, first);
    load(b + i, second);
#pragma unroll
    for (int k = 0; k < N; ++k) first[k] += second[k];
    store(y + i, first);
  }
}

}  // namespace

void add(const Exec& exec, TensorView a, TensorView b, TensorView y) {
  const int64_t count = y.elements();
  if (count == 0) return;
  with_type(y.dtype(), "add", [&](auto element) {
    using T = decltype(element);
    const auto launch = [&]<int N>() {
      launch_kernel(add_kernel<T, N>, {grid_for(ceil_div(count, kThreads * N)), kThreads, 0, stream_of(exec)},
                    data<T>(a), data<T>(b), count, data<T>(y));
    };
    if (vectors_fit<T>(count, {a.raw(), b.raw(), y.raw()}))
      launch.template operator()<kVector<T>>();
    else
      launch.template operator()<1>();
  });
  SB_CUDA_LAUNCHED();
}

}  // namespace sb::cuda
