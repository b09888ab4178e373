#include "attention/gpu/hopper/masses.cuh"
#include "device/kernel.cuh"

namespace sb::gpu {
namespace {

// Masses of key blocks that are judged as a whole.

template <int D>
struct Build {
  static constexpr int kRows = whole_rows(D), kConsumers = 2 * kRows, kThreads = kConsumers + 128;
  static constexpr int kLoading = kRows == 128 ? 40 : 32, kComputing = kRows == 128 ? 232 : 160;  // registers
  static constexpr int kStageBytes = mass_stage_bytes(2 * D);
};

template <int D, int kLog>
struct Scorer : MassRows<D, kLog, Build<D>::kConsumers> {
  using Rows = MassRows<D, kLog, Build<D>::kConsumers>;
  using Rows::args, Rows::lane, Rows::reference, Rows::sum;
  MassBarriers& barriers;
  uint64_t statistics;  // descriptor of the first stage
  Cursor ring;
  uint32_t a[2 * D / 4];  // operand: q, then its square
  uint32_t ahead[D / 4];  // the next item's q

  __device__ Scorer(const Rows& rows, MassBarriers& b, uint32_t address)
      : Rows(rows), barriers(b), statistics(tile_descriptor(address)) {}

  __device__ void take_ahead() {
#pragma unroll
    for (int i = 0; i < D / 4; ++i) {
      a[i] = ahead[i];
      a[D / 4 + i] = Rows::squared(ahead[i]);
    }
  }

  // The warpgroups take turns in filling the tensor cores, so that one computes exponentials while another multiplies.
  static constexpr int kGroups = Build<D>::kConsumers / 128;
  __device__ void turn_begin() {
    named_sync(1 + this->group, 256);
  }
  __device__ void turn_end() {
    named_arrive(1 + (this->group + 1 == kGroups ? 0 : this->group + 1), 256);
  }

  // Scores of a chunk in units of log2, relative to the rows' references: kept in 16 bits, their exponentials summed.
  // No branch between them, so that all of it runs beside the exponentials. kScores: 32, or 16 of half a chunk.
  template <int kScores>
  __device__ void work(float (&s)[kScores], const MassItem& item, int chunk, bool first, bool last) {
    if (last) this->hide_tail(s, item);
    if (first) this->begin_rows(s);
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] = fmaf(s[i], args.unit, -reference[i / 2 % 2]);
    uint32_t x[2][8];
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        constexpr uint32_t kNothing = 0xFC00FC00u;  // -infinity
        x[h][j] = 4 * j < kScores
                      ? as_bits(__floats2half2_rn(s[(4 * j + 2 * h) % kScores], s[(4 * j + 2 * h + 1) % kScores]))
                      : kNothing;
      }
#pragma unroll
    for (int i = 0; i < kScores; ++i) sum[i / 2 % 2] += exp2_fast(s[i]);
    this->keep(x, chunk);
  }

  __device__ void release_stage() {
    release(barriers.empty[ring.stage], lane);
    ring.advance(args.stages);
  }

  // The second's product runs while the first's scores are worked on. kScores: of the second.
  template <int kScores>
  __device__ void two_chunks(const MassItem& item, int chunk, bool last) {
    float s[32], t[kScores];
    Cursor second = ring;
    second.advance(args.stages);
    turn_begin();
    barrier_wait(shared_address(&barriers.full[ring.stage]), ring.phase);
    pin(a);
    wgmma_fence();
    multiply_statistics<2 * D>(s, a, statistics, ring.stage);
    barrier_wait(shared_address(&barriers.full[second.stage]), second.phase);
    multiply_statistics<2 * D>(t, a, statistics, second.stage);
    turn_end();
    wgmma_wait<1>();
    pin(s);
    release_stage();
    work(s, item, chunk, chunk == 0, false);
    wgmma_wait<0>();
    pin(t);
    release_stage();
    work(t, item, chunk + 1, false, last);
  }
  template <int kScores>
  __device__ void one_chunk(const MassItem& item, int chunk) {
    float s[kScores];
    turn_begin();
    barrier_wait(shared_address(&barriers.full[ring.stage]), ring.phase);
    pin(a);
    wgmma_fence();
    multiply_statistics<2 * D>(s, a, statistics, ring.stage);
    turn_end();
    wgmma_wait<0>();
    pin(s);
    release_stage();
    work(s, item, chunk, chunk == 0, true);
  }

