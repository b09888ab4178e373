#include <algorithm>

#include "attention/gpu/hopper/key_loader.cuh"
#include "attention/gpu/hopper/launch.cuh"
#include "attention/gpu/hopper/prepare.cuh"
#include "attention/gpu/hopper/wgmma.cuh"
#include "attention/gpu/launch/early.cuh"
#include "device/kernel.cuh"

namespace sb::gpu {
namespace {

// Key-stationary backward. A block of 128 keys walks the subtiles of queries that see it. Everything is computed
// transposed, Sᵀ = K·Qᵀ and dPᵀ = V·dOᵀ, so that each of the two computing warpgroups owns 64 keys, and Pᵀ and dSᵀ feed
// dV += Pᵀ·dO and dK += dSᵀ·Q straight from the registers. Only dS crosses between the warpgroups, through shared
// memory, for dQ = dS·K, which is added to a sum in global memory by the copy engine.

constexpr int kThreads = 384;
using Arguments = KeyArguments;
using StepMessage = KeyStepMessage;

template <int D>
struct alignas(1024) Smem {
  static constexpr int kDim = D;
  // Subtiles in one step: as many as fill the registers.
  static constexpr int kUnit = D == 128 ? 1 : 2;
  static constexpr int kStages = D == 128 ? 3 : 2;
  static constexpr int kKeySlots = D == 128 ? 1 : 2;  // where there is room, the next item's keys wait
  __nv_bfloat16 k[kKeySlots][kBlock * D];             // [d / 64][key][64]
  __nv_bfloat16 v[kKeySlots][kBlock * D];
  __nv_bfloat16 q[kStages][kUnit * kSubtileRows * D];  // [subtile][d / 64][row][64]
  __nv_bfloat16 d_o[kStages][kUnit * kSubtileRows * D];
  __nv_bfloat16 ds[2][kUnit * kSubtileRows * kBlock];  // [subtile][key][row]
  float dq[2][kSubtileRows * 64];                      // of each warpgroup, in the order of its accumulator
  float statistics[kStages][kUnit][2][kSubtileRows];   // log-sum-exp (base 2) and dO·O
  KeyItemMessage item[kKeySlots];
  KeyStepMessage step[kStages];
  alignas(8) uint64_t kv_full[kKeySlots], kv_empty[kKeySlots], q_full[kStages], q_empty[kStages], do_full[kStages],
      do_empty[kStages];
};

static_assert(sizeof(Smem<128>) <= kSharedMemory && sizeof(Smem<64>) <= kSharedMemory);

template <int D, bool kWithDq, bool kGathered, bool kHalves>
struct Consumer {
  static constexpr int kUnit = Smem<D>::kUnit, kStages = Smem<D>::kStages;
  Smem<D>& smem;
  const Arguments& args;
  const CUtensorMap *sums_k, *sums_v;  // of a piece: what is added to
  int group, warp, lane;
  Cursor ring, keys;
  int buffer = 0;  // of dS
  float dk[D / 2], dv[D / 2];

  // Sᵀ = K·Qᵀ or dPᵀ = V·dOᵀ, this group's 64 keys.
  __device__ void issue_transposed(float (&out)[32], const __nv_bfloat16* keys, const __nv_bfloat16* rows) {
    const uint64_t a = tile_descriptor(shared_address(keys) + group * 64 * 128);
    const uint64_t b = tile_descriptor(shared_address(rows));
#pragma unroll
    for (int kk = 0; kk < D / 16; ++kk) {
      const uint32_t inside = (kk % 4) * 32;
      wgmma_ss<0, 0>(out, further(a, (kk / 4) * kBlock * 128 + inside),
                     further(b, (kk / 4) * kSubtileRows * 128 + inside), kk != 0);
    }
    wgmma_commit();
  }

  // dV += Pᵀ·dO or dK += dSᵀ·Q.
  __device__ void issue_sum(float (&out)[D / 2], const uint32_t (&a)[16], const __nv_bfloat16* rows) {
    const uint64_t b = tile_descriptor(shared_address(rows), kSubtileRows * 128);
#pragma unroll
    for (int kk = 0; kk < kSubtileRows / 16; ++kk) wgmma_rs<1>(out, a + 4 * kk, further(b, kk * 2048), 1);
  }

