#include "attention/hopper/launch.h"
#include "attention/hopper/row_loader.h"
#include "attention/hopper/wgmma.h"

namespace sb::hopper {
namespace {

constexpr float kLn2 = 0.6931471805599453f;
constexpr float kSlack = 8;    // probabilities up to 2^8 before a row's maximum is raised
constexpr int kThreads = 384;  // one warpgroup loads, two compute; each of those owns one subtile of the tile

template <int D>
struct alignas(1024) Smem {
  static constexpr int kDim = D, kSlots = 2, kStages = 2;
  static constexpr bool kGradient = false, kKeysAhead = true;
  __nv_bfloat16 q[kSlots][2 * kSubtileRows * D];  // [slot][subtile][d / 64][row][64]
  __nv_bfloat16 k[kStages][kBlock * D];           // [stage][d / 64][row][64]
  __nv_bfloat16 v[kStages][kBlock * D];
  TileMessage tile[kSlots];
  StepMessage step[kStages];
  alignas(8) uint64_t q_full[kSlots], q_empty[kSlots], k_full[kStages], k_empty[kStages], v_full[kStages],
      v_empty[kStages];
};

struct Arguments {
  RowArguments work;
  float scale;
  int32_t query_heads;
  __nv_bfloat16* o;
  float* lse;
};

template <int D>
struct Consumer {
  static constexpr int kSlots = Smem<D>::kSlots, kStages = Smem<D>::kStages;
  Smem<D>& smem;
  const Arguments& args;
  int group, warp, lane;  // group 0 or 1, warp 0..3 in it
  Cursor tile, k, v;
  int slot = 0;  // of the tile in work
  ForwardItem item;
  int token[2];  // of this thread's two rows, in the tile
  float scale_log2;
  float o[D / 2];
  float s[64];
  uint32_t p[32];
  float row_base[2], row_sum[2];  // exponents (base 2) are taken relative to row_base

  __device__ void issue_scores() {
    const uint32_t a = shared_address(smem.q[slot]) + group * kSubtileRows * D * 2;
    const uint32_t b = shared_address(smem.k[k.stage]);
#pragma unroll
    for (int kk = 0; kk < D / 16; ++kk) {
      const uint32_t inside = (kk % 4) * 32;
      wgmma_ss<0, 0>(s, tile_descriptor(a + (kk / 4) * kSubtileRows * 128 + inside),
                     tile_descriptor(b + (kk / 4) * kBlock * 128 + inside), kk != 0);
    }
    wgmma_commit();
  }

  __device__ void issue_output(int accumulate) {
    const uint32_t b = shared_address(smem.v[v.stage]);
#pragma unroll
    for (int kk = 0; kk < kBlock / 16; ++kk)
      wgmma_rs<1>(o, p + 4 * kk, tile_descriptor(b + kk * 2048, kBlock * 128), accumulate | (kk != 0));
    wgmma_commit();
  }

  // Turns s into probabilities relative to a maximum of the row. The maximum is raised only when the new one is well
  // above it: a stale one gives the same result, since sum and output refer to the same. Returns whether any row of the
  // warp was raised, and by how much its older sums shrink.
  __device__ bool softmax(const StepMessage& step, float (&shrink)[2]) {
    if (step.offset + kBlock - 1 > 0) {  // some key of the block is later than the tile's first token
      const int column = 2 * (lane % 4) + step.offset;
#pragma unroll
      for (int j = 0; j < 16; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (column + 8 * j + (e & 1) > token[e >> 1]) s[4 * j + e] = -INFINITY;
    }
    float minus[2];
    bool raised = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float m[2] = {s[2 * h], s[2 * h + 1]};
#pragma unroll
      for (int j = 1; j < 16; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) m[e] = fmaxf(m[e], s[4 * j + 2 * h + e]);
      float top = fmaxf(m[0], m[1]);
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const bool hidden = token[h] < step.first;  // the staircase: this row came before the block was chosen
      const bool raise = !hidden && top * scale_log2 > row_base[h] + kSlack;
      const float base = raise ? top * scale_log2 : row_base[h];
      shrink[h] = raise ? exp2_fast(row_base[h] - base) : 1.f;
      row_base[h] = base;
      minus[h] = hidden || base == -INFINITY ? -INFINITY : -base;
      raised = raised || raise;
    }
#pragma unroll
    for (int i = 0; i < 64; ++i) s[i] = exp2_fast(fmaf(s[i], scale_log2, minus[(i >> 1) & 1]));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum[2] = {0, 0};
#pragma unroll
      for (int j = 0; j < 16; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) sum[e] += s[4 * j + 2 * h + e];
      row_sum[h] = row_sum[h] * shrink[h] + (sum[0] + sum[1]);
    }
    return __any_sync(~0u, raised);
  }

