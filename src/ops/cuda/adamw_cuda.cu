#include <cmath>

#include "device/kernel.cuh"
#include "device/memory.h"
#include "ops/adamw_scalars.h"
#include "ops/backends.h"
#include "ops/cuda/vector.cuh"

namespace sb::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kElements = 4;                      // of a thread: 16 bytes of every fp32 buffer
constexpr int64_t kPiece = kThreads * kElements;  // elements of a block at a time
constexpr int kMaxRanges = 56;                    // of one launch: they travel as an argument of at most 4 KiB
constexpr int kNormBlocks = 1056;                 // 8 for every multiprocessor of an H200; fixed, so that sums are too

struct Ranges {
  int count;
  int64_t first_piece[kMaxRanges + 1];
  int64_t begin[kMaxRanges], end[kMaxRanges];
  MomentPlace place[kMaxRanges];
  bool decay[kMaxRanges];
};

template <typename M>
struct Buffers {
  float* p;
  const float* g;
  M *m, *v;
  bf16* weights;      // or none
  const float* clip;  // or none
  bool vectors;       // the buffers start on 16-byte borders
};

__device__ inline void update(const AdamWScalars& s, float decay, float scale, float g, float& p, float& m, float& v) {
  g *= scale;
  m = s.beta1 * m + s.one_minus_beta1 * g;
  v = s.beta2 * v + s.one_minus_beta2 * (g * g);
  const float denominator = sqrtf(v) * s.inverse_sqrt_correction2 + s.eps;
  p = p * decay - s.step_size * (m / denominator);
}

// Moments as their type M holds them; `i`: the element's place in the range.
template <typename M>
__device__ inline void round_moments(const MomentPlace& place, int64_t i, MomentBits& bits, float& m, float& v) {
  if constexpr (sizeof(M) < sizeof(float)) {
    const uint32_t random = bits.at(place.of(i));
    m = round_moment(m, random & 0xffff);
    v = round_moment(v, random >> 16);
  }
}

template <typename M>
__global__ void __launch_bounds__(kThreads)
    update_kernel(const AdamWScalars s, int64_t step, const __grid_constant__ Ranges ranges, Buffers<M> b) {
  float scale = s.gradient_scale;
  if (b.clip != nullptr) {
    if (!isfinite(b.clip[1])) return;
    scale *= b.clip[0];
  }
  const int64_t pieces = ranges.first_piece[ranges.count];
  for (int64_t piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
    int low = 0, high = ranges.count - 1;  // the last range that starts at or before the piece
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (ranges.first_piece[middle] <= piece)
        low = middle;
      else
        high = middle - 1;
    }
    const int64_t begin = ranges.begin[low], end = ranges.end[low];
    const float decay = ranges.decay[low] ? s.decay : 1.0f;
    const MomentPlace& place = ranges.place[low];
    MomentBits bits(place.tensor, step);
    const int64_t i = begin + (piece - ranges.first_piece[low]) * kPiece + int64_t{threadIdx.x} * kElements;
    if (b.vectors && i + kElements <= end && begin % kElements == 0) {
      float p[kElements], g[kElements], m[kElements], v[kElements];
      load(b.p + i, p);
      load(b.g + i, g);
      load(b.m + i, m);
      load(b.v + i, v);
#pragma unroll
      for (int k = 0; k < kElements; ++k) {
        update(s, decay, scale, g[k], p[k], m[k], v[k]);
        round_moments<M>(place, i + k - begin, bits, m[k], v[k]);
      }
      store(b.p + i, p);
      store(b.m + i, m);
      store(b.v + i, v);
      if (b.weights != nullptr) store(b.weights + i, p);
    } else {
      for (int64_t k = i; k < min(i + kElements, end); ++k) {
        float p = b.p[k], m = to_float(b.m[k]), v = to_float(b.v[k]);
        update(s, decay, scale, b.g[k], p, m, v);
        round_moments<M>(place, k - begin, bits, m, v);
        b.p[k] = p;
        b.m[k] = from_float<M>(m);
        b.v[k] = from_float<M>(v);
        if (b.weights != nullptr) b.weights[k] = from_float<bf16>(p);
      }
    }
  }
}

__device__ double block_sum(double sum) {
  SB_SHARED(double, warps, [kThreads / 32]);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (int warp = 0; warp < kThreads / 32; ++warp) sum += warps[warp];
  return sum;
}

