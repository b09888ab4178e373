#include "attention/gpu/hopper/launch.cuh"
#include "attention/gpu/hopper/prepare.cuh"
#include "attention/gpu/hopper/row_loader.cuh"
#include "attention/gpu/hopper/wgmma.cuh"
#include "attention/gpu/launch/early.cuh"
#include "device/kernel.cuh"

namespace sb::gpu {
namespace {

// Query-stationary half of the deterministic backward: dQ of a tile from its row list, three products per block,
// nothing shared between tiles. Each of the two computing warpgroups owns one subtile. Thread blocks begin as those of
// the half for the keys end, of which they need nothing.

constexpr int kThreads = 384;

template <int D, bool kWithGathered, bool kOfHalves>
struct alignas(1024) Smem {
  static constexpr int kDim = D, kSlots = 2, kStages = 2;
  static constexpr bool kGradient = true, kKeysAhead = false, kGathered = kWithGathered, kHalves = kOfHalves;
  __nv_bfloat16 q[kSlots][2 * kSubtileRows * D];  // [slot][subtile][d / 64][row][64]
  __nv_bfloat16 d_o[2 * kSubtileRows * D];
  __nv_bfloat16 k[kStages][kBlock * D];  // [stage][d / 64][row][64]
  __nv_bfloat16 v[kStages][kBlock * D];
  TileMessage tile[kSlots];
  StepMessage step[kStages];
  alignas(8) uint64_t q_full[kSlots], q_empty[kSlots], do_full, do_empty, k_full[kStages], k_empty[kStages],
      v_full[kStages], v_empty[kStages];
};

static_assert(sizeof(Smem<128, true, true>) <= kSharedMemory && sizeof(Smem<64, true, true>) <= kSharedMemory);

struct Arguments {
  RowArguments work;
  float scale;
  int32_t query_heads;
  const float* statistics;
  __nv_bfloat16* dq;
};

template <int D, bool kGathered, bool kHalves>
struct Consumer {
  using Memory = Smem<D, kGathered, kHalves>;
  static constexpr int kSlots = Memory::kSlots, kStages = Memory::kStages;
  Memory& smem;
  const Arguments& args;
  int group, warp, lane;
  Cursor tile, ring;
  uint32_t gradient_phase = 0;
  int token[2];
  float dq[D / 2];

  // 64 rows of this group against all keys.
  __device__ void issue_product(float (&out)[kBlock / 2], const __nv_bfloat16* rows, const __nv_bfloat16* keys) {
    const uint64_t a = tile_descriptor(shared_address(rows) + group * kSubtileRows * D * 2);
    const uint64_t b = tile_descriptor(shared_address(keys));
#pragma unroll
    for (int kk = 0; kk < D / 16; ++kk) {
      const uint32_t inside = (kk % 4) * 32;
      wgmma_ss<0, 0>(out, further(a, (kk / 4) * kSubtileRows * 128 + inside),
                     further(b, (kk / 4) * kBlock * 128 + inside), kk != 0);
    }
    wgmma_commit();
  }