  __device__ void pack() {
#pragma unroll
    for (int i = 0; i < 32; ++i) p[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
  }

  // The two groups take turns in filling the tensor cores, so that one computes exponentials while the other
  // multiplies.
  __device__ void turn_begin() {
    named_sync(1 + group, 256);
  }
  __device__ void turn_end() {
    named_arrive(1 + (group ^ 1), 256);
  }

  __device__ int64_t output_row(const ForwardItem& it, int row) const {
    return packed_row(args.work.rows, it, group, row, args.query_heads);
  }

  __device__ void store_lse(const ForwardItem& it, float upper, float lower) {
    if (lane % 4 != 0) return;
    const int row = warp * 16 + lane / 4;
    const int64_t first = output_row(it, row), second = output_row(it, row + 8);
    if (first >= 0) args.lse[first] = upper;
    if (second >= 0) args.lse[second] = lower;
  }

  __device__ void store_output(const ForwardItem& it, uint32_t staging, bool zero) {
    store_staged<D>(args.o, staging, warp, lane, zero, [&](int row) { return output_row(it, row) * D; });
  }

  __device__ void epilogue(const ForwardItem& it, int tile_slot) {
    float lse[2], inverse[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = row_sum[h];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      inverse[h] = sum > 0 ? 1.f / sum : 0.f;
      lse[h] = sum > 0 ? row_base[h] * kLn2 + logf(sum) : -INFINITY;
    }
    store_lse(it, lse[0], lse[1]);
    // The tile's own q is not needed any more: its area takes the output on the way out.
    const uint32_t staging = shared_address(smem.q[tile_slot]) + group * kSubtileRows * D * 2;
    named_sync(3 + group, 128);
    stage_accumulator<D>(staging, o, inverse[0], inverse[1], warp, lane);
    __syncwarp();
    store_output(it, staging, false);
    async_fence();  // the copy engine fills this area next
    release(smem.q_empty[tile_slot], lane);
  }

  // Waits for the next tile; returns its state.
  __device__ int next_tile() {
    barrier_wait(shared_address(&smem.q_full[tile.stage]), tile.phase);
    slot = tile.stage;
    tile.advance(kSlots);
    item = smem.tile[slot].item;
    return smem.tile[slot].state;
  }

  __device__ void run() {
    scale_log2 = args.scale * kLog2e;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      token[h] = group * args.work.rows.tokens + args.work.rows.token(warp * 16 + lane / 4 + 8 * h);
    if (group == 1) turn_end();  // group 0 begins
    // One turn of the loop finishes a tile (its last product with V) and starts the next (its first product with K,
    // which runs while the finished output is written). Before the first tile and after the last one the missing half
    // multiplies whatever lies there: a branch around it would make the compiler serialise the products.
    bool begun = false;
    int accumulate = 0;
    for (;;) {
      const ForwardItem done = item;
      const int done_slot = slot;
      const int state = next_tile();
      if (state == 0) barrier_wait(shared_address(&smem.k_full[k.stage]), k.phase);
      if (begun) barrier_wait(shared_address(&smem.v_full[v.stage]), v.phase);
      turn_begin();
      pin(s);
      wgmma_fence();
      issue_output(accumulate);
      issue_scores();
      turn_end();
      wgmma_wait<1>();
      pin(o);
      if (begun) {
        release(smem.v_empty[v.stage], lane);
        v.advance(kStages);
        epilogue(done, done_slot);
      }
      wgmma_wait<0>();
      pin(s);
      begun = state == 0;
      if (state == 2) break;
      if (state == 1) {  // nothing to see
        store_output(item, 0, true);
        store_lse(item, -INFINITY, -INFINITY);
        release(smem.q_empty[slot], lane);
        continue;
      }
      StepMessage step = smem.step[k.stage];
      release(smem.k_empty[k.stage], lane);
      k.advance(kStages);
      row_base[0] = row_base[1] = -INFINITY;
      row_sum[0] = row_sum[1] = 0;
      float shrink[2];
      softmax(step, shrink);
      pack();
      accumulate = 0;
      while (!step.last) {
        barrier_wait(shared_address(&smem.k_full[k.stage]), k.phase);
        turn_begin();
        pin(s);
        wgmma_fence();
        issue_scores();
        barrier_wait(shared_address(&smem.v_full[v.stage]), v.phase);
        issue_output(accumulate);
        turn_end();
        accumulate = 1;
        wgmma_wait<1>();
        pin(s);
        step = smem.step[k.stage];
        release(smem.k_empty[k.stage], lane);
        k.advance(kStages);
        const bool raised = softmax(step, shrink);
        wgmma_wait<0>();
        pin(o);
        release(smem.v_empty[v.stage], lane);
        v.advance(kStages);
        if (raised) {
#pragma unroll
          for (int i = 0; i < D / 2; ++i) o[i] *= shrink[(i >> 1) & 1];
        }
        pack();
      }
    }
  }
};

template <int D>
__global__ void __launch_bounds__(kThreads, 1)
    forward_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                   const __grid_constant__ CUtensorMap v_map, const __grid_constant__ Arguments args) {
  extern __shared__ __align__(1024) unsigned char raw[];
  Smem<D>& smem = *reinterpret_cast<Smem<D>*>(raw);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) init_row_barriers(smem);
  __syncthreads();
  if (warp < 4) {
    registers_shrink<40>();
    if (warp == 0) {
      RowLoader<Smem<D>> loader{smem, &q_map, nullptr, &k_map, &v_map, args.work, lane};
      loader.run();
    }
  } else {
    registers_grow<232>();
    Consumer<D> consumer{smem, args, warp / 4 - 1, warp % 4, lane};
    consumer.run();
  }
}

