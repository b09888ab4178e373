#include "attention/gpu/hopper/launch.cuh"
#include "attention/gpu/hopper/row_loader.cuh"
#include "attention/gpu/hopper/wgmma.cuh"
#include "attention/gpu/launch/early.cuh"
#include "device/kernel.cuh"

namespace sb::gpu {
namespace {

constexpr int kThreads = 384;  // two warpgroups compute, each owns one subtile of the tile; one loads
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kNothing = -1e30f;  // before the first key; finite, so that differences are
constexpr int kNowhere = -(1 << 20);

template <int D, bool kWithGathered, bool kOfHalves>
struct alignas(1024) Smem {
  static constexpr int kDim = D, kSlots = 2, kStages = D == 128 ? 2 : 4;
  static constexpr bool kGradient = false, kKeysAhead = true, kGathered = kWithGathered, kHalves = kOfHalves;
  __nv_bfloat16 q[kSlots][2 * kSubtileRows * D];  // [slot][subtile][d / 64][row][64]
  __nv_bfloat16 k[kStages][kBlock * D];           // [stage][d / 64][row][64]
  __nv_bfloat16 v[kStages][kBlock * D];
  TileMessage tile[kSlots];
  StepMessage step[kStages];
  alignas(8) uint64_t q_full[kSlots], q_empty[kSlots], k_full[kStages], k_empty[kStages], v_full[kStages],
      v_empty[kStages];
};

static_assert(sizeof(Smem<128, true, true>) <= kSharedMemory && sizeof(Smem<64, true, true>) <= kSharedMemory);

struct Arguments {
  RowArguments work;
  float scale_log2;  // of the products q·k, with log2(e)
  int32_t query_heads;
  int64_t tokens;
  __nv_bfloat16* o;
  float* lse;
  uint32_t zero;
};

// New probabilities wait here while the old ones are being multiplied.
template <int D>
struct HeldProbabilities;
template <>
struct HeldProbabilities<64> {
  float x[kBlock / 2];
  __device__ void set(int i, float a, float b) {
    x[2 * i] = a;
    x[2 * i + 1] = b;
  }
  __device__ uint32_t pair(int i, uint32_t) const { return pack_bf16(x[2 * i], x[2 * i + 1]); }
};
// Registers for the pairs only. The copy must be an instruction: the assembler serialises products whose operands are
// written while others run.
template <>
struct HeldProbabilities<128> {
  uint32_t x[kBlock / 4];
  __device__ void set(int i, float a, float b) { x[i] = pack_bf16(a, b); }
  __device__ uint32_t pair(int i, uint32_t zero) const { return x[i] ^ zero; }
};

template <int D, bool kGathered, bool kHalves>
struct Consumer {
  using Held = HeldProbabilities<D>;
  using Memory = Smem<D, kGathered, kHalves>;
  static constexpr int kSlots = Memory::kSlots, kStages = Memory::kStages;
  static constexpr int kBlocks = kHalves ? 2 : 1;  // of a step
  Memory& smem;
  const Arguments& args;
  int group, warp, lane;  // group 0 or 1, warp 0..3 in it
  Cursor tile;
  uint32_t k = 0, v = 0;  // key blocks done; stage and phase follow from them
  StepMessage step;
  uint32_t seen = 0;  // of gathered columns, this thread's
  int slot = 0;       // of the tile in work
  int token[2];       // of this thread's two rows, in the tile
  float o[D / 2];
  float s[kBlock / 2];
  uint32_t p[kBlock / 4];         // probabilities that are being multiplied with V
  float row_base[2], row_sum[2];  // exponents (base 2) are taken relative to row_base
  bool below_zero;                // whether any row of the warp has seen no score from zero on

  __device__ void issue_scores() {
    const uint64_t a = tile_descriptor(shared_address(smem.q[slot]) + group * kSubtileRows * D * 2);
    const uint64_t b = tile_descriptor(shared_address(smem.k[stage(k)]));
#pragma unroll
    for (int kk = 0; kk < D / 16; ++kk) {
      const uint32_t inside = (kk % 4) * 32;
      wgmma_ss<0, 0>(s, further(a, (kk / 4) * kSubtileRows * 128 + inside),
                     further(b, (kk / 4) * kBlock * 128 + inside), kk != 0);
    }
    wgmma_commit();
  }

  __device__ void issue_output(int accumulate) {
    const uint64_t b = tile_descriptor(shared_address(smem.v[stage(v)]), kBlock * 128);
#pragma unroll
    for (int kk = 0; kk < kBlock / 16; ++kk) wgmma_rs<1>(o, p + 4 * kk, further(b, kk * 2048), accumulate | (kk != 0));
    wgmma_commit();
  }

