#include "device/cuda.h"
#include "device/kernel.cuh"
#include "eval/gpu/decode.h"
#include "ops/cuda/vector.cuh"

namespace sb::cuda {
namespace {

// A thread block reads one block of keys for so many query heads of a group; a second kernel joins the blocks.
constexpr int kWarps = 4, kHeads = 8;
constexpr int kJoinWarps = 16;
constexpr int kSharedBytes = 48 << 10;

template <typename T>
struct Token {
  const T *q, *k, *v;
  T* out;
  int64_t tokens;
  int heads, kv_heads, d, block;
  float scale;
  const int32_t* lists;
  int64_t room;
  float* parts;  // [heads, room, d + 2]: weighted values, the largest score, the sum of weights

  __device__ int64_t blocks(int kv_head) const {
    return lists != nullptr ? lists[kv_head * (room + 1)] : (tokens + block - 1) / block;
  }
  __device__ int64_t first_key(int kv_head, int64_t place) const {
    return (lists != nullptr ? lists[kv_head * (room + 1) + 1 + place] : place) * block;
  }
  __device__ float* part(int head, int64_t place) const { return parts + (head * room + place) * (d + 2); }
};

__device__ float warp_max(float x) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

// A lane has channels 2 · (lane + 32 · p) and the next one.
template <int kPairs, typename T>
__device__ void load_pairs(const T* row, int d, int lane, float (&to)[kPairs][2]) {
#pragma unroll
  for (int p = 0; p < kPairs; ++p) {
    const int c = 2 * (lane + 32 * p);
    if (c < d)
      load(row + c, to[p]);
    else
      to[p][0] = to[p][1] = 0;
  }
}

// scores [kHeads, block] of the keys, scaled.
template <int kPairs, typename T>
__device__ void score_keys(const Token<T>& token, const T* k, int keys, const float* q, float* scores) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, d = token.d;
  const int64_t stride = int64_t{token.kv_heads} * d;
#pragma unroll 2
  for (int key = warp; key < keys; key += kWarps) {
    float row[kPairs][2];
    load_pairs(k + key * stride, d, lane, row);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      float product = 0;
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        const int c = 2 * (lane + 32 * p);
        if (c < d) product += row[p][0] * q[h * d + c] + row[p][1] * q[h * d + c + 1];
      }
      product = warp_sum(product);
      if (lane == 0) scores[h * token.block + key] = token.scale * product;
    }
  }
}

template <typename T, int kPairs>
__global__ void __launch_bounds__(kWarps * 32) decode_kernel(Token<T> token) {
  SB_DYNAMIC_SHARED(float, shared);
  const int d = token.d, block = token.block, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* q = shared;                      // [kHeads, d]
  float* scores = q + kHeads * d;         // [kHeads, block]
  float* sums = scores + kHeads * block;  // [kWarps, kHeads, d]
  const int64_t place = blockIdx.x;
  const int kv_head = blockIdx.y, group = token.heads / token.kv_heads;
  const int first_head = kv_head * group + blockIdx.z * kHeads;
  const int heads = min(kHeads, (kv_head + 1) * group - first_head);
  if (place >= token.blocks(kv_head)) return;
  const int64_t begin = token.first_key(kv_head, place);
  const int keys = static_cast<int>(min(static_cast<int64_t>(block), token.tokens - begin));
  const int64_t stride = int64_t{token.kv_heads} * d, first = begin * stride + int64_t{kv_head} * d;
  for (int i = threadIdx.x; i < kHeads * d; i += blockDim.x)
    q[i] = i < heads * d ? to_float(token.q[int64_t{first_head} * d + i]) : 0.0f;
  __syncthreads();
  score_keys<kPairs>(token, token.k + first, keys, q, scores);
  __syncthreads();
  for (int h = warp; h < kHeads; h += kWarps) {
    float* row = scores + h * block;
    float top = -INFINITY, sum = 0;
    for (int key = lane; key < keys; key += 32) top = fmaxf(top, row[key]);
    top = warp_max(top);
    for (int key = lane; key < keys; key += 32) {
      row[key] = expf(row[key] - top);
      sum += row[key];
    }
    sum = warp_sum(sum);
    if (lane == 0 && h < heads) {
      float* part = token.part(first_head + h, place);
      part[d] = top;
      part[d + 1] = sum;
    }
  }
  __syncthreads();
  float values[kHeads][kPairs][2] = {};
#pragma unroll 2
  for (int key = warp; key < keys; key += kWarps) {
    float row[kPairs][2];
    load_pairs(token.v + first + key * stride, d, lane, row);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const float weight = scores[h * block + key];
#pragma unroll
      for (int p = 0; p < kPairs; ++p) {
        values[h][p][0] += weight * row[p][0];
        values[h][p][1] += weight * row[p][1];
      }
    }
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      const int c = 2 * (lane + 32 * p);
      if (c < d) store(sums + (warp * kHeads + h) * d + c, values[h][p]);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < heads * d; i += blockDim.x) {
    float sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += sums[w * kHeads * d + i];
    token.part(first_head + i / d, place)[i % d] = sum;
  }
}

