#include "attention/cuda/check.cuh"
#include "attention/cuda/emit.cuh"

namespace sb::gpu {
namespace {

// The pairs (query block, key block) of largest mass over a whole sequence and head. Masses are 16-bit numbers: two
// histograms, of the upper and of the lower byte, find the least mass that is chosen and how many of that mass are;
// these go to the first query blocks, in each to the first key blocks. A warp a query block.

// In the counts of a pool: two histograms, then
constexpr int kUpper = 512, kLeft = 513, kTies = 514, kThreshold = 515, kPoolInts = 520;

struct Arguments {
  ChoiceArguments choice;
  uint16_t* sums;
  const SelectPool* pools;
  int32_t* counts;  // of the pools, then the ties of every query block
  int32_t pool_count;

  __device__ int32_t* of_pool(int pool) const { return counts + static_cast<int64_t>(pool) * kPoolInts; }
  __device__ int32_t& ties(const SelectItem& item) const {
    return counts[static_cast<int64_t>(pool_count) * kPoolInts + pools[item.pool].first_tile +
                  item.position / choice.query_block];
  }
};

__device__ bool chooses(const SelectItem& item) {
  return item.competing > item.sinks + item.local;
}

// Calls body(key block, whether the lane has one) for the free key blocks, all lanes together.
template <typename Body>
__device__ void each_free(const SelectItem& item, int lane, Body body) {
  const int end = item.competing - item.local;
  for (int j = item.sinks; j < end; j += 32) body(j + lane, j + lane < end);
}

// Adds one to a bin for every lane that has one; lanes of the same bin together.
__device__ void count(int32_t* bins, int bin, bool have, int lane) {
  const unsigned active = __ballot_sync(~0u, have);
  if (!have) return;
  const unsigned same = __match_any_sync(active, bin);
  if (lane == __ffs(static_cast<int>(same)) - 1) atomicAdd(bins + bin, __popc(same));
}

__global__ void __launch_bounds__(32 * kWarps) sum_kernel(const __grid_constant__ Arguments args) {
  const int lane = threadIdx.x % 32, index = blockIdx.x * kWarps + threadIdx.x / 32;
  if (index >= args.choice.count) return;
  const SelectItem item = args.choice.items[index];
  if (!chooses(item)) return;
  int32_t* bins = args.of_pool(item.pool);
  each_free(item, lane, [&](int j, bool have) {
    uint32_t value = 0;
    if (have) {
      float sum = 0;
      for (int row = 0; row < item.tokens; ++row)
        sum += exp2f(mass_of(args.choice.mass(item.masses + static_cast<int64_t>(row) * item.stride + j)));
      value = ordered(__half_as_ushort(__float2half_rn(__log2f(sum)))) & 0xFFFF;
      args.sums[item.sums + j] = static_cast<uint16_t>(value);
    }
    count(bins, static_cast<int>(value >> 8), have, lane);
  });
}

// From the largest bin down to the one that holds the last choice. `kLower`: among those of the upper byte found
// before.
template <bool kLower>
__global__ void find_kernel(const __grid_constant__ Arguments args) {
  const int pool = blockIdx.x * blockDim.x + threadIdx.x;
  if (pool >= args.pool_count) return;
  int32_t* counts = args.of_pool(pool);
  int64_t left = kLower ? counts[kLeft] : args.pools[pool].wanted;
  int bin = 255;
  while (bin > 0 && counts[256 * kLower + bin] < left) left -= counts[256 * kLower + bin--];
  if constexpr (kLower) {
    counts[kThreshold] = counts[kUpper] << 8 | bin;
    counts[kTies] = static_cast<int32_t>(left);
  } else {
    counts[kUpper] = bin;
    counts[kLeft] = static_cast<int32_t>(left);
  }
}

__global__ void __launch_bounds__(32 * kWarps) lower_kernel(const __grid_constant__ Arguments args) {
  const int lane = threadIdx.x % 32, index = blockIdx.x * kWarps + threadIdx.x / 32;
  if (index >= args.choice.count) return;
  const SelectItem item = args.choice.items[index];
  if (!chooses(item)) return;
  int32_t* counts = args.of_pool(item.pool);
  each_free(item, lane, [&](int j, bool have) {
    const uint32_t value = have ? args.sums[item.sums + j] : 0;
    count(counts + 256, static_cast<int>(value & 255), have && static_cast<int>(value >> 8) == counts[kUpper], lane);
  });
}

__global__ void __launch_bounds__(32 * kWarps) ties_kernel(const __grid_constant__ Arguments args) {
  const int lane = threadIdx.x % 32, index = blockIdx.x * kWarps + threadIdx.x / 32;
  if (index >= args.choice.count) return;
  const SelectItem item = args.choice.items[index];
  int ties = 0;
  if (chooses(item)) {
    const int threshold = args.of_pool(item.pool)[kThreshold];
    each_free(item, lane, [&](int j, bool have) {
      ties += __popc(__ballot_sync(~0u, have && args.sums[item.sums + j] == threshold));
    });
  }
  if (lane == 0) args.ties(item) = ties;
}

// Ties of every query block to those of the ones before it. A thread block a pool.
__global__ void __launch_bounds__(1024) scan_kernel(const __grid_constant__ Arguments args) {
  __shared__ int32_t sums[32];
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
  extern __shared__ __align__(16) uint8_t shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, index = blockIdx.x * kWarps + warp;
  if (index >= args.choice.count) return;
  const SelectItem item = args.choice.items[index];
  uint8_t* first = nullptr;
  if (chooses(item)) {
    first = shared + warp * args.choice.warp_bytes;
    const int32_t* counts = args.of_pool(item.pool);
    const int threshold = counts[kThreshold];
    int ties_left = counts[kTies] - args.ties(item);
    for (int j = lane; j < item.competing; j += 32)
      if (j < item.sinks || j >= item.competing - item.local) first[j] = 0;
    each_free(item, lane, [&](int j, bool have) {
      const int value = have ? args.sums[item.sums + j] : -1;
      const unsigned tied = __ballot_sync(~0u, value == threshold);
      const bool lucky = value == threshold && __popc(tied & ((1u << lane) - 1)) < ties_left;
      if (have) first[j] = value > threshold || lucky ? 0 : kUnchosen;
      ties_left -= __popc(tied);
    });
    __syncwarp();
  }
  emit(args.choice, item, first, lane);
}

}  // namespace

void begin_choices(const SelectParams& p, cudaStream_t stream) {
  if (p.pool_count == 0) return;
  check(cudaMemsetAsync(p.pool_counts, 0, pool_counts_size(p.pool_count, p.pool_tiles) * sizeof(int32_t), stream),
        "counts of pools");
}

void sum_tile_masses(const SelectParams& p, const SelectBatch& batch, cudaStream_t stream) {
  const Arguments args{choice_arguments(p, batch.item_begin, batch.item_count, 0), p.sums, p.pools, p.pool_counts,
                       p.pool_count};
  sum_kernel<<<(batch.item_count + kWarps - 1) / kWarps, 32 * kWarps, 0, stream>>>(args);
  check(cudaGetLastError(), "masses of query blocks");
}

void choose_most_mass(const SelectParams& p, cudaStream_t stream) {
  int items = 0;
  for (const SelectBatch& batch : p.batches) items += batch.item_count;
  if (items == 0) return;
  const int warp_bytes = (p.max_competing + 63) / 64 * 64, shared = kWarps * warp_bytes;
  const Arguments args{choice_arguments(p, 0, items, warp_bytes), p.sums, p.pools, p.pool_counts, p.pool_count};
  const int grid = (items + kWarps - 1) / kWarps, pool_grid = (p.pool_count + 127) / 128;
  find_kernel<false><<<pool_grid, 128, 0, stream>>>(args);
  lower_kernel<<<grid, 32 * kWarps, 0, stream>>>(args);
  find_kernel<true><<<pool_grid, 128, 0, stream>>>(args);
  ties_kernel<<<grid, 32 * kWarps, 0, stream>>>(args);
  scan_kernel<<<p.pool_count, 1024, 0, stream>>>(args);
  allow_shared_memory(list_kernel, shared, "shared memory of the choice");
  list_kernel<<<grid, 32 * kWarps, shared, stream>>>(args);
  check(cudaGetLastError(), "choice of the largest masses");
}

}  // namespace sb::gpu
