#include "attention/gpu/hopper/masses.cuh"
#include "device/kernel.cuh"

namespace sb::gpu {
namespace {

// Masses of key blocks that are judged by parts: a tile of statistics is one part of 64 key blocks, and the
// exponentials of a block's parts add up in the thread that has the block. kMoments: means and variances; else means,
// or single keys.
template <int D, bool kMoments>
struct Build {
  static constexpr int kDepth = kMoments ? 2 * D : D;  // of the products
  static constexpr int kRows = part_rows(kDepth);
  static constexpr int kConsumers = 2 * kRows, kThreads = kConsumers + 128;
  static constexpr int kLoading = kRows == 128 ? 40 : 32, kComputing = kRows == 128 ? 232 : 160;  // registers
  static constexpr int kStageBytes = mass_stage_bytes(kDepth);
};

template <int D, bool kMoments, int kLog>
struct Scorer : MassRows<D, kLog, Build<D, kMoments>::kConsumers> {
  using Rows = MassRows<D, kLog, Build<D, kMoments>::kConsumers>;
  using Rows::args, Rows::lane, Rows::reference, Rows::sum;
  static constexpr int kDepth = Build<D, kMoments>::kDepth;
  MassBarriers& barriers;
  uint64_t statistics;  // descriptor of the first stage
  Cursor ring;
  uint32_t a[kDepth / 4];  // operand: q, then its square
  float raised[2];         // sums are relative to 2^raised, which is 1 unless one would overflow
  float masses[32];        // sums over the parts of this thread's key blocks, relative to 2^raised

  __device__ Scorer(const Rows& rows, MassBarriers& b, uint32_t address)
      : Rows(rows), barriers(b), statistics(tile_descriptor(address)) {}

  __device__ void load(const typename Rows::Read& read) {
    uint32_t q[D / 4];
    this->load_queries(read, q);
#pragma unroll
    for (int i = 0; i < D / 4; ++i) {
      a[i] = q[i];
      if constexpr (kMoments) a[D / 4 + i] = Rows::squared(q[i]);
    }
  }

  // One part of 64 key blocks. `first`, `last`: of the item.
  __device__ void add(float (&s)[32], const MassItem& item, bool first, bool last) {
    constexpr float kLimit = 80.f;
    if (last) this->hide_tail(s, item);
    if (first) {
      this->begin_rows(s);
      raised[0] = raised[1] = 0;
    }
    const float base[2] = {-reference[0] - raised[0], -reference[1] - raised[1]};
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] = fmaf(s[i], args.unit, base[i / 2 % 2]);
    float top[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float m[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        m[i] = fmaxf(fmaxf(s[8 * i + 2 * h], s[8 * i + 2 * h + 1]), fmaxf(s[8 * i + 4 + 2 * h], s[8 * i + 5 + 2 * h]));
      top[h] = fmaxf(fmaxf(m[0], m[1]), fmaxf(m[2], m[3]));
    }
    if (__any_sync(~0u, fmaxf(top[0], top[1]) > kLimit)) {
      // Out of range: rarely, and each row by itself.
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float by = top[h] > kLimit ? top[h] : 0.f, factor = exp2_fast(-by);
        raised[h] += by;
        sum[h] *= factor;
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            masses[4 * j + 2 * h + e] *= factor;
            s[4 * j + 2 * h + e] -= by;
          }
      }
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) masses[i] += exp2_fast(s[i]);
  }