  __device__ static uint32_t stage(uint32_t block) {
    return block % kStages;
  }
  __device__ static uint32_t phase(uint32_t block) {
    return block / kStages & 1;
  }

  __device__ void wait_keys() {
    barrier_wait(shared_address(&smem.k_full[stage(k)]), phase(k));
    step = smem.step[stage(k)];
    if constexpr (kGathered) seen = smem.step[stage(k)].seen[lane % 4];
  }
  __device__ void wait_values() {
    barrier_wait(shared_address(&smem.v_full[stage(v)]), phase(v));
  }
  __device__ void done_keys() {
    release(smem.k_empty[stage(k)], lane);
    ++k;
  }
  __device__ void done_values() {
    release(smem.v_empty[stage(v)], lane);
    ++v;
  }

  __device__ void mask() {
    if (kGathered && step.offset >= kSomeSeen) return mask_gathered();
    mask_block<0>(step.offset);
    if constexpr (kHalves) mask_block<1>(step.second_offset);
  }
  template <int kWhich>
  __device__ void mask_block(int offset) {
    constexpr int kTiles = kBlock / 8 / kBlocks;
    if (offset + kBlock / kBlocks - 1 <= 0) return;  // no key is later than the tile's first token
    const int column = 2 * (lane % 4) + offset;
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (column + 8 * j + (e & 1) > token[e >> 1]) s[4 * (kWhich * kTiles + j) + e] = -INFINITY;
  }

  __device__ void mask_gathered() {
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

  // The staircase: a row that came before the block was selected sees nothing of it.
  __device__ bool hidden(int h, int which) const {
    return token[h] < (which == 0 ? step.first : step.second_first);
  }

  // What exponents are relative to, negated, of the step's block `which`.
  __device__ float minus_base(int h, int which) const {
    return hidden(h, which) ? -INFINITY : -row_base[h];
  }

  // The probability at s[i], relative to row_base.
  __device__ float probability(int i, const float (&minus)[kBlocks]) const {
    return exp2_fast(fmaf(s[i], args.scale_log2, minus[i / (kBlock / 2 / kBlocks)]));
  }

  // The largest score of this block in row h.
  __device__ float largest(int h) const {
    float m = -INFINITY;
#pragma unroll
    for (int which = 0; which < kBlocks; ++which) {
      const float* of = s + which * (kBlock / 2 / kBlocks) + 2 * h;
      float top[2] = {of[0], of[1]};
#pragma unroll
      for (int i = 4; i < kBlock / 2 / kBlocks; i += 4)
#pragma unroll
        for (int e = 0; e < 2; ++e) top[e] = fmaxf(top[e], of[i + e]);
      float row = fmaxf(top[0], top[1]);
      hide(row);  // or the compiler puts all of it behind a branch
      if (!hidden(h, which)) m = fmaxf(m, row);
    }
    m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
    return fmaxf(m, __shfl_xor_sync(~0u, m, 2));
  }

  // The same where it is not below zero, and -INFINITY elsewhere: from zero on the bits of numbers ascend with them,
  // and the largest of three integers takes one instruction. `nothing` is -1.
  __device__ float largest_from_zero(int h, int nothing) const {
    int m = nothing;
#pragma unroll
    for (int which = 0; which < kBlocks; ++which) {
      const float* of = s + which * (kBlock / 2 / kBlocks) + 2 * h;
      int top[2] = {nothing, nothing};
#pragma unroll
      for (int i = 0; i < kBlock / 2 / kBlocks; i += 4)
        top[i / 4 % 2] = __vimax3_s32(top[i / 4 % 2], __float_as_int(of[i]), __float_as_int(of[i + 1]));
      int row = max(top[0], top[1]);
      hide(row);
      if (!hidden(h, which)) m = max(m, row);
    }
    m = max(m, __shfl_xor_sync(~0u, m, 1));
    m = max(m, __shfl_xor_sync(~0u, m, 2));
    return m < 0 ? -INFINITY : __int_as_float(m);
  }

  // Probabilities are relative to the largest score so far, as in FlashAttention: in rows that see little but a few
  // keys the largest one would be rounded to bf16 otherwise, and the sum knows nothing of that. What is summed so far
  // is to be multiplied with `shrink`. The second row's maximum is found beside the first one's exponentials: it seems
  // to depend on one of them.
  template <bool kFromZero>
  __device__ void add_block(Held& out, float (&shrink)[2]) {
    int nothing = -1;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float base = fmaxf(row_base[h], (kFromZero ? largest_from_zero(h, nothing) : largest(h)) * args.scale_log2);
      shrink[h] = exp2_fast(row_base[h] - base);
      row_base[h] = base;
      float minus[kBlocks], sum[2] = {0, 0};
#pragma unroll
      for (int which = 0; which < kBlocks; ++which) minus[which] = minus_base(h, which);
#pragma unroll
      for (int i = h; i < kBlock / 4; i += 2) {
        const float x = probability(2 * i, minus), y = probability(2 * i + 1, minus);
        out.set(i, x, y);
        if (i == 0) nothing = ~(__float_as_int(x) & args.zero);
        sum[0] += x;
        sum[1] += y;
      }
      row_sum[h] = row_sum[h] * shrink[h] + (sum[0] + sum[1]);
    }
    below_zero =
        __any_sync(~0u, ((row_base[0] < 0) & (token[0] != kNowhere)) | ((row_base[1] < 0) & (token[1] != kNowhere)));
  }

