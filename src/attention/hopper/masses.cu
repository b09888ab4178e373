#include "attention/hopper/masses.cuh"

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
  using Rows::args, Rows::lane, Rows::reference, Rows::raised, Rows::sum;
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

  __device__ void relative(float (&s)[32], uint32_t (&x)[2][8]) const {
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] = fmaf(s[i], args.unit, -reference[i / 2 % 2]);
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int j = 0; j < 8; ++j) x[h][j] = as_bits(__floats2half2_rn(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
  }

  // Sums of exponentials of this thread's columns, relative to 2^raised. A sum that leaves the range raises it: rarely,
  // and each row by itself.
  __device__ void add_exponentials(const float (&s)[32]) {
    constexpr float kLimit = 1.2e24f;
    const auto sum_from = [&](int h, float base) {
      float part[4] = {0, 0, 0, 0};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        part[2 * (j % 2)] += exp2_fast(s[4 * j + 2 * h] - base);
        part[2 * (j % 2) + 1] += exp2_fast(s[4 * j + 2 * h + 1] - base);
      }
      return (part[0] + part[1]) + (part[2] + part[3]);
    };
    const float added[2] = {sum_from(0, 0.f), sum_from(1, 0.f)};
    if (!__any_sync(~0u, fmaxf(added[0], added[1]) > kLimit || fmaxf(raised[0], raised[1]) > 0.f)) {
      sum[0] += added[0];
      sum[1] += added[1];
      return;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (!(added[h] > kLimit) && raised[h] == 0.f) {
        sum[h] += added[h];
        continue;
      }
      float top = raised[h];
#pragma unroll
      for (int j = 0; j < 8; ++j) top = fmaxf(top, fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
      sum[h] = sum[h] * exp2_fast(raised[h] - top) + sum_from(h, top);
      raised[h] = top;
    }
  }

  __device__ void step(float (&s)[32], const MassItem& item, int chunk, int chunks) {
    if (chunk + 1 == chunks) this->hide_tail(s, item);
    if (chunk == 0) this->begin_rows(s);
    uint32_t x[2][8];
    relative(s, x);
    this->keep(x, chunk);
    add_exponentials(s);
  }

  __device__ void release_stage() {
    release(barriers.empty[ring.stage], lane);
    ring.advance(args.stages);
  }

  // Two steps: the second's product runs while the first's scores are worked on. Where there is no second, the product
  // is of whatever lies there: a branch around it would make the compiler serialise the products.
  __device__ void two_steps(const MassItem& item, int chunk, int chunks) {
    float s[2][32];
    Cursor second = ring;
    second.advance(args.stages);
    const bool both = chunk + 1 < chunks;
    barrier_wait(shared_address(&barriers.full[ring.stage]), ring.phase);
    pin(a);
    wgmma_fence();
    multiply_statistics<2 * D>(s[0], a, statistics, ring.stage);
    if (both) barrier_wait(shared_address(&barriers.full[second.stage]), second.phase);
    multiply_statistics<2 * D>(s[1], a, statistics, second.stage);
    wgmma_wait<1>();
    pin(s[0]);
    release_stage();
    step(s[0], item, chunk, chunks);
    wgmma_wait<0>();
    pin(s[1]);
    if (!both) return;
    release_stage();
    step(s[1], item, chunk + 1, chunks);
  }

  __device__ void run() {
    // Where an item's queries are is read two rounds before its turn, they and the rest of it one round before, so that
    // nobody waits for them.
    typename Rows::Queries queries = this->queries_of(item_index(0));
    this->load_queries(queries, ahead);
    queries = this->queries_of(item_index(1));
    MassItem item = this->fetch(item_index(0));
    wait_for_dependencies();
    for (int round = 0; item_index(round) < args.item_count; ++round) {
      take_ahead();
      this->load_queries(queries, ahead);
      queries = this->queries_of(item_index(round + 2));
      const MassItem next = this->fetch(item_index(round + 1));
      const int chunks = item.chunks();
      for (int chunk = 0; chunk < chunks; chunk += 2) two_steps(item, chunk, chunks);
      this->finish_sums();
      this->store_kept(item, chunks);
      item = next;
    }
  }
};

template <int D, int kLog>
__global__ void __launch_bounds__(Build<D>::kThreads, 1)
    masses_kernel(const __grid_constant__ CUtensorMap statistics_map, const __grid_constant__ MassArguments args) {
  constexpr int kConsumers = Build<D>::kConsumers;
  extern __shared__ __align__(1024) unsigned char raw[];
  __shared__ MassBarriers barriers;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < args.stages; ++i) {
      barrier_init(shared_address(&barriers.full[i]), 1);
      barrier_init(shared_address(&barriers.empty[i]), kConsumers / 32 * kArrivals);
    }
    barrier_init_fence();
  }
  __syncthreads();
  launch_dependents();
  const uint32_t statistics = shared_address(raw);
  if (warp >= kConsumers / 32) {
    registers_shrink<Build<D>::kLoading>();
    if (warp > kConsumers / 32) return;
    load_statistics<Build<D>::kStageBytes>(statistics_map, args, barriers, statistics, lane);
  } else {
    registers_grow<Build<D>::kComputing>();
    uint4* kept = reinterpret_cast<uint4*>(raw + args.stages * Build<D>::kStageBytes) + threadIdx.x;
    Scorer<D, kLog>({args, kept, room_beyond<kConsumers>(args), warp / 4, warp % 4, lane}, barriers, statistics).run();
  }
}

template <int D, int kLog>
void launch(const SelectParams& p, const SelectBatch& batch, cudaStream_t stream) {
  const MassMemory memory = mass_memory(p.max_competing, 2 * D, Build<D>::kRows);
  const auto kernel = masses_kernel<D, kLog>;
  allow_shared_memory(kernel, memory.bytes, "shared memory of the masses");
  launch_early(kernel, std::min(batch.score_count, multiprocessors()), Build<D>::kThreads, memory.bytes, stream,
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