  // All parts of a chunk are in: its share of the row's sum.
  __device__ void finish_chunk(int chunk) {
#pragma unroll
    for (int i = 0; i < 32; ++i) sum[i / 2 % 2] += masses[i];
    uint32_t x[2][8];
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int j = 0; j < 8; ++j)
        x[h][j] = as_bits(__floats2half2_rn(__log2f(masses[4 * j + 2 * h]) + raised[h],
                                            __log2f(masses[4 * j + 2 * h + 1]) + raised[h]));
    this->keep(x, chunk);
#pragma unroll
    for (int i = 0; i < 32; ++i) masses[i] = 0;
  }

  __device__ void finish_sums() {
    float top[2] = {0, 0};
    if (__any_sync(~0u, fmaxf(raised[0], raised[1]) > 0.f)) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        top[h] = fmaxf(raised[h], __shfl_xor_sync(~0u, raised[h], 1));
        top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 2));
        sum[h] *= exp2_fast(raised[h] - top[h]);
      }
    }
    float lse[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float all = sum[h] + __shfl_xor_sync(~0u, sum[h], 1);
      all += __shfl_xor_sync(~0u, all, 2);
      lse[h] = top[h] + __log2f(all);
    }
    this->set_lse(lse);
  }

  // The product with the stage at `at`, once it is there.
  __device__ void multiply(float (&s)[32], Cursor& at) {
    barrier_wait(shared_address(&barriers.full[at.stage]), at.phase);
    multiply_statistics<kDepth>(s, a, statistics, at.stage);
    at.advance(args.stages);
  }
  __device__ void release_stage() {
    release(barriers.empty[ring.stage], lane);
    ring.advance(args.stages);
  }

  // kTurn parts, while one is worked on the next is multiplied. Nothing is in flight from one turn to the next: the
  // compiler would serialise the products.
  template <int kTurn>
  __device__ void turn(const MassItem& item, bool first, bool last) {
    float s[2][32];
    Cursor at = ring;
    pin(a);
    wgmma_fence();
    multiply(s[0], at);
    multiply(s[1], at);
#pragma unroll
    for (int i = 0; i < kTurn; ++i) {
      if (i + 1 < kTurn)
        wgmma_wait<1>();
      else
        wgmma_wait<0>();
      pin(s[i % 2]);
      release_stage();
      add(s[i % 2], item, first && i == 0, last);
      if (i + 2 < kTurn) {
        pin(s[i % 2]);
        wgmma_fence();
        multiply(s[i % 2], at);
      }
    }
  }

  __device__ void score(const MassItem& item) {
#pragma unroll
    for (int i = 0; i < 32; ++i) masses[i] = 0;
    const int chunks = (item.halves() + 1) / 2;
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const bool last = chunk + 1 == chunks;
      if (args.parts == 2)
        turn<2>(item, chunk == 0, last);
      else
        for (int part = 0; part < args.parts; part += 4) turn<4>(item, chunk + part == 0, last);
      finish_chunk(chunk);
    }
    finish_sums();
    this->store_kept(item, chunks);
  }

  __device__ void run() {
    wait_for_dependencies();
    for (int round = 0, index; (index = item_index(round)) < args.item_count; ++round) {
      const typename Rows::Read read = this->read(index);
      load(read);
      score(Rows::item_of(read));
    }
  }
};

template <int D, bool kMoments, int kLog>
__global__ void __launch_bounds__(Build<D, kMoments>::kThreads, 1)
    part_masses_kernel(const __grid_constant__ CUtensorMap statistics_map, const __grid_constant__ MassArguments args) {
  using Size = Build<D, kMoments>;
  SB_DYNAMIC_SHARED(unsigned char, raw, 1024);
  SB_SHARED(MassBarriers, barriers);
  SB_SHARED_ALIGNED(16, __half, lse, [Size::kConsumers / 2]);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  init_mass_barriers<Size::kConsumers>(args, barriers);
  launch_dependents();
  const uint32_t statistics = shared_address(raw);
  if (warp >= Size::kConsumers / 32) {
    registers_shrink<Size::kLoading>();
    if (warp > Size::kConsumers / 32) return;
    load_statistics<Size::kStageBytes>(statistics_map, args, barriers, statistics, lane);
  } else {
    registers_grow<Size::kComputing>();
    uint4* kept = reinterpret_cast<uint4*>(raw + args.stages * Size::kStageBytes) + threadIdx.x;
    Scorer<D, kMoments, kLog>({args, kept, room_beyond<Size::kConsumers>(args), lse, static_cast<int>(threadIdx.x)},
                              barriers, statistics)
        .run();
  }
}

template <int D, bool kMoments, int kLog>
void launch(const SelectParams& p, const SelectBatch& batch, cudaStream_t stream) {
  using Size = Build<D, kMoments>;
  const MassMemory memory = mass_memory(p.max_competing, Size::kDepth, Size::kRows);
  const auto kernel = part_masses_kernel<D, kMoments, kLog>;
  allow_shared_memory(kernel, memory.bytes, "shared memory of the masses");
  launch_early(kernel, {std::min(batch.score_count, multiprocessors()), Size::kThreads, memory.bytes, stream},
               packed_map(p.statistics, p.statistics_rows, 1, Size::kDepth, 1, kChunk),
               mass_arguments(p, batch, memory, Size::kRows >> kLog));
  check(cudaGetLastError(), "masses of key blocks by parts");
}

template <int D, bool kMoments>
void launch_for(const SelectParams& p, const SelectBatch& batch, cudaStream_t stream) {
  switch (log_slots(p)) {
    case 0:
      return launch<D, kMoments, 0>(p, batch, stream);
    case 1:
      return launch<D, kMoments, 1>(p, batch, stream);
    case 2:
      return launch<D, kMoments, 2>(p, batch, stream);
    case 3:
      return launch<D, kMoments, 3>(p, batch, stream);
    default:
      return launch<D, kMoments, 4>(p, batch, stream);
  }
}

}  // namespace

void part_masses(const SelectParams& p, const SelectBatch& batch, cudaStream_t stream) {
  const bool moments = p.statistics_channels == 2;
  if (p.shape.head_dim == 128)
    (moments ? launch_for<128, true> : launch_for<128, false>)(p, batch, stream);
  else
    (moments ? launch_for<64, true> : launch_for<64, false>)(p, batch, stream);
}

}  // namespace sb::gpu