__global__ void __launch_bounds__(kThreads) squares_kernel(const float* x, int64_t count, bool vectors, double* sums) {
  double sum = 0;
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x, threads = int64_t{gridDim.x} * kThreads;
  int64_t done = 0;
  if (vectors) {
    const int64_t whole = count / 4;
#pragma unroll 4
    for (int64_t i = thread; i < whole; i += threads) {
      float value[4];
      load(x + 4 * i, value);
#pragma unroll
      for (int k = 0; k < 4; ++k) sum += static_cast<double>(value[k]) * value[k];
    }
    done = 4 * whole;
  }
  for (int64_t i = done + thread; i < count; i += threads) sum += static_cast<double>(x[i]) * x[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// total += Σ sums
__global__ void __launch_bounds__(kThreads) total_kernel(const double* sums, double* total) {
  double sum = 0;
  for (int i = threadIdx.x; i < kNormBlocks; i += kThreads) sum += sums[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) *total += sum;
}

__global__ void clip_kernel(const double* total, double max_norm, float* clip) {
  const double norm = sqrt(*total);
  clip[0] = max_norm > 0 && norm > max_norm ? static_cast<float>(max_norm / (norm + 1e-6)) : 1.0f;
  clip[1] = static_cast<float>(norm);
}

__global__ void __launch_bounds__(kThreads) round_kernel(const float* from, int64_t count, bf16* to) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads) {
    to[i] = from_float<bf16>(from[i]);
  }
}

// Σ x² over the pieces, into the returned place in the scratch memory.
double* queue_squared_norm(const Exec& exec, std::span<const TensorView> pieces) {
  double* sums = exec.scratch->allocate_array<double>(kNormBlocks);
  double* total = exec.scratch->allocate_array<double>(1);
  SB_CUDA_CHECK(cudaMemsetAsync(total, 0, sizeof(double), stream_of(exec)));
  for (const TensorView& x : pieces) {
    const bool vectors = reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0;
    launch_kernel(squares_kernel, {kNormBlocks, kThreads, 0, stream_of(exec)}, x.f32(), x.elements(), vectors, sums);
    SB_CUDA_LAUNCHED();
    launch_kernel(total_kernel, {1, kThreads, 0, stream_of(exec)}, sums, total);
    SB_CUDA_LAUNCHED();
  }
  return total;
}

template <typename M>
void update_ranges(const Exec& exec, const AdamWStep& step, std::span<const DecayRange> ranges,
                   const AdamWBuffers& buffers) {
  const AdamWScalars scalars = adamw_scalars(step);
  const Buffers<M> pointers = {
      .p = buffers.parameters.f32(),
      .g = buffers.gradients.f32(),
      .m = data<M>(buffers.m),
      .v = data<M>(buffers.v),
      .weights = data<bf16>(buffers.weights),
      .clip = data<float>(buffers.clip),
      .vectors = vectors_fit<float>(kElements, {buffers.parameters.raw(), buffers.gradients.raw(), buffers.m.raw(),
                                                buffers.v.raw(), buffers.weights.raw()}),
  };
  for (size_t next = 0; next < ranges.size();) {
    Ranges some = {};
    for (; next < ranges.size() && some.count < kMaxRanges; ++next) {
      const DecayRange& range = ranges[next];
      if (range.begin == range.end) continue;
      some.begin[some.count] = range.begin;
      some.end[some.count] = range.end;
      some.place[some.count] = range.place;
      some.decay[some.count] = range.decay;
      some.first_piece[some.count + 1] = some.first_piece[some.count] + ceil_div(range.end - range.begin, kPiece);
      ++some.count;
    }
    if (some.count == 0) continue;
    launch_kernel(update_kernel<M>, {grid_for(some.first_piece[some.count]), kThreads, 0, stream_of(exec)}, scalars,
                  step.step, some, pointers);
    SB_CUDA_LAUNCHED();
  }
}

}  // namespace

void adamw_update(const Exec& exec, const AdamWStep& step, std::span<const DecayRange> ranges,
                  const AdamWBuffers& buffers) {
  with_type(buffers.m.dtype(), "adamw_update",
            [&](auto moment) { update_ranges<decltype(moment)>(exec, step, ranges, buffers); });
}

int64_t norm_scratch_bytes() {
  return Arena::rounded(kNormBlocks * static_cast<int64_t>(sizeof(double))) + Arena::rounded(sizeof(double));
}

void clip_by_norm(const Exec& exec, TensorView gradients, double max_norm, TensorView clip) {
  const ArenaScope scope(*exec.scratch);
  const double* total = queue_squared_norm(exec, std::span<const TensorView>(&gradients, 1));
  launch_kernel(clip_kernel, {1, 1, 0, stream_of(exec)}, total, max_norm, clip.f32());
  SB_CUDA_LAUNCHED();
}

double squared_norm(const Exec& exec, std::span<const TensorView> pieces) {
  const ArenaScope scope(*exec.scratch);
  const double* total = queue_squared_norm(exec, pieces);
  double result = 0;
  SB_CUDA_CHECK(cudaMemcpyAsync(&result, total, sizeof(result), cudaMemcpyDeviceToHost, stream_of(exec)));
  SB_CUDA_CHECK(cudaStreamSynchronize(stream_of(exec)));
  return result;
}

void round_parameters(const Exec& exec, TensorView parameters, TensorView weights) {
  const int64_t count = parameters.elements();
  if (count == 0) return;
  launch_kernel(round_kernel, {grid_for(ceil_div(count, kThreads)), kThreads, 0, stream_of(exec)}, parameters.f32(),
                count, data<bf16>(weights));
  SB_CUDA_LAUNCHED();
}

}  // namespace sb::cuda