  // The first block of a tile.
  __device__ void begin_softmax(Held& out) {
    mask();
    row_base[0] = row_base[1] = kNothing;
    row_sum[0] = row_sum[1] = 0;
    float shrink[2];
    add_block<false>(out, shrink);
  }

  // Any other block. That there are two ways to the wait that follows also keeps the assembler from moving it above the
  // exponentials, which are to run beside the product.
  __device__ void next_softmax(Held& out, float (&shrink)[2]) {
    mask();
    if (below_zero)
      add_block<false>(out, shrink);
    else
      add_block<true>(out, shrink);
  }

  __device__ void take(const Held& held) {
#pragma unroll
    for (int i = 0; i < kBlock / 4; ++i) p[i] = held.pair(i, args.zero);
  }

  // A tile that sees a single block: few keys, so that what the rounding of probabilities to bf16 loses shows in the
  // output. What is lost is multiplied too.
  __device__ void multiply_lost(const Held& held) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float minus[kBlocks];
#pragma unroll
      for (int which = 0; which < kBlocks; ++which) minus[which] = minus_base(h, which);
#pragma unroll
      for (int i = h; i < kBlock / 4; i += 2) {
        const uint32_t pair = held.pair(i, args.zero);
        p[i] = pack_bf16(probability(2 * i, minus) - low_bf16(pair), probability(2 * i + 1, minus) - high_bf16(pair));
      }
    }
    wait_values();
    pin(p);
    pin(o);
    wgmma_fence();
    issue_output(0);
    wgmma_wait<0>();
    pin(o);
    pin(p);
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
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = warp * 16 + lane / 4 + 8 * h;
      if (output_row(it, row) < 0) continue;
      const int head =
          it.head * args.work.rows.heads + row - (token[h] - group * args.work.rows.tokens) * args.work.rows.heads;
      args.lse[head * args.tokens + it.token + token[h]] = h == 0 ? upper : lower;
    }
  }

  __device__ void store_output(const ForwardItem& it, uint32_t staging, bool zero) {
    store_staged<D>(args.o, staging, warp, lane, zero, [&](int row) { return output_row(it, row) * D; });
  }

  __device__ void epilogue(int tile_slot) {
    const ForwardItem& it = smem.tile[tile_slot].item;
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
    return smem.tile[slot].state;
  }

  __device__ void run() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int in_subtile = args.work.rows.token(warp * 16 + lane / 4 + 8 * h);
      // Rows that are padding in every subtile see nothing.
      token[h] = in_subtile < args.work.rows.tokens ? group * args.work.rows.tokens + in_subtile : kNowhere;
    }
    if (group == 1) turn_end();  // group 0 begins
    // One turn of the loop finishes a tile (its last product with V) and starts the next (its first product with K,
    // which runs while the finished output is written). Before the first tile and after the last one the missing half
    // multiplies whatever lies there: a branch around it would make the compiler serialise the products.
    bool begun = false;
    int accumulate = 0;
    for (;;) {
      const int done_slot = slot;
      const int state = next_tile();
      if (state == 0) wait_keys();
      if (begun) wait_values();
      turn_begin();
      pin(s);
      wgmma_fence();
      results_unused(!begun);
      issue_output(accumulate);
      results_unused(state != 0);
      issue_scores();
      results_unused(false);
      turn_end();
      wgmma_wait<1>();
      pin(o);
      if (begun) {
        done_values();
        epilogue(done_slot);
      }
      wgmma_wait<0>();
      pin(s);
      begun = state == 0;
      if (state == 2) break;
      if (state == 1) {  // nothing to see
        store_output(smem.tile[slot].item, 0, true);
        store_lse(smem.tile[slot].item, -INFINITY, -INFINITY);
        release(smem.q_empty[slot], lane);
        continue;
      }
      done_keys();
      Held held;
      begin_softmax(held);
      accumulate = 0;
      if (step.last) {
        multiply_lost(held);
        accumulate = 1;
      }
      take(held);
      while (!step.last) {
        wait_keys();
        turn_begin();
        pin(s);
        wgmma_fence();
        issue_scores();
        wait_values();
        issue_output(accumulate);
        turn_end();
        accumulate = 1;
        wgmma_wait<1>();
        pin(s);
        done_keys();
        float shrink[2];
        next_softmax(held, shrink);
        wgmma_wait<0>();
        pin(o);
        done_values();
        // With d = 64 always: a branch would keep the multiplications apart from the rounding that follows.
        if (D == 64 || __any_sync(~0u, shrink[0] != 1 || shrink[1] != 1)) {
#pragma unroll
          for (int i = 0; i < D / 2; ++i) o[i] *= shrink[(i >> 1) & 1];
        }
        take(held);
      }
    }
  }
};