  // dQ = dS·K over all 128 keys: d = 128 gives each group half of the columns, d = 64 one of the two subtiles.
  __device__ void issue_dq(float (&out)[32]) {
    const uint64_t a =
        tile_descriptor(shared_address(smem.ds[buffer]) + (kUnit == 2 ? group * kSubtileRows * kBlock * 2 : 0));
    const uint64_t b = tile_descriptor(shared_address(smem.k[keys.stage]) + (kUnit == 1 ? group * kBlock * 128 : 0));
#pragma unroll
    for (int kk = 0; kk < kBlock / 16; ++kk) wgmma_ss<1, 1>(out, further(a, kk * 2048), further(b, kk * 2048), kk != 0);
    wgmma_commit();
  }

  __device__ void mask_gathered(float (&s)[32], const StepMessage& step, int before) {
    const int key = group * 64 + warp * 16 + lane / 4;
    const uint32_t seen = smem.step[ring.stage].seen[key / 32] >> key % 32;
    const bool hidden[2] = {(seen & 1) == 0, (seen >> 8 & 1) == 0};
#pragma unroll
    for (int i = 0; i < 32; ++i)
      if (hidden[(i >> 1) & 1]) s[i] = -INFINITY;
    if (step.diagonal != kLateSeen) return;
    const int32_t* columns = args.gathered.columns + smem.item[keys.stage].item.token + key;
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int position = step.first[0] + before + args.rows.token(8 * j + 2 * (lane % 4) + e);
        if (columns[0] > position) s[4 * j + e] = -INFINITY;
        if (columns[8] > position) s[4 * j + 2 + e] = -INFINITY;
      }
  }

  // `before`: tokens of the unit that come before this subtile.
  __device__ void mask(float (&s)[32], const StepMessage& step, int before) {
    const int first = kHalves && group == 1 ? step.first[1] : step.first[0];
    if (step.diagonal + kBlock - 1 <= before && first <= before) return;
    if (kGathered && step.diagonal >= kSomeSeen) return mask_gathered(s, step, before);
    const int key = group * 64 + warp * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int t = before + args.rows.token(8 * j + 2 * (lane % 4) + e);
        const int limit = t < first ? -1 : t - step.diagonal;  // the last key that this query sees
        if (key > limit) s[4 * j + e] = -INFINITY;
        if (key + 8 > limit) s[4 * j + 2 + e] = -INFINITY;
      }
  }

  // Log-sum-exp (which = 0) or dO·O (1) of this thread's columns.
  __device__ void read_statistics(float2 (&out)[8], int sub, int which) const {
#pragma unroll
    for (int j = 0; j < 8; ++j)
      out[j] = *reinterpret_cast<const float2*>(&smem.statistics[ring.stage][sub][which][8 * j + 2 * (lane % 4)]);
  }

  // s becomes the probabilities, p the same in bf16.
  __device__ void probabilities(float (&s)[32], uint32_t (&p)[16], const float2 (&lse)[8], float scale_log2) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 l = lse[j];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        s[4 * j + 2 * h] = exp2_fast(fmaf(s[4 * j + 2 * h], scale_log2, -l.x));
        s[4 * j + 2 * h + 1] = exp2_fast(fmaf(s[4 * j + 2 * h + 1], scale_log2, -l.y));
        p[2 * j + h] = pack_bf16(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]);
      }
    }
  }

  __device__ void differences(const float (&s)[32], const float (&dp)[32], uint32_t (&ds)[16],
                              const float2 (&sums)[8]) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 sum = sums[j];
