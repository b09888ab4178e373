#include "attention/gpu/hopper/masses.cuh"
#include "device/kernel.cuh"

namespace sb::gpu {
namespace {

// Masses of key blocks that are judged by planes: the product of a token's one query with every key of a block over a
// few channels, of which the thread that has the block keeps the largest. Products are of 16-bit floats and so are
// their sums: two are compared at a time, and comparing takes half as long as multiplying. A row of the statistics
// holds the channels of neighbouring keys of a block, kDepth each; a stage is such rows of 64 key blocks. Exponentials
// are taken of whole blocks only.
constexpr int kConsumers = 2 * kPlaneRows, kThreads = kConsumers + 128;
constexpr int kLoading = 32, kComputing = 160;  // registers
constexpr int kStageBytes = mass_stage_bytes(kPlaneRowWidth);

template <int kDepth>
struct Scorer : MassRows<kDepth, 0, kConsumers> {
  using Rows = MassRows<kDepth, 0, kConsumers>;
  using Rows::args, Rows::lane, Rows::reference, Rows::sum;
  static constexpr int kKeys = kPlaneRowWidth / kDepth;  // of a stage
  static constexpr int kTurn = 16, kInFlight = 4;        // keys
  MassBarriers& barriers;
  uint64_t statistics;  // descriptor of the first stage
  Cursor ring;
  uint32_t a[kDepth / 4];  // operand: the queries
  uint32_t best[16];       // largest products so far of this thread's key blocks, two in each

  __device__ Scorer(const Rows& rows, MassBarriers& b, uint32_t address)
      : Rows(rows), barriers(b), statistics(tile_descriptor(address)) {}

  __device__ void forget_best() {
#pragma unroll
    for (int i = 0; i < 16; ++i) best[i] = 0xFC00FC00;  // -infinity
  }

  // The product with the i-th key of a turn (a constant), once its stage is there.
  __device__ __forceinline__ void multiply(uint32_t (&s)[16], Cursor& at, int i) {
    constexpr int kSteps = kDepth / 16;
    if (i % kKeys == 0) barrier_wait(shared_address(&barriers.full[at.stage]), at.phase);
    wgmma_fence();
    const uint64_t b = statistics + at.stage * (kStageBytes / 16);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int kk = i % kKeys * kSteps + step;
      wgmma_rs_half(s, a + 4 * step, further(b, (kk / 4) * kChunk * 128 + (kk % 4) * 32), step != 0);
    }
    wgmma_commit();
    if (i % kKeys == kKeys - 1) at.advance(args.stages);
  }
  __device__ void release_stage() {
    release(barriers.empty[ring.stage], lane);
    ring.advance(args.stages);
  }

  // Until at most so many products (a constant) are in flight.
  static __device__ __forceinline__ void wait(int in_flight) {
    static_assert(kInFlight == 4);
    if (in_flight >= 3) return wgmma_wait<3>();
    if (in_flight == 2) return wgmma_wait<2>();
    if (in_flight == 1) return wgmma_wait<1>();
    wgmma_wait<0>();
  }

  // kTurn keys; while the scores of one are compared the next ones are multiplied. Nothing is in flight from one turn
  // to the next: the compiler would serialise the products.
  __device__ void turn() {
    uint32_t s[kInFlight][16];
    Cursor at = ring;
    pin(a);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) multiply(s[i], at, i);
#pragma unroll
    for (int i = 0; i < kTurn; ++i) {
      wait(kTurn - 1 - i);
      uint32_t(&scores)[16] = s[i % kInFlight];
      pin(scores);
      if (i % kKeys == kKeys - 1) release_stage();
#pragma unroll
      for (int j = 0; j < 16; ++j) best[j] = half_max(best[j], scores[j]);
      if (i + kInFlight < kTurn) {
        pin(scores);
        multiply(scores, at, i + kInFlight);
      }
    }
  }

