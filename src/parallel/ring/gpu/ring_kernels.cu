#include <algorithm>
#include <cmath>

#include "device/cuda_check.h"
#include "device/cuda_floats.cuh"
#include "device/kernel.cuh"
#include "parallel/ring/ring_kernels.h"

namespace sb::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;

cudaStream_t stream_of(const Exec& exec) {
  return static_cast<cudaStream_t>(exec.stream);
}

unsigned blocks_for(int64_t items, int per_block = kThreads) {
  return static_cast<unsigned>(std::min<int64_t>((items + per_block - 1) / per_block, 1 << 16));
}

__global__ void gather_rows_kernel(GatherRows g) {
  const int64_t pieces = g.width / 16, all = g.count * pieces;
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < all; i += int64_t{gridDim.x} * kThreads) {
    const int64_t row = i / pieces, piece = i % pieces;
    const int32_t source = g.rows[row];
    uint4 data = make_uint4(0, 0, 0, 0);
    if (source >= 0)
      data = *reinterpret_cast<const uint4*>(static_cast<const char*>(g.from) + source * g.from_stride + piece * 16);
    *reinterpret_cast<uint4*>(static_cast<char*>(g.to) + row * g.to_stride + piece * 16) = data;
  }
}

template <typename T>
__global__ void add_rows_kernel(AddRows a) {
  const int64_t all = a.count * a.width;
  const T* from = static_cast<const T*>(a.from);
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < all; i += int64_t{gridDim.x} * kThreads) {
    const int64_t row = i / a.width, column = i % a.width;
    const int32_t target = a.rows[row];
    if (target >= 0) a.to[target * a.to_stride + column] += cuda::to_float(from[row * a.from_stride + column]);
  }
}

__global__ void gather_lse_kernel(const float* all, int64_t tokens, float* lse, const int32_t* rows, int64_t count,
                                  int heads) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count * heads;
       i += int64_t{gridDim.x} * kThreads) {
    const int32_t row = rows[i % count];
    lse[i] = row < 0 ? -INFINITY : all[i / count * tokens + row];
  }
}

// A warp for every (row, head).
template <typename T>
__global__ void merge_rows_kernel(MergeRows m) {
  const int lane = threadIdx.x % kWarp;
  const int64_t all = m.count * m.heads, step = int64_t{gridDim.x} * (kThreads / kWarp);
  for (int64_t i = blockIdx.x * int64_t{kThreads / kWarp} + threadIdx.x / kWarp; i < all; i += step) {
    const int64_t from = i / m.heads, head = i % m.heads;
    const int32_t to = m.rows[from];
    if (to < 0) continue;
    const float more = m.part_lse[head * m.count + from];
    if (more == -INFINITY) continue;
    float* lse = m.lse + head * m.tokens + to;
    const float before = *lse;
    const float top = fmaxf(before, more), have = expf(before - top), add = expf(more - top);
    const float sum = have + add, keep = have / sum, take = add / sum;
    const T* part = static_cast<const T*>(m.part) + i * m.head_dim;
    float* out = m.out + (to * int64_t{m.heads} + head) * m.head_dim;
    for (int c = lane; c < m.head_dim; c += kWarp) out[c] = keep * out[c] + take * cuda::to_float(part[c]);
    __syncwarp();
    if (lane == 0) *lse = top + logf(sum);
  }
}

__global__ void fill_kernel(float* to, int64_t count, float number) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads)
    to[i] = number;
}

__global__ void add_floats_kernel(const float* from, float* to, int64_t count) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads)
    to[i] += from[i];
}

template <typename T>
__global__ void convert_floats_kernel(const float* from, T* to, int64_t count) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads)
    to[i] = cuda::from_float<T>(from[i]);
}

}  // namespace

void gather_rows(const Exec& exec, const GatherRows& g) {
  SB_CHECK(g.width % 16 == 0 && g.from_stride % 16 == 0 && g.to_stride % 16 == 0, "rows of {} bytes", g.width);
  if (g.count == 0) return;
  launch_kernel(gather_rows_kernel, {blocks_for(g.count * (g.width / 16)), kThreads, 0, stream_of(exec)}, g);
  SB_CUDA_LAUNCHED();
}

void add_rows(const Exec& exec, const AddRows& a) {
  if (a.count == 0) return;
  const unsigned blocks = blocks_for(a.count * a.width);
  if (a.dtype == DType::bf16)
    launch_kernel(add_rows_kernel<__nv_bfloat16>, {blocks, kThreads, 0, stream_of(exec)}, a);
  else
    launch_kernel(add_rows_kernel<float>, {blocks, kThreads, 0, stream_of(exec)}, a);
  SB_CUDA_LAUNCHED();
}

void gather_lse(const Exec& exec, const float* all, int64_t tokens, float* lse, const int32_t* rows, int64_t count,
                int heads) {
  if (count == 0) return;
  launch_kernel(gather_lse_kernel, {blocks_for(count * heads), kThreads, 0, stream_of(exec)}, all, tokens, lse, rows,
                count, heads);
  SB_CUDA_LAUNCHED();
}

void merge_rows(const Exec& exec, const MergeRows& m) {
  if (m.count == 0) return;
  const unsigned blocks = blocks_for(m.count * m.heads, kThreads / kWarp);
  if (m.dtype == DType::bf16)
    launch_kernel(merge_rows_kernel<__nv_bfloat16>, {blocks, kThreads, 0, stream_of(exec)}, m);
  else
    launch_kernel(merge_rows_kernel<float>, {blocks, kThreads, 0, stream_of(exec)}, m);
  SB_CUDA_LAUNCHED();
}

void fill(const Exec& exec, float* to, int64_t count, float number) {
  if (count == 0) return;
  launch_kernel(fill_kernel, {blocks_for(count), kThreads, 0, stream_of(exec)}, to, count, number);
  SB_CUDA_LAUNCHED();
}

void add_floats(const Exec& exec, const float* from, float* to, int64_t count) {
  if (count == 0) return;
  launch_kernel(add_floats_kernel, {blocks_for(count), kThreads, 0, stream_of(exec)}, from, to, count);
  SB_CUDA_LAUNCHED();
}

void convert_floats(const Exec& exec, const float* from, void* to, DType dtype, int64_t count) {
  if (count == 0) return;
  const unsigned blocks = blocks_for(count);
  if (dtype == DType::bf16)
    launch_kernel(convert_floats_kernel<__nv_bfloat16>, {blocks, kThreads, 0, stream_of(exec)}, from,
                  static_cast<__nv_bfloat16*>(to), count);
  else
    launch_kernel(convert_floats_kernel<float>, {blocks, kThreads, 0, stream_of(exec)}, from, static_cast<float*>(to),
                  count);
  SB_CUDA_LAUNCHED();
}

}  // namespace sb::gpu