#pragma unroll
      for (int h = 0; h < 2; ++h)
        ds[2 * j + h] = pack_bf16(s[4 * j + 2 * h] * (dp[4 * j + 2 * h] - sum.x),
                                  s[4 * j + 2 * h + 1] * (dp[4 * j + 2 * h + 1] - sum.y));
    }
  }

  __device__ void share_ds(const uint32_t (&ds)[16], int sub) {
    const int row = ((lane >> 3) & 1) * 8 + (lane & 7);
    const uint32_t base = shared_address(smem.ds[buffer]) + sub * kBlock * 128 + (group * 64 + warp * 16 + row) * 128;
#pragma unroll
    for (int j = 0; j < 8; j += 2)
      matrix_store(base + (((j + (lane >> 4)) ^ (row & 7)) * 16), ds[2 * j], ds[2 * j + 1], ds[2 * j + 2],
                   ds[2 * j + 3]);
  }

  // dQ is summed in the order of the accumulator: no transposition on the way, and one copy of 16 KiB in a row.
  __device__ void add_dq(const float (&dq)[32], int subtile) {
    const uint32_t staging = shared_address(smem.dq[group]);
    const int thread = warp * 32 + lane;
    if (thread == 0) bulk_wait_read();
    named_sync(2 + group, 128);
#pragma unroll
    for (int j = 0; j < 8; ++j)
      shared_store16(staging + (j * 128 + thread) * 16, dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
    async_fence();
    named_sync(2 + group, 128);
    if (thread == 0) {
      const int64_t piece = kUnit == 1 ? static_cast<int64_t>(subtile) * 2 + group : subtile + group;
      bulk_add(args.dq_sum + piece * kSubtileRows * 64, staging, kSubtileRows * 64 * 4);
      bulk_commit();
    }
  }

  // Where the gradient of this group's key `row` lies, or -1.
  __device__ int64_t key_element(const BackwardItem& item, int row) const {
    const int key = group * 64 + row;
    return key < item.keys ? (static_cast<int64_t>(item.token + key) * args.kv_heads + item.head) * D : -1;
  }

  // Two areas of 64 × 64 floats of this group, free between items: dQ's, and where there is no dQ the group's half of
  // dS's besides.
  static constexpr int kAreas = kWithDq ? 1 : 2;
  __device__ uint32_t area(int i) const {
    return i == 0 ? shared_address(smem.dq[group]) : shared_address(smem.ds) + group * kSubtileRows * 64 * 4;
  }

  // Adds to the fp32 sums of the keys, 64 columns at a time, by the copy engine: what it adds is written to shared
  // memory while the part before is on its way, and the next item does not wait for the last.
  __device__ void add(const BackwardItem& item) {
    add_columns<0>(item, sums_v, dv, 1.f);
    add_columns<D / 64>(item, sums_k, dk, args.scale);
  }
  template <int kPart>
  __device__ void add_columns(const BackwardItem& item, const CUtensorMap* sums, const float (&a)[D / 2], float scale) {
    const bool leads = warp == 0 && lane == 0;
    const int row = warp * 16 + lane / 4;
#pragma unroll
    for (int c = 0; c < D / 64; ++c) {
      const uint32_t to = area((kPart + c) % kAreas);
      if (leads) bulk_wait_read<kAreas - 1>();
      named_sync(2 + group, 128);
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int at = 4 * (8 * c + j) + 2 * h;
          // [32 columns][row], pieces of 16 bytes swizzled.
          const uint32_t chunk = (2 * j + (lane % 4) / 2) % 8;
          shared_store8(to + (j / 4) * kSubtileRows * 128 + (row + 8 * h) * 128 + ((chunk ^ ((row + 8 * h) & 7)) * 16) +
                            (lane % 2) * 8,
                        a[at] * scale, a[at + 1] * scale);
        }
      async_fence();
      named_sync(2 + group, 128);
      if (!leads) continue;
      for (int half = 0; half < 2; ++half)
        tensor_add(sums, c * 64 + half * 32, item.head, item.token + group * 64, to + half * kSubtileRows * 128);
      bulk_commit();
    }
  }

  __device__ void store(const BackwardItem& item, void* out, const float (&a)[D / 2], float scale) {
    const uint32_t staging = shared_address(smem.dq[group]);
    __syncwarp();
    stage_accumulator<D>(staging, a, scale, scale, warp, lane);
    __syncwarp();
    store_staged<D>(static_cast<__nv_bfloat16*>(out), staging, warp, lane, false,
                    [&](int row) { return key_element(item, row); });
  }

  __device__ void store_partial(float* slots, int slot, int which, const float (&a)[D / 2]) {
    float4* out = reinterpret_cast<float4*>(slots) +
                  (static_cast<int64_t>(slot * 2 + which) * 2 + group) * (D / 8) * 128 + warp * 32 + lane;
#pragma unroll
    for (int j = 0; j < D / 8; ++j) out[j * 128] = make_float4(a[4 * j], a[4 * j + 1], a[4 * j + 2], a[4 * j + 3]);
  }

  __device__ void store_gathered(const BackwardItem& item) {
    store_partial(args.sums, item.partial, 0, dk);
    store_partial(args.sums, item.partial, 1, dv);
    __threadfence();
    named_sync(2 + group, 128);
    if (warp == 0 && lane == 0) atomicAdd(args.gathered_done, 1);
  }

  // Until all gathered columns are summed: items that came before this one, so that somebody works on them.
  __device__ void wait_gathered() {
    const int wanted = 2 * args.gathered_items();
    while (load_acquire(args.gathered_done) < wanted) {
    }
  }

  __device__ void add_gathered(const BackwardItem& item) {
    args.gathered_sums.each(item.gathered, item.head, item.position, group * 64 + warp * 16 + lane / 4, lane,
                            [&](int h, int row) {
                              if (h == 0) {
                                args.gathered_sums.template add<D, 0>(dk, row, 0, lane);
                                args.gathered_sums.template add<D, 0>(dv, row, 1, lane);
                              } else {
                                args.gathered_sums.template add<D, 1>(dk, row, 0, lane);
                                args.gathered_sums.template add<D, 1>(dv, row, 1, lane);
                              }
                            });
  }

  // Whether no token of the unit sees this group's half of two key blocks.
  __device__ bool unseen(const StepMessage& step) const {
    return step.subtile >= 0 && step.diagonal < kSomeSeen &&
           (group == 1 ? step.first[1] : step.first[0]) >= kUnit * args.rows.tokens;
  }
  // Waits for it.
  __device__ StepMessage next_step() {
    barrier_wait(shared_address(&smem.q_full[ring.stage]), ring.phase);
    return smem.step[ring.stage];
  }

  __device__ void run() {
    const float scale_log2 = args.scale * kLog2e;
    for (;;) {
      barrier_wait(shared_address(&smem.kv_full[keys.stage]), keys.phase);
      if (smem.item[keys.stage].end) break;
#pragma unroll
      for (int i = 0; i < D / 2; ++i) dk[i] = dv[i] = 0;
      for (;;) {
        StepMessage step = next_step();
        // The groups need each other for dQ only; without it one passes by what its 64 keys have no part in.
        if constexpr (kHalves && !kWithDq)
          while (__any_sync(~0u, unseen(step))) {
            release(smem.do_empty[ring.stage], lane);
            release(smem.q_empty[ring.stage], lane);
            ring.advance(kStages);
            step = next_step();
          }
        if (step.subtile < 0) break;
        float s[kUnit][32], dp[kUnit][32];
        uint32_t p[kUnit][16], ds[kUnit][16];
        const __nv_bfloat16* q = smem.q[ring.stage];
        const __nv_bfloat16* d_o = smem.d_o[ring.stage];
        // Read before the products start: shared memory is slow to answer while they run.
        float2 lse[8];
        read_statistics(lse, 0, 0);
        wgmma_fence();
        issue_transposed(s[0], smem.k[keys.stage], q);
        barrier_wait(shared_address(&smem.do_full[ring.stage]), ring.phase);
        issue_transposed(dp[0], smem.v[keys.stage], d_o);
        if constexpr (kUnit == 2) {
          issue_transposed(s[1], smem.k[keys.stage], q + kSubtileRows * D);
          issue_transposed(dp[1], smem.v[keys.stage], d_o + kSubtileRows * D);
        }
#pragma unroll
        for (int sub = 0; sub < kUnit; ++sub) {
          if (sub > 0) read_statistics(lse, sub, 0);
          // Products are done in the order of their issue; what may still run are those behind the one waited for.
          if (kUnit == 2 && sub == 0)
            wgmma_wait<3>();
          else
            wgmma_wait<kUnit>();
          pin(s[sub]);
          mask(s[sub], step, sub * args.rows.tokens);
          probabilities(s[sub], p[sub], lse, scale_log2);
          pin(p[sub]);
          pin(dv);
          wgmma_fence();
          issue_sum(dv, p[sub], d_o + sub * kSubtileRows * D);
          wgmma_commit();
          float2 sums[8];
          read_statistics(sums, sub, 1);
          if (kUnit == 2 && sub == 0)
            wgmma_wait<3>();
          else
            wgmma_wait<kUnit>();
          pin(dp[sub]);
          differences(s[sub], dp[sub], ds[sub], sums);
          if constexpr (kWithDq) share_ds(ds[sub], sub);
        }
        if constexpr (kWithDq) {
          async_fence();
          named_sync(1, 256);
        }
#pragma unroll
        for (int sub = 0; sub < kUnit; ++sub) pin(ds[sub]);
        pin(dk);
        wgmma_fence();
        float dq[32];
        if constexpr (kWithDq) issue_dq(dq);
#pragma unroll
        for (int sub = 0; sub < kUnit; ++sub) issue_sum(dk, ds[sub], q + sub * kSubtileRows * D);
        wgmma_commit();
        if constexpr (kWithDq) {
          wgmma_wait<1>();
          pin(dq);
          pin(dv);
          release(smem.do_empty[ring.stage], lane);
          add_dq(dq, step.subtile);
          buffer ^= 1;
        } else {
          wgmma_wait<1>();
          pin(dv);
          release(smem.do_empty[ring.stage], lane);
        }
        wgmma_wait<0>();
        pin(dk);
        release(smem.q_empty[ring.stage], lane);
        ring.advance(kStages);
      }
      release(smem.q_empty[ring.stage], lane);
      release(smem.do_empty[ring.stage], lane);
      ring.advance(kStages);
      const BackwardItem item = smem.item[keys.stage].item;
      release(smem.kv_empty[keys.stage], lane);
      keys.advance(Smem<D>::kKeySlots);
      if (kGathered && item.column == kGatheredItem) {
        store_gathered(item);
      } else if (item.partial >= 0) {
        store_partial(args.partials, item.partial, 0, dk);
        store_partial(args.partials, item.partial, 1, dv);
      } else {
        if (args.adds) {
          add(item);  // a piece has no gathered columns
          continue;
        }
        if (warp == 0 && lane == 0) {
          bulk_wait_read();  // the staging area still feeds the last dQ
          if (kGathered && item.gathered >= 0) wait_gathered();
        }
        named_sync(2 + group, 128);
        if (kGathered && item.gathered >= 0) add_gathered(item);
        store(item, args.dv, dv, 1.f);
        store(item, args.dk, dk, args.scale);
        async_fence();
        named_sync(2 + group, 128);
      }
    }
    if (warp == 0 && lane == 0) bulk_wait();
  }
};

