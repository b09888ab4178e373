#include "attention/gpu/launch/check.cuh"
#include "attention/gpu/launch/early.cuh"
#include "attention/gpu/select/row_lists.cuh"
#include "device/kernel.cuh"

namespace sb::gpu {
namespace {

// The pairs (query block, key block) of largest mass over a whole sequence and head. Masses are 16-bit numbers: two
// histograms, of the upper and of the lower byte, find the least mass that is selected and how many of that mass are;
// these go to the first query blocks, in each to the first key blocks. A warp a query block.

// In the counts of a pool: two histograms.
constexpr int kBins = 256, kPoolInts = 2 * kBins;
constexpr int kSumWarps = 8, kSlots = 8;  // of a thread block that sums: pools whose counts it gathers

struct Arguments {
  SelectArguments selection;
  uint16_t* sums;
  const SelectPool* pools;
  int32_t* counts;  // of the pools, then the ties of every query block
  int32_t pool_count;

  __device__ int32_t* of_pool(int pool) const { return counts + static_cast<int64_t>(pool) * kPoolInts; }
  __device__ int32_t& ties(const SelectItem& item) const {
    return counts[static_cast<int64_t>(pool_count) * kPoolInts + pools[item.pool].first_tile +
                  item.position / selection.query_block];
  }
};

__device__ bool selects(const SelectItem& item) {
  return item.competing > item.sinks + item.local;
}

// Calls body(key block, whether the lane has one) for the free key blocks, all lanes together.
template <typename Body>
__device__ void each_free(const SelectItem& item, int lane, Body body) {
  const int end = item.competing - item.local;
  for (int j = item.sinks; j < end; j += 32) body(j + lane, j + lane < end);
}

// From the largest bin down to the one that holds the last of `left` selections, and how many of it are selected. All
// lanes of a warp.
struct Found {
  int bin;
  int64_t left;
};
__device__ Found find_bin(const int32_t* bins, int64_t left, int lane) {
  constexpr int kEach = kBins / 32;
  const int top = kBins - 1 - kEach * lane;  // this lane's, from the largest
  int own[kEach], sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) sum += own[i] = bins[top - i];
  int reached = sum;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(~0u, reached, step);
    if (lane >= step) reached += before;
  }
  const unsigned enough = __ballot_sync(~0u, reached >= left);
  const int holder = enough == 0 ? 31 : __ffs(static_cast<int>(enough)) - 1;
  int bin = top;
  left -= reached - sum;
#pragma unroll
  for (int i = 0; i < kEach; ++i)
    if (bin == top - i && bin > 0 && own[i] < left) {
      left -= own[i];
      --bin;
    }
  return {__shfl_sync(~0u, bin, holder), __shfl_sync(~0u, left, holder)};
}
// The least mass that is selected in a pool, and how many of that mass are.
struct Least {
  int mass;
  int64_t ties;
};
__device__ Least find_least(const Arguments& args, int pool, int lane) {
  const int32_t* counts = args.of_pool(pool);
  const Found upper = find_bin(counts, args.pools[pool].wanted, lane);
  const Found lower = find_bin(counts + kBins, upper.left, lane);
  return {upper.bin << 8 | lower.bin, lower.left};
}

