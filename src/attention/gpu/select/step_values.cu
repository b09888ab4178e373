#include "attention/gpu/select/step_values.h"

#include <algorithm>

#include "attention/gpu/launch/check.cuh"
#include "device/cuda_floats.cuh"
#include "device/kernel.cuh"

namespace sb::gpu {
namespace {

// Well below the 4 KiB that the parameters of a kernel may have on any GPU.
struct Words {
  static constexpr int kMost = 960;
  uint32_t values[kMost];
};
__global__ void put_kernel(uint32_t* to, const __grid_constant__ Words words, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = words.values[i];
}

__global__ void count_kernel(unsigned long long* pairs, unsigned long long* blocks, const unsigned long long* selected,
                             const int32_t* classes, int sequences) {
  for (int i = threadIdx.x; i < sequences; i += blockDim.x) {
    if (selected[2 * i] == 0) continue;
    atomicAdd(blocks + classes[i], selected[2 * i]);
    atomicAdd(pairs, selected[2 * i + 1]);
  }
}

struct SomeSequences {
  static constexpr int kMost = 160;
  SequenceBlocks values[kMost];
};
__global__ void write_counts_kernel(int64_t* counts, const unsigned long long* selected,
                                    const __grid_constant__ SomeSequences sequences, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const SequenceBlocks& one = sequences.values[i];
    counts[2 * one.place] = static_cast<int64_t>(selected[2 * one.sequence]) - one.given;
    counts[2 * one.place + 1] = one.wanted;
  }
}

using cuda::to_float;

// Sums over the samples of one piece; a thread block has one piece and one key/value head, a thread every 128th
// channel.
template <typename T>
__global__ void partial_kernel(PlaneSumsParams p) {
  const int d = p.shape.head_dim, head = blockIdx.y, group = p.shape.query_heads / p.shape.kv_heads;
  const int begin = blockIdx.x * kPlanePieceSamples, end = min(begin + kPlanePieceSamples, p.sample_count);
  const int64_t width = static_cast<int64_t>(p.shape.kv_heads) * d;
  const auto *q = static_cast<const T*>(p.q), *k = static_cast<const T*>(p.k);
  for (int c = threadIdx.x; c < d; c += blockDim.x) {
    double query_square = 0, key_sum = 0, key_square = 0;
#pragma unroll 2
    for (int i = begin; i < end; ++i) {
      const int64_t token = p.samples[i];
      const T* row = q + (token * p.shape.query_heads + head * group) * d + c;
      float sum = 0;
#pragma unroll 8
      for (int h = 0; h < group; ++h) sum += to_float(row[static_cast<int64_t>(h) * d]);
      const double query = static_cast<double>(sum) / group;
      const double key = to_float(k[(token * p.shape.kv_heads + head) * d + c]);
      query_square += query * query;
      key_sum += key;
      key_square += key * key;
    }
    double* to = p.partial + blockIdx.x * 3 * width + static_cast<int64_t>(head) * d + c;
    to[0] = query_square;
    to[width] = key_sum;
    to[2 * width] = key_square;
  }
}

__global__ void add_kernel(const double* partial, int pieces, int64_t values, double* sums) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= values) return;
  double sum = 0;
#pragma unroll 8
  for (int piece = 0; piece < pieces; ++piece) sum += partial[piece * values + i];
  sums[i] += sum;
}

}  // namespace

void put_words(uint32_t* to, std::span<const uint32_t> words, void* stream) {
  for (size_t at = 0; at < words.size(); at += Words::kMost) {
    Words some;
    const size_t count = std::min<size_t>(Words::kMost, words.size() - at);
    std::copy_n(words.begin() + static_cast<int64_t>(at), count, some.values);
    launch_kernel(put_kernel, {1, 256, 0, static_cast<cudaStream_t>(stream)}, to + at, some, static_cast<int>(count));
    check(cudaGetLastError(), "values of a step");
  }
}

void add_counts(unsigned long long* pairs, unsigned long long* blocks, const unsigned long long* selected,
                const int32_t* classes, int32_t sequences, void* stream) {
  launch_kernel(count_kernel, {1, 256, 0, static_cast<cudaStream_t>(stream)}, pairs, blocks, selected, classes,
                sequences);
  check(cudaGetLastError(), "counts of selections");
}

void write_counts(int64_t* counts, const unsigned long long* selected, std::span<const SequenceBlocks> sequences,
                  void* stream) {
  for (size_t at = 0; at < sequences.size(); at += SomeSequences::kMost) {
    SomeSequences some;
    const size_t count = std::min<size_t>(SomeSequences::kMost, sequences.size() - at);
    std::copy_n(sequences.begin() + static_cast<int64_t>(at), count, some.values);
    launch_kernel(write_counts_kernel, {1, 256, 0, static_cast<cudaStream_t>(stream)}, counts, selected, some,
                  static_cast<int>(count));
    check(cudaGetLastError(), "counts of given sequences");
  }
}

void add_plane_sums(const PlaneSumsParams& p, Precision precision, void* stream) {
  if (p.sample_count == 0) return;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const int pieces = (p.sample_count + kPlanePieceSamples - 1) / kPlanePieceSamples;
  const auto kernel = precision == Precision::fp32 ? partial_kernel<float> : partial_kernel<__nv_bfloat16>;
  launch_kernel(kernel, {dim3(pieces, p.shape.kv_heads), 128, 0, cuda_stream}, p);
  check(cudaGetLastError(), "energies of planes");
  const int64_t values = int64_t{3} * p.shape.kv_heads * p.shape.head_dim;
  launch_kernel(add_kernel, {static_cast<unsigned>((values + 127) / 128), 128, 0, cuda_stream}, p.partial, pieces,
                values, p.sums);
  check(cudaGetLastError(), "sum of energies of planes");
}

}  // namespace sb::gpu