// One thread block a query head.
template <typename T, int kPairs>
__global__ void __launch_bounds__(kJoinWarps * 32) join_kernel(Token<T> token) {
  SB_DYNAMIC_SHARED(float, sums);  // [kJoinWarps, d]
  SB_SHARED(float, tops, [kJoinWarps]);
  SB_SHARED(float, totals, [kJoinWarps]);
  const int d = token.d, warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.x;
  const int64_t blocks = token.blocks(head / (token.heads / token.kv_heads));
  float top = -INFINITY;
  for (int64_t place = threadIdx.x; place < blocks; place += blockDim.x) top = fmaxf(top, token.part(head, place)[d]);
  top = warp_max(top);
  if (lane == 0) tops[warp] = top;
  __syncthreads();
  for (int w = 0; w < kJoinWarps; ++w) top = fmaxf(top, tops[w]);
  float values[kPairs][2] = {}, total = 0;
  for (int64_t place = warp; place < blocks; place += kJoinWarps) {
    const float* part = token.part(head, place);
    const float weight = expf(part[d] - top);
    float row[kPairs][2];
    load_pairs(part, d, lane, row);
    total += weight * part[d + 1];
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      values[p][0] += weight * row[p][0];
      values[p][1] += weight * row[p][1];
    }
  }
  if (lane == 0) totals[warp] = total;
#pragma unroll
  for (int p = 0; p < kPairs; ++p) {
    const int c = 2 * (lane + 32 * p);
    if (c < d) store(sums + warp * d + c, values[p]);
  }
  __syncthreads();
  for (int c = threadIdx.x; c < d; c += blockDim.x) {
    float sum = 0, weights = 0;
    for (int w = 0; w < kJoinWarps; ++w) {
      sum += sums[w * d + c];
      weights += totals[w];
    }
    token.out[int64_t{head} * d + c] = from_float<T>(sum / weights);
  }
}

template <typename T, int kPairs>
void launch(const Exec& exec, const Token<T>& token) {
  const int group = token.heads / token.kv_heads;
  const size_t bytes = sizeof(float) * kHeads * ((1 + kWarps) * token.d + token.block);
  SB_CHECK(bytes <= kSharedBytes, "decoding of heads of {} channels with key blocks of {}", token.d, token.block);
  const dim3 grid(static_cast<unsigned>(ceil_div(token.tokens, token.block)), static_cast<unsigned>(token.kv_heads),
                  static_cast<unsigned>(ceil_div(group, kHeads)));
  launch_kernel(decode_kernel<T, kPairs>, {grid, kWarps * 32, bytes, stream_of(exec)}, token);
  SB_CUDA_LAUNCHED();
  launch_kernel(
      join_kernel<T, kPairs>,
      {static_cast<unsigned>(token.heads), kJoinWarps * 32, sizeof(float) * kJoinWarps * token.d, stream_of(exec)},
      token);
  SB_CUDA_LAUNCHED();
}

// As fill_part() of attention/select/block_statistics.cpp: mean, then variance in a second pass, of every part.
template <typename T>
__global__ void part_statistics_kernel(const T* k, int kv_heads, int d, int block, int part, bool moments,
                                       float* rows) {
  const int parts = block / part, head = blockIdx.y;
  const int64_t stride = int64_t{kv_heads} * d, width = moments ? 2 * d : d;
  const T* keys = k + int64_t{blockIdx.x} * block * stride + int64_t{head} * d;
  float* out = rows + (int64_t{head} * gridDim.x + blockIdx.x) * width * parts;
  const float inverse = 1.0f / static_cast<float>(part);
  for (int item = threadIdx.x; item < parts * d; item += blockDim.x) {
    const int c = item % d, number = item / d;
    const T* first = keys + int64_t{number} * part * stride + c;
    float mean = 0, squares = 0;
    for (int t = 0; t < part; ++t) mean += to_float(first[t * stride]);
    mean *= inverse;
    out[int64_t{c} * parts + number] = mean;
    if (!moments) continue;
    for (int t = 0; t < part; ++t) {
      const float difference = to_float(first[t * stride]) - mean;
      squares += difference * difference;
    }
    out[int64_t{d + c} * parts + number] = squares * inverse;
  }
}

template <typename T>
__global__ void gather_kernel(const T* k, int64_t tokens, int kv_heads, int d, const int32_t* channels, int count,
                              float* out) {
  const int64_t items = tokens * kv_heads * count;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < items; i += int64_t{gridDim.x} * blockDim.x) {
    const int64_t row = i / count;  // of a token's kv head
    out[i] = to_float(k[row * d + channels[row % kv_heads * count + i % count]]);
  }
}