// Masses of the query blocks: sums over their tokens, two key blocks per lane. Their upper bytes are counted in shared
// memory first; of pools that find no place there, in memory.
__global__ void __launch_bounds__(32 * kSumWarps) sum_kernel(const __grid_constant__ Arguments args) {
  SB_SHARED(int32_t, gathered, [kSlots][kBins]);
  SB_SHARED(int32_t, owner, [kSlots]);
  for (int i = threadIdx.x; i < kSlots * kBins; i += 32 * kSumWarps) gathered[i / kBins][i % kBins] = 0;
  if (threadIdx.x < kSlots) owner[threadIdx.x] = -1;
  launch_dependents();
  wait_for_dependencies();
  __syncthreads();
  const int lane = threadIdx.x % 32, index = blockIdx.x * kSumWarps + threadIdx.x / 32;
  if (index < args.selection.count) {
    const SelectItem item = args.selection.items[index];
    if (selects(item)) {
      const int slot = item.pool % kSlots;
      int before = -1;
      if (lane == 0) before = atomicCAS(owner + slot, -1, item.pool);
      before = __shfl_sync(~0u, before, 0);
      int32_t* bins = before == -1 || before == item.pool ? gathered[slot] : args.of_pool(item.pool);
      const int end = item.competing - item.local;
      for (int j = 2 * lane; j < end; j += 64) {
        float sum[2] = {0, 0};
#pragma unroll 8
        for (int row = 0; row < item.tokens; ++row) {
          const uint32_t two = args.selection.two_masses(item.masses + static_cast<int64_t>(row) * item.stride + j);
          const float2 masses = two_masses_of(two);
          sum[0] += exp2_fast(masses.x);
          sum[1] += exp2_fast(masses.y);
        }
        const __half2 mass = __floats2half2_rn(__log2f(sum[0]), __log2f(sum[1]));
        const uint32_t two = ordered(*reinterpret_cast<const uint32_t*>(&mass));
        *reinterpret_cast<uint32_t*>(args.sums + item.sums + j) = two;
        if (j >= item.sinks) atomicAdd(bins + (two >> 8 & 0xFF), 1);
        if (j + 1 >= item.sinks && j + 1 < end) atomicAdd(bins + (two >> 24), 1);
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kSlots * kBins; i += 32 * kSumWarps)
    if (const int32_t counted = gathered[i / kBins][i % kBins]; counted != 0)
      atomicAdd(args.of_pool(owner[i / kBins]) + i % kBins, counted);
}

// Counts the lower bytes of those whose upper byte is that of the least.
__global__ void __launch_bounds__(32 * kWarps) lower_kernel(const __grid_constant__ Arguments args) {
  launch_dependents();
  wait_for_dependencies();
  const int lane = threadIdx.x % 32, index = blockIdx.x * kWarps + threadIdx.x / 32;
  if (index >= args.selection.count) return;
  const SelectItem item = args.selection.items[index];
  if (!selects(item)) return;
  int32_t* counts = args.of_pool(item.pool);
  const int upper = find_bin(counts, args.pools[item.pool].wanted, lane).bin;
  each_free(item, lane, [&](int j, bool have) {
    const uint32_t value = have ? args.sums[item.sums + j] : 0;
    if (have && static_cast<int>(value >> 8) == upper) atomicAdd(counts + kBins + (value & 0xFF), 1);
  });
}

__global__ void __launch_bounds__(32 * kWarps) ties_kernel(const __grid_constant__ Arguments args) {
  launch_dependents();
  wait_for_dependencies();
  const int lane = threadIdx.x % 32, index = blockIdx.x * kWarps + threadIdx.x / 32;
  if (index >= args.selection.count) return;
  const SelectItem item = args.selection.items[index];
  int ties = 0;
  if (selects(item)) {
    const int threshold = find_least(args, item.pool, lane).mass;
    each_free(item, lane, [&](int j, bool have) {
      ties += __popc(__ballot_sync(~0u, have && args.sums[item.sums + j] == threshold));
    });
  }
  if (lane == 0) args.ties(item) = ties;
}

// Ties of every query block to those of the ones before it. A thread block a pool.
__global__ void __launch_bounds__(1024) scan_kernel(const __grid_constant__ Arguments args) {
  SB_SHARED(int32_t, sums, [32]);
  launch_dependents();
  wait_for_dependencies();
  const SelectPool pool = args.pools[blockIdx.x];
  int32_t* ties = args.counts + static_cast<int64_t>(args.pool_count) * kPoolInts + pool.first_tile;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int before = 0;
  for (int base = 0; base < pool.tiles; base += 1024) {
    const int i = base + threadIdx.x, own = i < pool.tiles ? ties[i] : 0;
    int sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int left = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += left;
    }
    __syncthreads();
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    int all = 0, mine = before + sum - own;
    for (int w = 0; w < 32; ++w) {
      if (w < warp) mine += sums[w];
      all += sums[w];
    }
    if (i < pool.tiles) ties[i] = mine;
    before += all;
  }
}

__global__ void __launch_bounds__(32 * kWarps) list_kernel(const __grid_constant__ Arguments args) {
  SB_DYNAMIC_SHARED(uint8_t, shared, 16);
  wait_for_dependencies();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, index = blockIdx.x * (blockDim.x / 32) + warp;
  SelectItem item;
  Counted counted{};
  if (index < args.selection.count) {
    item = args.selection.items[index];
    uint8_t* first = nullptr;
    if (selects(item)) {
      first = shared + warp * args.selection.warp_bytes;
      const Least least = find_least(args, item.pool, lane);
      const int threshold = least.mass;
      int ties_left = static_cast<int>(least.ties) - args.ties(item);
      for (int j = lane; j < item.competing; j += 32)
        if (j < item.sinks || j >= item.competing - item.local) first[j] = 0;
      each_free(item, lane, [&](int j, bool have) {
        const int value = have ? args.sums[item.sums + j] : -1;
        const unsigned tied = __ballot_sync(~0u, value == threshold);
        const bool lucky = value == threshold && __popc(tied & ((1u << lane) - 1)) < ties_left;
        if (have) first[j] = value > threshold || lucky ? 0 : kUnselected;
        ties_left -= __popc(tied);
      });
      __syncwarp();
    }
    counted = write_row_list(args.selection, item, first, lane);
  }
  add_counted(args.selection, index < args.selection.count ? item.sequence : -1, counted);
}

}  // namespace