  __device__ void mask_gathered(float (&s)[kBlock / 2], const StepMessage& step, int slot) {
    const uint32_t seen = smem.step[ring.stage].seen[lane % 4];
#pragma unroll
    for (int j = 0; j < kBlock / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (!seen_column(seen, j, e & 1)) s[4 * j + e] = -INFINITY;
    if (step.offset != kLateSeen) return;
    const int32_t* columns = args.work.gathered.columns + step.column + 2 * (lane % 4);
    const int position = smem.tile[slot].item.position;
#pragma unroll
    for (int j = 0; j < kBlock / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (columns[8 * j + (e & 1)] - position > token[e >> 1]) s[4 * j + e] = -INFINITY;
  }

  __device__ void mask(float (&s)[kBlock / 2], const StepMessage& step, int slot) {
    if (kGathered && step.offset >= kSomeSeen) return mask_gathered(s, step, slot);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int offset = kHalves ? (half == 0 ? step.offset : step.second_offset) : step.offset + half * 64;
      const int column = offset + 2 * (lane % 4);
      if (offset + 63 > 0) {
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (column + 8 * j + (e & 1) > token[e >> 1]) s[32 * half + 4 * j + e] = -INFINITY;
      }
    }
  }

  __device__ void run() {
    const float scale_log2 = args.scale * kLog2e;
    const int row = warp * 16 + lane / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) token[h] = group * args.work.rows.tokens + args.work.rows.token(row + 8 * h);
    for (;;) {
      barrier_wait(shared_address(&smem.q_full[tile.stage]), tile.phase);
      const int slot = tile.stage;
      tile.advance(kSlots);
      const int state = smem.tile[slot].state;
      if (state == 2) break;
      const int64_t subtile = smem.tile[slot].item.subtile + group;
      const float* statistics = args.statistics + subtile * 2 * kSubtileRows + row;
      const float lse[2] = {statistics[0], statistics[8]};
      const float delta[2] = {statistics[kSubtileRows], statistics[kSubtileRows + 8]};
#pragma unroll
      for (int i = 0; i < D / 2; ++i) dq[i] = 0;
      bool last = state == 1;
      while (!last) {
        barrier_wait(shared_address(&smem.k_full[ring.stage]), ring.phase);
        const StepMessage step = smem.step[ring.stage];
        last = step.last;
        float s[kBlock / 2], dp[kBlock / 2];
        uint32_t ds[kBlock / 4];
        barrier_wait(shared_address(&smem.do_full), gradient_phase);
        wgmma_fence();
        issue_product(s, smem.q[slot], smem.k[ring.stage]);
        barrier_wait(shared_address(&smem.v_full[ring.stage]), ring.phase);
        issue_product(dp, smem.d_o, smem.v[ring.stage]);
        // A row that came before the block was selected takes part with probability zero.
        float minus[2][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int first = kHalves && i / 2 == 1 ? step.second_first : step.first;
          minus[i / 2][i % 2] = token[i % 2] < first ? -INFINITY : -lse[i % 2];
        }
        wgmma_wait<1>();
        pin(s);
        mask(s, step, slot);
#pragma unroll
        for (int i = 0; i < kBlock / 2; ++i) s[i] = exp2_fast(fmaf(s[i], scale_log2, minus[i / 32][(i >> 1) & 1]));
        wgmma_wait<0>();
        pin(dp);
#pragma unroll
        for (int i = 0; i < kBlock / 4; ++i)
          ds[i] = pack_bf16(s[2 * i] * (dp[2 * i] - delta[i & 1]), s[2 * i + 1] * (dp[2 * i + 1] - delta[i & 1]));
        pin(ds);
        pin(dq);
        wgmma_fence();
        const uint64_t b = tile_descriptor(shared_address(smem.k[ring.stage]), kBlock * 128);
#pragma unroll
        for (int kk = 0; kk < kBlock / 16; ++kk) wgmma_rs<1>(dq, ds + 4 * kk, further(b, kk * 2048), 1);
        wgmma_commit();
        release(smem.v_empty[ring.stage], lane);
        wgmma_wait<0>();
        pin(dq);
        release(smem.k_empty[ring.stage], lane);
        ring.advance(kStages);
      }
      if (state == 0) {
        release(smem.do_empty, lane);
        gradient_phase ^= 1;
      }
      const ForwardItem item = smem.tile[slot].item;
      const uint32_t staging = shared_address(smem.q[slot]) + group * kSubtileRows * D * 2;
      named_sync(1 + group, 128);
      stage_accumulator<D>(staging, dq, args.scale, args.scale, warp, lane);
      __syncwarp();
      store_staged<D>(args.dq, staging, warp, lane, false,
                      [&](int r) { return packed_row(args.work.rows, item, group, r, args.query_heads) * D; });
      async_fence();
      release(smem.q_empty[slot], lane);
    }
  }
};

template <int D, bool kGathered, bool kHalves>
__global__ void __launch_bounds__(kThreads, 1)
    backward_rows_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap do_map,
                         const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                         const __grid_constant__ CUtensorMap gathered_k_map,
                         const __grid_constant__ CUtensorMap gathered_v_map, const __grid_constant__ Arguments args) {
  using Memory = Smem<D, kGathered, kHalves>;
  SB_DYNAMIC_SHARED(unsigned char, raw, 1024);
  Memory& smem = *reinterpret_cast<Memory*>(raw);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) init_row_barriers(smem);
  __syncthreads();
  if (warp < 4) {
    registers_shrink<40>();
    if (warp == 0) {
      RowLoader<Memory> loader{smem,      &q_map, &do_map, &k_map, &v_map, &gathered_k_map, &gathered_v_map,
                               args.work, lane};
      loader.run();
    }
  } else {
    registers_grow<232>();
    Consumer<D, kGathered, kHalves> consumer{smem, args, warp / 4 - 1, warp % 4, lane};
    consumer.run();
    // What comes next on the stream may rely on the keys' half too. In a loading warp the assembler would spill for it.
    if (threadIdx.x == 128) wait_for_dependencies();
  }
}

template <int D, bool kGathered, bool kHalves>
void launch(const BackwardParams& p, cudaStream_t stream) {
  const auto rows = [&](const void* data) {
    return packed_map(data, p.shape.tokens, p.shape.query_heads, D, p.tiling.heads, p.tiling.tokens);
  };
  const auto keys = [&](const void* data) {
    return packed_map(data, p.shape.keys(), p.shape.kv_heads, D, 1, p.tiling.block);
  };
  const Arguments args{
      {p.shape.query_heads / p.shape.kv_heads / p.tiling.heads, row_map(p.tiling), p.row_items, p.row_item_count,
       p.row_entries, p.counter + kRowsTaken, p.gathered, p.tiling.query_block, p.shape.first_query},
      p.shape.scale,
      p.shape.query_heads,
      first_statistics(p),
      static_cast<__nv_bfloat16*>(p.dq)};
  const CUtensorMap k_map = keys(p.k), v_map = keys(p.v);
  CUtensorMap gathered_k_map = k_map, gathered_v_map = v_map;
  if constexpr (kGathered) {
    gathered_k_map = gathered_map(p.gathered_rows.k, p.gathered, D);
    gathered_v_map = gathered_map(p.gathered_rows.v, p.gathered, D);
  }
  constexpr size_t kBytes = sizeof(Smem<D, kGathered, kHalves>);
  const auto kernel = backward_rows_kernel<D, kGathered, kHalves>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
        "shared memory of the backward");
  const int grid = p.row_item_count < multiprocessors() ? p.row_item_count : multiprocessors();
  launch_early(kernel, {grid, kThreads, kBytes, stream}, rows(p.q), rows(p.d_o), k_map, v_map, gathered_k_map,
               gathered_v_map, args);
}

}  // namespace

void hopper_backward_deterministic(const BackwardParams& p, void* stream) {
  check_shape(p.shape, p.tiling, p.gathered);
  if (p.shape.tokens == 0) return;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  prepare_rows(p, false, cuda_stream);
  backward_keys(p, cuda_stream);  // and the rows of gathered columns
  for_kind(p.shape, p.tiling, p.gathered,
           [&](auto d, auto gathered, auto halves) { launch<d(), gathered(), halves()>(p, cuda_stream); });
  finish_split_columns(p, cuda_stream);
}

}  // namespace sb::gpu
