#include "attention/gpu/coverage/coverage_blocks.cuh"

#include <algorithm>

#include "attention/gpu/launch/check.cuh"
#include "attention/gpu/portable/portable.cuh"
#include "device/kernel.cuh"

namespace sb::gpu {
namespace {

// A thread block of four warps has one key block under one key/value head in shared memory and multiplies it with the
// measured tokens of its sequence, 64 rows (token, head of the group) at a time.
template <int D>
struct Layout {
  __nv_bfloat16 *q, *k;
  float* statistics;  // [part][mean, variance][D]
  __device__ Layout(unsigned char* raw, int pieces)
      : q(reinterpret_cast<__nv_bfloat16*>(raw)),
        k(q + 64 * kTileStride<D>),
        statistics(reinterpret_cast<float*>(k + pieces * 64 * kTileStride<D>)) {}
  static int bytes(int pieces, int parts) {
    return (1 + pieces) * 64 * kTileStride<D> * 2 + parts * 2 * D * static_cast<int>(sizeof(float));
  }
};

template <int D>
__global__ void __launch_bounds__(128) blocks_kernel(const __grid_constant__ CoverageParams args, const int at_once) {
  SB_DYNAMIC_SHARED(unsigned char, raw, 16);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const CoverageBlock measured = measured_block(args, blockIdx.x);
  const CoverageSequence sequence = args.sequences[measured.sequence];
  const int block = measured.block, kv = blockIdx.y;
  if (block >= sequence.blocks) return;
  const int group = args.shape.query_heads / args.shape.kv_heads;
  const int first_key = block * args.block, keys = min(args.block, sequence.tokens - first_key);
  // Tokens are ascending: those from here on see the block.
  int first_token = 0;
  const auto position_of = [&](int i) { return args.tokens[sequence.first_token + i].position; };
  while (first_token < sequence.sampled && position_of(first_token) < first_key) ++first_token;
  if (first_token == sequence.sampled) return;
  const int pieces = args.block / 64;
  const Layout<D> shared(raw, pieces);
  for (int piece = 0; piece < pieces; ++piece)
    load_tile<D>(shared.k + piece * 64 * kTileStride<D>, static_cast<const __nv_bfloat16*>(args.k), [&](int r) {
      const int key = piece * 64 + r;
      return key < keys ? (static_cast<int64_t>(measured.token + key) * args.shape.kv_heads + kv) * D : int64_t{-1};
    });
  const int part_tokens = args.block / args.parts, parts = (keys + part_tokens - 1) / part_tokens;
  const bool single_keys = part_tokens == 1;  // their estimate is what is measured
  const auto fill_statistics = [&](int first_part, int count) {
    for (int at = threadIdx.x; at < D * count; at += 128) {
      const int c = at % D, begin = (first_part + at / D) * part_tokens, end = min(keys, begin + part_tokens);
      const float inverse = 1.f / static_cast<float>(end - begin);
      float mean = 0, square = 0;
      for (int t = begin; t < end; ++t) mean += __bfloat162float(shared.k[t * kTileStride<D> + c]);
      mean *= inverse;
      for (int t = begin; t < end; ++t) {
        const float x = __bfloat162float(shared.k[t * kTileStride<D> + c]) - mean;
        square += x * x;
      }
      shared.statistics[at / D * 2 * D + c] = mean * args.shape.scale;
      shared.statistics[at / D * 2 * D + D + c] =
          args.moments ? square * inverse * args.shape.scale * args.shape.scale / 2 : 0.f;
    }
  };
  copies_done();
  __syncthreads();
  if (!single_keys && parts <= at_once) fill_statistics(0, parts);

  const int rows = (sequence.sampled - first_token) * group;
  for (int base = 0; base < rows; base += 64) {
    __syncthreads();
    load_tile<D>(shared.q, static_cast<const __nv_bfloat16*>(args.q), [&](int r) {
      if (base + r >= rows) return int64_t{-1};
      return (query_row(args, sequence, first_token + (base + r) / group) * args.shape.query_heads + kv * group +
              (base + r) % group) *
             D;
    });
    copies_done();
    __syncthreads();

    // Largest score and sum of this lane's two rows.
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
    int last_key[2];  // that the row sees
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = min(base + warp * 16 + lane / 4 + 8 * h, rows - 1);
      last_key[h] = min(keys - 1, position_of(first_token + row / group) - first_key);
    }
    for (int piece = 0; piece * 64 < keys; ++piece) {
      float s[32];
      product<D, 8>(s, shared.q, warp * 16, shared.k + piece * 64 * kTileStride<D>, 0);
#pragma unroll
      for (int h = 0; h < 2; ++h)
        softmax_step(s, h, args.shape.scale, top[h], sum[h],
                     [&](int row, int column) { return piece * 64 + column <= last_key[row]; });
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float all = softmax_sum(sum[h]);
      const int row = base + warp * 16 + lane / 4 + 8 * h;
      if (lane % 4 != 0 || row >= rows) continue;
      float* to = block_triple(args, sequence, first_token + row / group, kv * group + row % group, block);
      to[0] = top[h];
      to[1] = all;
      if (single_keys) to[2] = top[h] + logf(all);
    }
    if (single_keys) continue;

    // The estimates: two threads per row, each half of the channels.
    const int row = threadIdx.x / 2, half = threadIdx.x % 2;
    const __nv_bfloat16* q = shared.q + row * kTileStride<D> + half * (D / 2);
    float best = -INFINITY, all = 0;
    for (int first_part = 0; first_part < parts; first_part += at_once) {
      const int count = min(at_once, parts - first_part);
      if (parts > at_once) {
        __syncthreads();
        fill_statistics(first_part, count);
        __syncthreads();
      }
      for (int part = 0; part < count; ++part) {
        const float* mean = shared.statistics + part * 2 * D + half * (D / 2);
        float estimate = 0;
#pragma unroll 8
        for (int c = 0; c < D / 2; c += 2) {
          const float2 x = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(q + c));
          const float2 m = *reinterpret_cast<const float2*>(mean + c),
                       v = *reinterpret_cast<const float2*>(mean + D + c);
          estimate += x.x * (m.x + x.x * v.x) + x.y * (m.y + x.y * v.y);
        }
        estimate += __shfl_xor_sync(~0u, estimate, 1);
        const float next = fmaxf(best, estimate);
        all = all * __expf(best - next) + __expf(estimate - next);
        best = next;
      }
    }
    if (half == 0 && base + row < rows)
      block_triple(args, sequence, first_token + (base + row) / group, kv * group + (base + row) % group, block)[2] =
          best + logf(all);
  }
}

}  // namespace

void tensor_coverage_blocks(const CoverageParams& p, int count, cudaStream_t stream) {
  for_head_dim(p.shape.head_dim, [&](auto d) {
    constexpr int D = decltype(d)::value;
    // More statistics at once would leave room for fewer thread blocks.
    const int at_once = std::min(p.parts, std::max(1, 16 * 1024 / (2 * D * 4)));
    const int bytes = Layout<D>::bytes(p.block / 64, at_once);
    allow_shared_memory(blocks_kernel<D>, bytes, "shared memory of the coverage");
    launch_kernel(blocks_kernel<D>, {dim3(count, p.shape.kv_heads), 128, bytes, stream}, p, at_once);
    check(cudaGetLastError(), "coverage of key blocks");
  });
}

}  // namespace sb::gpu