template <int D>
void launch(const ForwardParams& p, cudaStream_t stream) {
  const int group = p.shape.query_heads / p.shape.kv_heads;
  const CUtensorMap q_map = packed_map(p.q, p.shape.tokens, p.shape.query_heads, D, p.tiling.heads, p.tiling.tokens);
  const CUtensorMap k_map = packed_map(p.k, p.shape.tokens, p.shape.kv_heads, D, 1, kBlock);
  const CUtensorMap v_map = packed_map(p.v, p.shape.tokens, p.shape.kv_heads, D, 1, kBlock);
  const Arguments args{{group / p.tiling.heads, row_map(p.tiling), p.items, p.item_count, p.row_entries, p.counter},
                       p.shape.scale,
                       p.shape.query_heads,
                       static_cast<__nv_bfloat16*>(p.o),
                       p.lse};
  check(cudaMemsetAsync(p.counter, 0, sizeof(int32_t), stream), "work counter");
  check(cudaFuncSetAttribute(forward_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Smem<D>)),
        "shared memory of the forward");
  const int grid = p.item_count < multiprocessors() ? p.item_count : multiprocessors();
  forward_kernel<D><<<grid, kThreads, sizeof(Smem<D>), stream>>>(q_map, k_map, v_map, args);
  check(cudaGetLastError(), "attention forward");
}

}  // namespace

void forward(const ForwardParams& p, void* stream) {
  check_shape(p.shape, p.tiling);
  if (p.item_count == 0) return;
  if (p.shape.head_dim == 128)
    launch<128>(p, static_cast<cudaStream_t>(stream));
  else
    launch<64>(p, static_cast<cudaStream_t>(stream));
}

}  // namespace sb::hopper
