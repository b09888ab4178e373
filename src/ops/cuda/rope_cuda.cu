#include <algorithm>

#include "device/kernel.cuh"
#include "ops/backends.h"
#include "ops/cuda/vector.cuh"
#include "ops/cuda_partial_sums.h"

namespace sb::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kMaxPairs = 4;  // channel pairs of a lane with q/k norms: heads of up to 256 channels

// The heads of a token lie in the order q, k, v in the projection and in three tensors outside it.
template <typename T>
struct Heads {
  int heads, kv_heads, head_dim;
  T *qkv, *q, *k, *v;

  __device__ int all() const { return heads + 2 * kv_heads; }
  __device__ bool is_v(int head) const { return head >= heads + kv_heads; }
  __device__ T* packed(int64_t token, int head) const { return qkv + (token * all() + head) * head_dim; }
  __device__ T* apart(int64_t token, int head) const {
    if (head < heads) return q + (token * heads + head) * head_dim;
    head -= heads;
    if (head < kv_heads) return k + (token * kv_heads + head) * head_dim;
    return v + (token * kv_heads + head - kv_heads) * head_dim;
  }
};

struct Rotation {
  const int32_t* positions;
  const float *cos, *sin;
};

// Without norms. A thread has N channels and their partners, half a head further on; a block has `tokens_per_block`
// tokens. Backward is the rotation by the negative angle, from the three tensors into the projection's gradient.
template <typename T, int N, bool kBackward>
__global__ void __launch_bounds__(kThreads)
    rotate_kernel(Heads<T> h, Rotation r, int64_t tokens, uint32_t tokens_per_block) {
  const int half = h.head_dim / 2;
  const auto pieces = static_cast<uint32_t>(half / N), per_token = static_cast<uint32_t>(h.all()) * pieces;
  for (int64_t first = int64_t{blockIdx.x} * tokens_per_block; first < tokens;
       first += int64_t{gridDim.x} * tokens_per_block) {
    const auto count = static_cast<uint32_t>(min(int64_t{tokens_per_block}, tokens - first)) * per_token;
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
      const int64_t token = first + i / per_token;
      const uint32_t rest = i % per_token;
      const int head = static_cast<int>(rest / pieces), c = static_cast<int>(rest % pieces) * N;
      T* packed = h.packed(token, head) + c;
      T* apart = h.apart(token, head) + c;
      const T* from = kBackward ? apart : packed;
      T* to = kBackward ? packed : apart;
      float a[N], b[N];
      load(from, a);
      load(from + half, b);
      if (!h.is_v(head)) {
        const int64_t row = int64_t{r.positions[token]} * half;
        float cos[N], sin[N];
        load_f32(r.cos + row + c, cos);
        load_f32(r.sin + row + c, sin);
#pragma unroll
        for (int k = 0; k < N; ++k) {
          const float s = kBackward ? -sin[k] : sin[k], first_half = a[k];
          a[k] = first_half * cos[k] - b[k] * s;
          b[k] = b[k] * cos[k] + first_half * s;
        }
      }
      store(to, a);
      store(to + half, b);
    }
  }
}

template <typename T>
struct Norms {
  const T *q, *k;
  float *rstd_q, *rstd_k;
  float eps;
};

template <typename T>
__device__ float* rstd_of(const Heads<T>& h, const Norms<T>& n, int64_t token, int head) {
  return head < h.heads ? n.rstd_q + token * h.heads + head : n.rstd_k + token * h.kv_heads + head - h.heads;
}

// With norms a warp has a head: lane l the channel pairs l, l + 32, …
template <typename T>
__global__ void __launch_bounds__(kThreads) norm_rotate_kernel(Heads<T> h, Rotation r, Norms<T> n, int64_t tokens) {
  const int half = h.head_dim / 2, lane = threadIdx.x % 32;
  const int64_t count = tokens * h.all();
  for (int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; i < count; i += int64_t{gridDim.x} * kWarps) {
    const int64_t token = i / h.all();
    const int head = static_cast<int>(i % h.all());
    const T* from = h.packed(token, head);
    T* to = h.apart(token, head);
    if (h.is_v(head)) {
      for (int c = lane; c < h.head_dim; c += 32) to[c] = from[c];
      continue;
    }
    float a[kMaxPairs], b[kMaxPairs], squares = 0;
#pragma unroll
    for (int p = 0; p < kMaxPairs; ++p) {
      const int c = lane + 32 * p;
      a[p] = c < half ? to_float(from[c]) : 0.0f;
      b[p] = c < half ? to_float(from[c + half]) : 0.0f;
      squares += a[p] * a[p] + b[p] * b[p];
    }
    const float rstd = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(h.head_dim) + n.eps);
    if (lane == 0) *rstd_of(h, n, token, head) = rstd;
    const T* weight = head < h.heads ? n.q : n.k;
    const int64_t row = int64_t{r.positions[token]} * half;
#pragma unroll
    for (int p = 0; p < kMaxPairs; ++p) {
      const int c = lane + 32 * p;
      if (c >= half) continue;
      const float cos = r.cos[row + c], sin = r.sin[row + c];
      const float x = a[p] * rstd * to_float(weight[c]), y = b[p] * rstd * to_float(weight[c + half]);
      to[c] = from_float<T>(x * cos - y * sin);
      to[c + half] = from_float<T>(y * cos + x * sin);
    }
  }
}