template <int D, bool kWithDq, bool kGathered, bool kHalves, bool kOdd>
__global__ void __launch_bounds__(kThreads, 1)
    backward_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap do_map,
                    const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                    const __grid_constant__ CUtensorMap gathered_k_map,
                    const __grid_constant__ CUtensorMap gathered_v_map, const __grid_constant__ CUtensorMap sums_k_map,
                    const __grid_constant__ CUtensorMap sums_v_map, const __grid_constant__ Arguments args) {
  SB_DYNAMIC_SHARED(unsigned char, raw, 1024);
  Smem<D>& smem = *reinterpret_cast<Smem<D>*>(raw);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&q_map, &do_map, &k_map, &v_map}) fetch_map(map);
    for (int i = 0; i < Smem<D>::kKeySlots; ++i) {
      barrier_init(shared_address(&smem.kv_full[i]), 1);
      barrier_init(shared_address(&smem.kv_empty[i]), 8 * kArrivals);
    }
    for (int i = 0; i < Smem<D>::kStages; ++i) {
      barrier_init(shared_address(&smem.q_full[i]), 1);
      barrier_init(shared_address(&smem.q_empty[i]), 8 * kArrivals);
      barrier_init(shared_address(&smem.do_full[i]), 1);
      barrier_init(shared_address(&smem.do_empty[i]), 8 * kArrivals);
    }
    barrier_init_fence();
  }
  // Rows that are padding in every subtile are never loaded; zeros there keep 0 · garbage from becoming NaN.
  if (args.rows.heads * args.rows.tokens < kSubtileRows) {
    uint4* area = reinterpret_cast<uint4*>(smem.q);
    const int pieces = (sizeof(smem.q) + sizeof(smem.d_o)) / 16;
    for (int i = threadIdx.x; i < pieces; i += kThreads) area[i] = make_uint4(0, 0, 0, 0);
    async_fence();
  }
  __syncthreads();
  wait_for_dependencies();
  launch_dependents();
  if (warp < 4) {
    registers_shrink<24>();
    if (warp == 0) {
      KeyLoader<Smem<D>, kGathered, kHalves, kOdd> loader{
          smem, &q_map, &do_map, &k_map, &v_map, &gathered_k_map, &gathered_v_map, args, lane};
      loader.run();
    }
  } else {
    registers_grow<240>();
    Consumer<D, kWithDq, kGathered, kHalves> consumer{smem,         args,     &sums_k_map, &sums_v_map,
                                                      warp / 4 - 1, warp % 4, lane};
    consumer.run();
  }
}

