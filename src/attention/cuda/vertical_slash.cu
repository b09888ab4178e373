#include "attention/cuda/vertical_slash.h"

#include "attention/cuda/check.cuh"
#include "attention/cuda/emit.cuh"
#include "attention/cuda/slash_masses.cuh"

namespace sb::gpu {
namespace {

constexpr int kPickThreads = 1024;

// Masses as integers, so that sums do not depend on their order.
constexpr double kUnit = 1125899906842624.0;  // 2^50; all masses together are at most 64
__device__ double as_mass(uint64_t sum) {
  return static_cast<double>(sum) / kUnit;
}

struct Reached {
  int count;
  uint64_t mass;
};
__device__ Reached operator+(Reached a, Reached b) {
  return {a.count + b.count, a.mass + b.mass};
}
// What the threads before this one have.
__device__ Reached before_this(Reached own) {
  __shared__ Reached warps[kPickThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Reached sum = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const Reached left{__shfl_up_sync(~0u, sum.count, step), __shfl_up_sync(~0u, sum.mass, step)};
    if (lane >= step) sum = sum + left;
  }
  __syncthreads();
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  Reached before{sum.count - own.count, sum.mass - own.mass};
  for (int w = 0; w < warp; ++w) before = before + warps[w];
  return before;
}

// The fewest of `count` masses that reach `share` of all, `already` counting as reached; at most `most`; larger ones
// first, ties to the first. Calls take(i, how many were taken before it). Masses are not negative, so that their bits
// order them: the least that is taken is found eleven bits at a time, each time by how many and how much lies above.
constexpr int kBins = 2048;
struct PickRoom {
  uint32_t counts[kBins], low[kBins], high[kBins];
  int found_bin;
  Reached found_above;
};
template <typename Mass, typename Take>
__device__ int fewest_reaching(PickRoom& room, int count, float share, int most, double already, Mass mass, Take take) {
  auto& [counts, low, high, found_bin, found_above] = room;
  most = min(most, count);
  uint32_t least = 0;
  Reached above{0, 0};  // those larger than what `least` says so far
  double wanted = 0;
  constexpr int kShifts[3] = {20, 9, 0}, kBits[3] = {11, 11, 9};
#pragma unroll
  for (int level = 0; level < 3; ++level) {
    const int shift = kShifts[level], bins = 1 << kBits[level];
    __syncthreads();
    for (int i = threadIdx.x; i < kBins; i += kPickThreads) counts[i] = low[i] = high[i] = 0;
    __syncthreads();
#pragma unroll 8
    for (int i = threadIdx.x; i < count; i += kPickThreads) {
      const float x = mass(i);
      const uint32_t bits = __float_as_uint(x);
      if (level > 0 && bits >> (shift + kBits[level]) != least >> (shift + kBits[level])) continue;
      const int bin = static_cast<int>(bits >> shift) & (bins - 1);
      const auto units = static_cast<uint64_t>(static_cast<double>(x) * kUnit);
      const auto part = static_cast<uint32_t>(units);
      atomicAdd(counts + bin, 1u);
      const uint32_t carry = atomicAdd(low + bin, part) > ~part;
      if (const uint32_t upper = static_cast<uint32_t>(units >> 32) + carry; upper != 0) atomicAdd(high + bin, upper);
    }
    __syncthreads();
    // From the largest bin down: the first with which it is enough. Each thread has two of them.
    const auto bin_of = [&](int i) { return kBins - 1 - 2 * static_cast<int>(threadIdx.x) - i; };
    const auto in_bin = [&](int i) {
      return Reached{static_cast<int>(counts[bin_of(i)]),
                     static_cast<uint64_t>(high[bin_of(i)]) << 32 | low[bin_of(i)]};
    };
    Reached sum = above + before_this(in_bin(0) + in_bin(1));
    if (level == 0) {
      if (threadIdx.x == kPickThreads - 1) found_above = sum + in_bin(0) + in_bin(1);
      __syncthreads();
      wanted = static_cast<double>(share) * (already + as_mass(found_above.mass));
      __syncthreads();
    }
    const auto enough = [&](Reached r) {
      return r.count >= most || (share < 1 && already + as_mass(r.mass) >= wanted);
    };
    for (int i = 0; i < 2; ++i) {
      const Reached with = sum + in_bin(i);
      if (bin_of(i) < bins && !enough(sum) && enough(with)) {
        found_bin = bin_of(i);
        found_above = sum;
      }
      sum = with;
    }
    // Enough without any: the largest bin, of which nothing will be taken.
    if (threadIdx.x == 0 && enough(above)) {
      found_bin = bins - 1;
      found_above = above;
    }
    __syncthreads();
    least |= static_cast<uint32_t>(found_bin) << shift;
    above = found_above;
  }
  int ties = most - above.count;
  const double held = already + as_mass(above.mass);
  if (share < 1 && least > 0) {
    const double needed = ceil((wanted - held) / static_cast<double>(__uint_as_float(least)));
    ties = min(ties, max(0, static_cast<int>(fmin(needed, 2e9))));
  }
  if (share < 1 && held >= wanted) ties = 0;
  // Each thread takes from a run of its own.
  const int run = (count + kPickThreads - 1) / kPickThreads;
  const int begin = min(count, static_cast<int>(threadIdx.x) * run), end = min(count, begin + run);
  Reached own{0, 0};  // larger ones; ties
#pragma unroll 8
  for (int i = begin; i < end; ++i) {
    const uint32_t bits = __float_as_uint(mass(i));
    own.count += bits > least;
    own.mass += bits == least;
  }
  const Reached before = before_this(own);
  int tied = static_cast<int>(before.mass), taken = before.count + min(tied, ties);
  for (int i = begin; i < end; ++i) {
    const uint32_t bits = __float_as_uint(mass(i));
    const bool lucky = bits == least && tied++ < ties;
    if (bits > least || lucky) take(i, taken++);
  }
  return min(count, above.count + max(0, min(ties, count - above.count)));
}

// Columns (y = 0) or diagonals (y = 1) of one list.
__global__ void __launch_bounds__(kPickThreads) pick_kernel(const __grid_constant__ SlashParams args) {
  const int heads = args.select.shape.query_heads, head = blockIdx.x % heads;
  const SlashSequence sequence = args.sequences[blockIdx.x / heads];
  __shared__ PickRoom room;
  if (blockIdx.y == 0) {
    const GatheredList list = args.gathered.lists[sequence.list + head];
    int32_t* columns = args.columns + list.columns;
    const float* chunks = ChunkValues(args, sequence, head, 0).keys;
    const int taken = fewest_reaching(
        room, sequence.tokens, args.vertical_coverage, sequence.vertical_cap, 0.0,
        [&](int i) { return chunks[static_cast<int64_t>(i / kSlashChunk) * kSlashChunkFloats + i % kSlashChunk]; },
        [&](int i, int at) { columns[at] = i; });
    for (int i = taken + threadIdx.x; i < list.pieces * kGatheredPiece; i += kPickThreads) columns[i] = kNoColumn;
    return;
  }
  const int64_t first = sequence.first_block + static_cast<int64_t>(head) * sequence.blocks;
  float* distances = args.distances + first;
  uint8_t* slashes = args.slashes + first;
  const int per_block = args.select.select_block / kSlashChunk;
  for (int distance = threadIdx.x; distance < sequence.blocks; distance += kPickThreads) {
    float sum = 0;
    for (int which = 0; which < 2; ++which) {
      const int block = sequence.blocks - 1 - which - distance;
      for (int c = block * per_block; block >= 0 && c < min((block + 1) * per_block, sequence.chunks); ++c)
        sum += ChunkValues(args, sequence, head, c).blocks[which];
    }
    distances[distance] = sum;
    slashes[distance] = distance == 0;
  }
  __syncthreads();
  fewest_reaching(
      room, sequence.blocks - 1, args.slash_coverage, max(0, sequence.slash_cap - 1), static_cast<double>(distances[0]),
      [&](int i) { return distances[i + 1]; }, [&](int i, int) { slashes[i + 1] = 1; });
}

// A warp a query block: its key blocks, and which columns lie outside of them.
__global__ void __launch_bounds__(32 * kWarps)
    lists_kernel(const __grid_constant__ SlashParams args, const __grid_constant__ ChoiceArguments choice) {
  extern __shared__ __align__(16) uint8_t flags[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, index = blockIdx.x * kWarps + warp;
  if (index >= choice.count) return;
  const SelectItem item = choice.items[index];
  const GatheredList list = args.gathered.lists[item.pool];
  const SlashSequence sequence = args.sequences[item.pool / args.select.shape.query_heads];
  const uint8_t* slashes = args.slashes + sequence.first_block + static_cast<int64_t>(list.head) * sequence.blocks;
  uint8_t* first = flags + warp * choice.warp_bytes;
  const int own_end = (item.position + item.tokens - 1) / choice.select_block + 1;
  for (int j = lane; j < item.competing; j += 32) {
    bool listed = j < item.sinks || j >= item.competing - item.local;
    for (int own = item.competing; own < own_end; ++own) listed = listed || slashes[own - j] != 0;
    first[j] = listed ? 0 : kUnchosen;
  }
  __syncwarp();
  emit(choice, item, first, lane);
  const int row = item.position / choice.query_block;
  unsigned seen = 0;
  for (int piece = 0; piece < list.pieces; ++piece) {
    uint64_t bits = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = args.columns[list.columns + piece * kGatheredPiece + half * 32 + lane];
      const int block = column / choice.select_block;
      const bool alone = column != kNoColumn && block < item.competing && first[block] == kUnchosen;
      bits |= static_cast<uint64_t>(__ballot_sync(~0u, alone)) << (32 * half);
    }
    if (lane == 0) args.bits[list.bits + static_cast<int64_t>(row) * list.pieces + piece] = bits;
    seen += __popcll(bits);
  }
  if (lane == 0 && choice.chosen != nullptr)
    atomicAdd(choice.chosen + 2 * item.length_class + 1, static_cast<unsigned long long>(seen) * item.tokens);
}

}  // namespace

void select_vertical_slash(const SlashParams& p, Precision precision, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  slash_masses(p, precision, cuda_stream);
  pick_kernel<<<dim3(p.lists, 2), kPickThreads, 0, cuda_stream>>>(p);
  check(cudaGetLastError(), "choice of columns and diagonals");
  const int items = p.select.batches[0].item_count, warp_bytes = (p.max_blocks + 63) / 64 * 64;
  allow_shared_memory(lists_kernel, kWarps * warp_bytes, "shared memory of the lists");
  lists_kernel<<<(items + kWarps - 1) / kWarps, 32 * kWarps, kWarps * warp_bytes, cuda_stream>>>(
      p, choice_arguments(p.select, 0, items, warp_bytes));
  check(cudaGetLastError(), "lists of columns and diagonals");
}

}  // namespace sb::gpu