template <int D, bool kGathered, bool kHalves>
__global__ void __launch_bounds__(kThreads, 1)
    forward_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                   const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap gathered_k_map,
                   const __grid_constant__ CUtensorMap gathered_v_map, const __grid_constant__ Arguments args) {
  using Memory = Smem<D, kGathered, kHalves>;
  SB_DYNAMIC_SHARED(unsigned char, raw, 1024);
  Memory& smem = *reinterpret_cast<Memory*>(raw);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (const CUtensorMap* map : {&q_map, &k_map, &v_map}) fetch_map(map);
    init_row_barriers(smem);
  }
  // Such rows are never loaded; whatever lay there could be no number.
  if (args.work.rows.heads * args.work.rows.tokens < kSubtileRows) {
    uint4* area = reinterpret_cast<uint4*>(smem.q);
    for (int i = threadIdx.x; i < static_cast<int>(sizeof(smem.q) / 16); i += kThreads)
      area[i] = make_uint4(0, 0, 0, 0);
    async_fence();
  }
  __syncthreads();
  wait_for_dependencies();
  launch_dependents();
  if (warp >= 8) {
    registers_shrink<40>();
    if (warp == 8) {
      RowLoader<Memory> loader{smem,      &q_map, nullptr, &k_map, &v_map, &gathered_k_map, &gathered_v_map,
                               args.work, lane};
      loader.run();
    }
  } else {
    registers_grow<232>();
    Consumer<D, kGathered, kHalves> consumer{smem, args, __shfl_sync(~0u, warp / 4, 0), warp % 4, lane};
    consumer.run();
  }
}

// As a kernel, and not as a copy, so that the forward is there when it ends.
__global__ void clear_counter_kernel(int32_t* counter) {
  wait_for_dependencies();
  launch_dependents();
  if (threadIdx.x == 0) *counter = 0;
}

template <int D, bool kGathered, bool kHalves>
void launch(const ForwardParams& p, cudaStream_t stream) {
  const int group = p.shape.query_heads / p.shape.kv_heads;
  const CUtensorMap q_map = packed_map(p.q, p.shape.tokens, p.shape.query_heads, D, p.tiling.heads, p.tiling.tokens);
  const CUtensorMap k_map = packed_map(p.k, p.shape.keys(), p.shape.kv_heads, D, 1, p.tiling.block);
  const CUtensorMap v_map = packed_map(p.v, p.shape.keys(), p.shape.kv_heads, D, 1, p.tiling.block);
  CUtensorMap gathered_k_map = k_map, gathered_v_map = v_map;
  if constexpr (kGathered) {
    gather_rows(p.gathered, p.shape, p.k, p.v, p.gathered_rows, stream);
    gathered_k_map = gathered_map(p.gathered_rows.k, p.gathered, D);
    gathered_v_map = gathered_map(p.gathered_rows.v, p.gathered, D);
  }
  const Arguments args{{group / p.tiling.heads, row_map(p.tiling), p.items, p.item_count, p.row_entries, p.counter,
                        p.gathered, p.tiling.query_block, p.shape.first_query},
                       p.shape.scale * kLog2e,
                       p.shape.query_heads,
                       p.shape.tokens,
                       static_cast<__nv_bfloat16*>(p.o),
                       p.lse,
                       0};
  launch_early(clear_counter_kernel, {1, 32, 0, stream}, p.counter);
  constexpr size_t kBytes = sizeof(Smem<D, kGathered, kHalves>);
  const auto kernel = forward_kernel<D, kGathered, kHalves>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
        "shared memory of the forward");
  const int grid = p.item_count < multiprocessors() ? p.item_count : multiprocessors();
  launch_early(kernel, {grid, kThreads, kBytes, stream}, q_map, k_map, v_map, gathered_k_map, gathered_v_map, args);
}

}  // namespace

void hopper_forward(const ForwardParams& p, void* stream) {
  check_shape(p.shape, p.tiling, p.gathered);
  if (p.item_count == 0) return;
  for_kind(p.shape, p.tiling, p.gathered, [&](auto d, auto gathered, auto halves) {
    launch<d(), gathered(), halves()>(p, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace sb::gpu