  __device__ void run() {
    // Where an item's queries are is read two rounds before its turn, they one round before, so that nobody waits for
    // them.
    typename Rows::Read next = this->read(item_index(0));
    this->load_queries(next, ahead);
    MassItem item = Rows::item_of(next);
    next = this->read(item_index(1));
    wait_for_dependencies();
    if (this->group + 1 == kGroups) turn_end();  // the first group begins
    for (int round = 0; item_index(round) < args.item_count; ++round) {
      take_ahead();
      this->load_queries(next, ahead);
      const typename Rows::Read after = this->read(item_index(round + 2));
      const int halves = item.halves(), chunks = (halves + 1) / 2;
      const bool half = halves % 2 == 1;  // of the last chunk nobody sees more
      int chunk = 0;
      for (; chunk + 2 + half <= chunks; chunk += 2) two_chunks<32>(item, chunk, chunk + 2 == chunks);
      if (half) {
        if (chunk + 1 < chunks)
          two_chunks<16>(item, chunk, true);
        else
          one_chunk<16>(item, chunk);
      } else if (chunk < chunks) {
        one_chunk<32>(item, chunk);
      }
      this->finish_sums(chunks);
      this->store_kept(item, chunks);
      item = Rows::item_of(next);
      next = after;
    }
  }
};

template <int D, int kLog>
__global__ void __launch_bounds__(Build<D>::kThreads, 1)
    masses_kernel(const __grid_constant__ CUtensorMap statistics_map, const __grid_constant__ MassArguments args) {
  constexpr int kConsumers = Build<D>::kConsumers;
  SB_DYNAMIC_SHARED(unsigned char, raw, 1024);
  SB_SHARED(MassBarriers, barriers);
  SB_SHARED_ALIGNED(16, __half, lse, [kConsumers / 2]);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  init_mass_barriers<kConsumers>(args, barriers);
  launch_dependents();
  const uint32_t statistics = shared_address(raw);
  if (warp >= kConsumers / 32) {
    registers_shrink<Build<D>::kLoading>();
    if (warp > kConsumers / 32) return;
    load_statistics<Build<D>::kStageBytes>(statistics_map, args, barriers, statistics, lane);
  } else {
    registers_grow<Build<D>::kComputing>();
    uint4* kept = reinterpret_cast<uint4*>(raw + args.stages * Build<D>::kStageBytes) + threadIdx.x;
    Scorer<D, kLog>({args, kept, room_beyond<kConsumers>(args), lse, static_cast<int>(threadIdx.x)}, barriers,
                    statistics)
        .run();
  }
}

template <int D, int kLog>
void launch(const SelectParams& p, const SelectBatch& batch, cudaStream_t stream) {
  const MassMemory memory = mass_memory(p.max_competing, 2 * D, Build<D>::kRows);
  const auto kernel = masses_kernel<D, kLog>;
  allow_shared_memory(kernel, memory.bytes, "shared memory of the masses");
  launch_early(kernel, {std::min(batch.score_count, multiprocessors()), Build<D>::kThreads, memory.bytes, stream},
               packed_map(p.statistics, p.statistics_rows, 1, 2 * D, 1, kChunk),
               mass_arguments(p, batch, memory, Build<D>::kRows >> kLog));
  check(cudaGetLastError(), "masses of key blocks");
}

template <int D>
void launch_for(const SelectParams& p, const SelectBatch& batch, cudaStream_t stream) {
  switch (log_slots(p)) {
    case 0:
      return launch<D, 0>(p, batch, stream);
    case 1:
      return launch<D, 1>(p, batch, stream);
    case 2:
      return launch<D, 2>(p, batch, stream);
    case 3:
      return launch<D, 3>(p, batch, stream);
    default:
      return launch<D, 4>(p, batch, stream);
  }
}

}  // namespace

void whole_masses(const SelectParams& p, const SelectBatch& batch, cudaStream_t stream) {
  (p.shape.head_dim == 128 ? launch_for<128> : launch_for<64>)(p, batch, stream);
}

}  // namespace sb::gpu