std::vector<float> to_host(const float* from, int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  copy_and_wait(from, values.data(), count * static_cast<int64_t>(sizeof(float)));
  return values;
}

// The selected channels of the keys come to the host, where they are all channels there are.
std::vector<float> plane_statistics(const Exec& exec, const AttentionShape& shape, const BlockScoring& scoring,
                                    TensorView keys, const LayerPlanes& planes) {
  const int64_t tokens = keys.dim(0), items = tokens * shape.kv_heads * planes.channels;
  const ArenaScope scope(*exec.scratch);
  auto* channels = exec.scratch->allocate_array<int32_t>(std::ssize(planes.channel));
  float* gathered = exec.scratch->allocate_array<float>(items);
  copy_and_wait(planes.channel.data(), channels, std::ssize(planes.channel) * static_cast<int64_t>(sizeof(int32_t)));
  with_type(keys.dtype(), "block statistics", [&](auto element) {
    using T = decltype(element);
    launch_kernel(gather_kernel<T>, {grid_for(ceil_div(items, 256)), 256, 0, stream_of(exec)}, data<T>(keys), tokens,
                  shape.kv_heads, shape.head_dim, channels, planes.channels, gathered);
    SB_CUDA_LAUNCHED();
  });
  const std::vector<float> selected = to_host(gathered, items);
  AttentionShape narrow = shape;
  narrow.head_dim = planes.channels;
  LayerPlanes all = planes;
  for (int i = 0; i < shape.kv_heads * planes.channels; ++i) all.channel[static_cast<size_t>(i)] = i % planes.channels;
  std::vector<float> rows(static_cast<size_t>(BlockStatistics::floats(scoring, narrow, tokens / scoring.block)));
  BlockStatistics::fill({.pool = exec.pool}, narrow, scoring, selected.data(), tokens, rows.data(), &all);
  return rows;
}

}  // namespace

int64_t decode_scratch_bytes(const AttentionShape& shape, int64_t room) {
  return Arena::rounded(int64_t{shape.heads} * room * (shape.head_dim + 2) * static_cast<int64_t>(sizeof(float)));
}

void decode_attention(const Exec& exec, const DecodeParams& params) {
  const AttentionShape& shape = params.shape;
  const ArenaScope scope(*exec.scratch);
  float* parts = exec.scratch->allocate_array<float>(int64_t{shape.heads} * params.room * (shape.head_dim + 2));
  with_type(params.q.dtype(), "decoding", [&](auto element) {
    using T = decltype(element);
    const Token<T> token{data<T>(params.q),
                         data<T>(params.k),
                         data<T>(params.v),
                         data<T>(params.out),
                         params.tokens,
                         shape.heads,
                         shape.kv_heads,
                         shape.head_dim,
                         params.block,
                         shape.scale,
                         params.lists,
                         params.room,
                         parts};
    SB_CHECK(shape.head_dim % 2 == 0 && shape.head_dim <= 256, "decoding of heads of {} channels", shape.head_dim);
    if (shape.head_dim <= 64)
      launch<T, 1>(exec, token);
    else if (shape.head_dim <= 128)
      launch<T, 2>(exec, token);
    else
      launch<T, 4>(exec, token);
  });
}

std::vector<float> block_statistics(const Exec& exec, const AttentionShape& shape, const BlockScoring& scoring,
                                    TensorView keys, const LayerPlanes* planes) {
  check_planes(scoring, shape, planes);
  if (scoring.planes()) return plane_statistics(exec, shape, scoring, keys, *planes);
  const int64_t blocks = keys.dim(0) / scoring.block, floats = BlockStatistics::floats(scoring, shape, blocks);
  const ArenaScope scope(*exec.scratch);
  float* rows = exec.scratch->allocate_array<float>(floats);
  with_type(keys.dtype(), "block statistics", [&](auto element) {
    using T = decltype(element);
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(shape.kv_heads));
    launch_kernel(part_statistics_kernel<T>, {grid, 256, 0, stream_of(exec)}, data<T>(keys), shape.kv_heads,
                  shape.head_dim, scoring.block, scoring.part, scoring.moments(), rows);
    SB_CUDA_LAUNCHED();
  });
  return to_host(rows, floats);
}

int64_t block_statistics_scratch_bytes(const AttentionShape& shape, const BlockScoring& scoring, int64_t blocks) {
  const int64_t word = sizeof(float);
  if (!scoring.planes()) return Arena::rounded(BlockStatistics::floats(scoring, shape, blocks) * word);
  const int64_t channels = int64_t{shape.kv_heads} * scoring.channels;
  return Arena::rounded(channels * word) + Arena::rounded(blocks * scoring.block * channels * word);
}

}  // namespace sb::cuda