void begin_selection(const SelectParams& p, cudaStream_t stream) {
  if (p.pool_count == 0) return;
  check(cudaMemsetAsync(p.pool_counts, 0, pool_counts_size(p.pool_count, p.pool_tiles) * sizeof(int32_t), stream),
        "counts of pools");
}

void sum_tile_masses(const SelectParams& p, const SelectBatch& batch, cudaStream_t stream, bool early) {
  const Arguments args{select_arguments(p, batch.item_begin, batch.item_count, 0), p.sums, p.pools, p.pool_counts,
                       p.pool_count};
  const int blocks = (batch.item_count + kSumWarps - 1) / kSumWarps;
  if (early)
    launch_early(sum_kernel, {blocks, 32 * kSumWarps, 0, stream}, args);
  else
    launch_kernel(sum_kernel, {blocks, 32 * kSumWarps, 0, stream}, args);
  check(cudaGetLastError(), "masses of query blocks");
}

void select_most_mass(const SelectParams& p, cudaStream_t stream) {
  int items = 0;
  for (const SelectBatch& batch : p.batches) items += batch.item_count;
  if (items == 0) return;
  const int warp_bytes = (p.max_competing + 63) / 64 * 64, warps = select_warps(p, warp_bytes),
            shared = warps * warp_bytes;
  const Arguments args{select_arguments(p, 0, items, warp_bytes), p.sums, p.pools, p.pool_counts, p.pool_count};
  const int grid = (items + kWarps - 1) / kWarps;
  launch_after(lower_kernel, {grid, 32 * kWarps, 0, stream}, args);
  launch_after(ties_kernel, {grid, 32 * kWarps, 0, stream}, args);
  launch_after(scan_kernel, {p.pool_count, 1024, 0, stream}, args);
  allow_shared_memory(list_kernel, shared, "shared memory of the selection");
  launch_after(list_kernel, {(items + warps - 1) / warps, 32 * warps, shared, stream}, args);
  check(cudaGetLastError(), "selection of the largest masses");
}

}  // namespace sb::gpu