// `h` holds the gradients, `qkv` the projection's output. partial [gridDim.x, 2, d]: of q's norm, then k's.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    norm_rotate_backward_kernel(Heads<T> h, Rotation r, Norms<T> n, const T* qkv, int64_t tokens, float* partial) {
  SB_DYNAMIC_SHARED(float, sums);  // [2, d]
  const int half = h.head_dim / 2, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t count = tokens * h.all();
  float dnorm[2][2][kMaxPairs] = {};  // of q and k; first and second half
  for (int64_t i = int64_t{blockIdx.x} * kWarps + warp; i < count; i += int64_t{gridDim.x} * kWarps) {
    const int64_t token = i / h.all();
    const int head = static_cast<int>(i % h.all());
    const T* from = h.apart(token, head);
    T* to = h.packed(token, head);
    if (h.is_v(head)) {
      for (int c = lane; c < h.head_dim; c += 32) to[c] = from[c];
      continue;
    }
    const bool is_q = head < h.heads;
    const T* weight = is_q ? n.q : n.k;
    const T* x = qkv + (token * h.all() + head) * h.head_dim;
    const float rstd = *rstd_of(h, n, token, head);
    const int64_t row = int64_t{r.positions[token]} * half;
    float ga[kMaxPairs], gb[kMaxPairs], xa[kMaxPairs], xb[kMaxPairs], product = 0;
#pragma unroll
    for (int p = 0; p < kMaxPairs; ++p) {
      const int c = lane + 32 * p;
      ga[p] = gb[p] = xa[p] = xb[p] = 0;
      if (c >= half) continue;
      const float cos = r.cos[row + c], sin = r.sin[row + c];
      const float a = to_float(from[c]), b = to_float(from[c + half]);
      const float da = a * cos + b * sin, db = b * cos - a * sin;
      xa[p] = to_float(x[c]) * rstd;  // normalised
      xb[p] = to_float(x[c + half]) * rstd;
      const float sa = da * xa[p], sb = db * xb[p];
      dnorm[0][0][p] += is_q ? sa : 0.0f;
      dnorm[0][1][p] += is_q ? sb : 0.0f;
      dnorm[1][0][p] += is_q ? 0.0f : sa;
      dnorm[1][1][p] += is_q ? 0.0f : sb;
      ga[p] = da * to_float(weight[c]);
      gb[p] = db * to_float(weight[c + half]);
      product += ga[p] * xa[p] + gb[p] * xb[p];
    }
    const float mean = warp_sum(product) / static_cast<float>(h.head_dim);
#pragma unroll
    for (int p = 0; p < kMaxPairs; ++p) {
      const int c = lane + 32 * p;
      if (c >= half) continue;
      to[c] = from_float<T>(rstd * (ga[p] - xa[p] * mean));
      to[c + half] = from_float<T>(rstd * (gb[p] - xb[p] * mean));
    }
  }
  for (int turn = 0; turn < kWarps; ++turn) {
    if (warp == turn) {
#pragma unroll
      for (int p = 0; p < kMaxPairs; ++p) {
        const int c = lane + 32 * p;
        if (c >= half) continue;
#pragma unroll
        for (int which = 0; which < 2; ++which) {
#pragma unroll
          for (int part = 0; part < 2; ++part) {
            float& sum = sums[which * h.head_dim + part * half + c];
            sum = turn == 0 ? dnorm[which][part][p] : sum + dnorm[which][part][p];
          }
        }
      }
    }
    __syncthreads();
  }
  for (int c = threadIdx.x; c < 2 * h.head_dim; c += kThreads) partial[blockIdx.x * 2 * h.head_dim + c] = sums[c];
}

__global__ void add_norm_sums(const float* sums, int head_dim, float* q, float* k) {
  for (int c = threadIdx.x; c < head_dim; c += blockDim.x) {
    q[c] += sums[c];
    k[c] += sums[head_dim + c];
  }
}