template <int D, bool kWithDq, bool kGathered, bool kHalves, bool kOdd>
void launch(const BackwardParams& p, cudaStream_t stream) {
  const auto rows = [&](const void* data) {
    return packed_map(data, p.shape.tokens, p.shape.query_heads, D, p.tiling.heads, p.tiling.tokens);
  };
  const auto keys = [&](const void* data) { return packed_map(data, p.shape.keys(), p.shape.kv_heads, D, 1, kBlock); };
  Arguments args{p.shape.scale,
                 row_map(p.tiling),
                 p.tiling.query_block,
                 p.shape.kv_heads,
                 p.tiling.subtiles,
                 p.shape.query_heads / p.shape.kv_heads / p.tiling.heads,
                 p.columns,
                 p.dk,
                 p.dv,
                 p.adds,
                 p.shape.first_query,
                 p.items,
                 p.counts,
                 p.column_offsets,
                 p.column_entries,
                 kOdd ? p.statistics : first_statistics(p),
                 kOdd ? p.dq_sum : first_dq_sum(p),
                 p.partials,
                 p.counter + kKeysTaken,
                 p.tiling.parts,
                 p.tiling.query_block / p.tiling.tokens,
                 p.tiling.tile,
                 p.gathered,
                 gathered_sums(p),
                 p.gathered_sums,
                 p.counter + kGatheredDone};
  const CUtensorMap k_map = keys(p.k), v_map = keys(p.v);
  CUtensorMap gathered_k_map = k_map, gathered_v_map = v_map;
  int64_t items = p.limits.items;
  if constexpr (kGathered) {
    gather_rows(p.gathered, p.shape, p.k, p.v, p.gathered_rows, stream);
    find_gathered_places(p.gathered, p.gathered_places, stream);
    gathered_k_map = gathered_map(p.gathered_rows.k, p.gathered, D);
    gathered_v_map = gathered_map(p.gathered_rows.v, p.gathered, D);
    items += int64_t{p.gathered.piece_count / 2} * p.gathered_parts;
  }
  CUtensorMap sums_k = k_map, sums_v = v_map;
  if (p.adds) {
    sums_k = sums_map(p.dk, p.shape.keys(), p.shape.kv_heads, D);
    sums_v = sums_map(p.dv, p.shape.keys(), p.shape.kv_heads, D);
  }
  const auto kernel = backward_kernel<D, kWithDq, kGathered, kHalves, kOdd>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Smem<D>)),
        "shared memory of the backward");
  const int grid = static_cast<int>(std::min<int64_t>(items, multiprocessors()));
  launch_early(kernel, {grid, kThreads, sizeof(Smem<D>), stream}, rows(p.q), rows(p.d_o), k_map, v_map, gathered_k_map,
               gathered_v_map, sums_k, sums_v, args);
}

template <bool kWithDq>
void launch(const BackwardParams& p, cudaStream_t stream) {
  for_kind(p.shape, p.tiling, p.gathered, [&](auto d, auto gathered, auto halves) {
    constexpr bool kTwo = Smem<d()>::kUnit == 2 && !gathered() && !halves();
    if (kTwo && p.tiling.tile == 1)
      launch<d(), kWithDq, gathered(), halves(), kTwo>(p, stream);
    else
      launch<d(), kWithDq, gathered(), halves(), false>(p, stream);
  });
}

}  // namespace

void hopper_backward(const BackwardParams& p, void* stream) {
  check_shape(p.shape, p.tiling, p.gathered);
  if (p.shape.tokens == 0) return;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  prepare_rows(p, true, cuda_stream);
  launch<true>(p, cuda_stream);
  finish_dq(p, cuda_stream);
  finish_split_columns(p, cuda_stream);
}

void backward_keys(const BackwardParams& p, cudaStream_t stream) {
  launch<false>(p, stream);
}

}  // namespace sb::gpu