  // All keys of a chunk are in: its scores in units of log2, relative to the rows' references, and their share of the
  // rows' sums.
  __device__ void finish_chunk(const MassItem& item, int chunk, bool last) {
    float s[32];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 two = __half22float2(as_half2(best[i]));
      s[2 * i] = fminf(fmaxf(two.x, -kLargestHalf), kLargestHalf);
      s[2 * i + 1] = fminf(fmaxf(two.y, -kLargestHalf), kLargestHalf);
    }
    if (last) this->hide_tail(s, item);
    if (chunk == 0) this->begin_rows(s);
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] = fmaf(s[i], args.unit, -reference[i / 2 % 2]);
    uint32_t x[2][8];
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int j = 0; j < 8; ++j) x[h][j] = as_bits(__floats2half2_rn(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
#pragma unroll
    for (int i = 0; i < 32; ++i) sum[i / 2 % 2] += exp2_fast(s[i]);
    this->keep(x, chunk);
    forget_best();
  }

  __device__ void run() {
    forget_best();
    typename Rows::Read next = this->read(item_index(0));
    wait_for_dependencies();
    for (int round = 0; item_index(round) < args.item_count; ++round) {
      this->load_queries(next, a);
      const MassItem item = Rows::item_of(next);
      next = this->read(item_index(round + 1));
      const int chunks = (item.halves() + 1) / 2;
      for (int chunk = 0; chunk < chunks; ++chunk) {
#pragma unroll 1
        for (int key = 0; key < args.parts * kKeys; key += kTurn) turn();
        finish_chunk(item, chunk, chunk + 1 == chunks);
      }
      this->finish_sums(chunks);
      this->store_kept(item, chunks);
    }
  }
};

template <int kDepth>
__global__ void __launch_bounds__(kThreads, 1) plane_masses_kernel(const __grid_constant__ CUtensorMap statistics_map,
                                                                   const __grid_constant__ MassArguments args) {
  SB_DYNAMIC_SHARED(unsigned char, raw, 1024);
  SB_SHARED(MassBarriers, barriers);
  SB_SHARED_ALIGNED(16, __half, lse, [kConsumers / 2]);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  init_mass_barriers<kConsumers>(args, barriers);
  launch_dependents();
  const uint32_t statistics = shared_address(raw);
  if (warp >= kConsumers / 32) {
    registers_shrink<kLoading>();
    if (warp > kConsumers / 32) return;
    load_statistics<kStageBytes>(statistics_map, args, barriers, statistics, lane);
  } else {
    registers_grow<kComputing>();
    uint4* kept = reinterpret_cast<uint4*>(raw + args.stages * kStageBytes) + threadIdx.x;
    Scorer<kDepth>({args, kept, room_beyond<kConsumers>(args), lse, static_cast<int>(threadIdx.x)}, barriers,
                   statistics)
        .run();
  }
}

template <int kDepth>
void launch(const SelectParams& p, const SelectBatch& batch, cudaStream_t stream) {
  const MassMemory memory = mass_memory(p.max_competing, kPlaneRowWidth, kPlaneRows);
  const auto kernel = plane_masses_kernel<kDepth>;
  allow_shared_memory(kernel, memory.bytes, "shared memory of the masses");
  MassArguments args = mass_arguments(p, batch, memory, kPlaneRows);
  args.q = reinterpret_cast<const __nv_bfloat16*>(plane_queries(p));  // moved as they are
  args.query_heads = p.shape.kv_heads;
  args.group = 1;
  args.unit = kPlaneScoreUnit * kLog2e;  // the scale is in the queries
  launch_early(kernel, {std::min(batch.score_count, multiprocessors()), kThreads, memory.bytes, stream},
               packed_map(p.statistics, p.statistics_rows, 1, kPlaneRowWidth, 1, kChunk), args);
  check(cudaGetLastError(), "masses of key blocks by planes");
}

}  // namespace

void plane_masses(const SelectParams& p, const SelectBatch& batch, cudaStream_t stream) {
  switch (p.plane_depth) {
    case 32:
      return launch<32>(p, batch, stream);
    case 64:
      return launch<64>(p, batch, stream);
    default:
      return launch<128>(p, batch, stream);
  }
}

}  // namespace sb::gpu