template <typename T, bool kBackward>
void launch_rotation(const Exec& exec, const Heads<T>& h, const Rotation& r, int64_t tokens) {
  const auto launch = [&]<int N>() {
    const int64_t per_token = int64_t{h.heads + 2 * h.kv_heads} * (h.head_dim / 2 / N);
    const int64_t tokens_per_block = std::max<int64_t>(1, 2 * kThreads / per_token);
    launch_kernel(rotate_kernel<T, N, kBackward>,
                  {grid_for(ceil_div(tokens, tokens_per_block)), kThreads, 0, stream_of(exec)}, h, r, tokens,
                  static_cast<uint32_t>(tokens_per_block));
  };
  if (vectors_fit<T>(h.head_dim / 2, {h.qkv, h.q, h.k, h.v, r.cos, r.sin}))
    launch.template operator()<kVector<T>>();
  else
    launch.template operator()<1>();
  SB_CUDA_LAUNCHED();
}

void check_norm_width(const QkvShape& shape) {
  SB_CHECK(shape.head_dim <= 64 * kMaxPairs, "q/k norms over {} channels; at most {} on CUDA", shape.head_dim,
           64 * kMaxPairs);
}

}  // namespace

void qkv_rope_forward(const Exec& exec, const QkvShape& shape, TensorView qkv, TensorView positions, TensorView cos,
                      TensorView sin, TensorView q_norm, TensorView k_norm, float eps, TensorView q, TensorView k,
                      TensorView v, TensorView rstd_q, TensorView rstd_k) {
  const int64_t tokens = qkv.dim(0);
  if (tokens == 0) return;
  const Rotation rotation = {data<int32_t>(positions), data<float>(cos), data<float>(sin)};
  with_type(qkv.dtype(), "qkv_rope_forward", [&](auto element) {
    using T = decltype(element);
    const Heads<T> heads = {shape.heads, shape.kv_heads, shape.head_dim, data<T>(qkv),
                            data<T>(q),  data<T>(k),     data<T>(v)};
    if (q_norm.empty()) return launch_rotation<T, false>(exec, heads, rotation, tokens);
    check_norm_width(shape);
    const Norms<T> norms = {data<T>(q_norm), data<T>(k_norm), data<float>(rstd_q), data<float>(rstd_k), eps};
    const int64_t blocks = ceil_div(tokens * (shape.heads + 2 * shape.kv_heads), kWarps);
    launch_kernel(norm_rotate_kernel<T>, {grid_for(blocks), kThreads, 0, stream_of(exec)}, heads, rotation, norms,
                  tokens);
    SB_CUDA_LAUNCHED();
  });
}

void qkv_rope_backward(const Exec& exec, const QkvShape& shape, TensorView dq, TensorView dk, TensorView dv,
                       TensorView positions, TensorView cos, TensorView sin, TensorView qkv, TensorView q_norm,
                       TensorView k_norm, TensorView rstd_q, TensorView rstd_k, TensorView dqkv, TensorView dq_norm,
                       TensorView dk_norm) {
  const int64_t tokens = dqkv.dim(0), d = shape.head_dim;
  if (tokens == 0) return;
  const Rotation rotation = {data<int32_t>(positions), data<float>(cos), data<float>(sin)};
  with_type(dqkv.dtype(), "qkv_rope_backward", [&](auto element) {
    using T = decltype(element);
    const Heads<T> heads = {shape.heads, shape.kv_heads, shape.head_dim, data<T>(dqkv),
                            data<T>(dq), data<T>(dk),    data<T>(dv)};
    if (q_norm.empty()) return launch_rotation<T, true>(exec, heads, rotation, tokens);
    check_norm_width(shape);
    const Norms<T> norms = {data<T>(q_norm), data<T>(k_norm), data<float>(rstd_q), data<float>(rstd_k), 0.0f};
    const ArenaScope scope(*exec.scratch);
    float* partial = exec.scratch->allocate_array<float>((kPartialRows - 1) * 2 * d);
    float* sums = exec.scratch->allocate_array<float>(2 * d);
    const auto blocks = static_cast<int>(
        std::min<int64_t>(kPartialRows - 1, ceil_div(tokens * (shape.heads + 2 * shape.kv_heads), kWarps)));
    launch_kernel(
        norm_rotate_backward_kernel<T>,
        {static_cast<unsigned>(blocks), kThreads, static_cast<size_t>(2 * d) * sizeof(float), stream_of(exec)}, heads,
        rotation, norms, data<T>(qkv), tokens, partial);
    SB_CUDA_LAUNCHED();
    if (dq_norm.empty()) return;
    SB_CUDA_CHECK(cudaMemsetAsync(sums, 0, static_cast<size_t>(2 * d) * sizeof(float), stream_of(exec)));
    add_partial_sums(exec, partial, blocks, 2 * d, sums);
    launch_kernel(add_norm_sums, {1, 256, 0, stream_of(exec)}, sums, shape.head_dim, dq_norm.f32(), dk_norm.f32());
    SB_CUDA_LAUNCHED();
  });
}

}  // namespace sb::cuda
