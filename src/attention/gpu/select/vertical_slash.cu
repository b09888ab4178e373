#include "attention/gpu/select/vertical_slash.h"

#include "attention/gpu/launch/check.cuh"
#include "attention/gpu/launch/early.cuh"
#include "attention/gpu/select/row_lists.cuh"
#include "attention/gpu/select/slash_masses.cuh"
#include "device/kernel.cuh"

namespace sb::gpu {
namespace {

constexpr int kSelectThreads = 1024;

// Masses as integers, so that sums do not depend on their order.
constexpr float kUnit = 0x1p50f;  // all masses together are at most 64
__device__ double as_mass(uint64_t sum) {
  return static_cast<double>(sum) / static_cast<double>(kUnit);
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
  SB_SHARED(Reached, warps, [kSelectThreads / 32]);
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
// first, ties to the first. four(i): masses 4·i to 4·i + 3, whatever is beyond the last. Calls take(i, how many were
// taken before it). Masses are not negative, so that their bits order them: the least that is taken is found up to
// eleven bits at a time between the least mass and the largest, each time by how many and how much lies above; where
// few are left, among those.
constexpr int kBins = 2048, kBinBits = 11;
struct SelectRoom {
  uint32_t counts[kBins], low[kBins], high[kBins];
  uint32_t least[kSelectThreads / 32], most[kSelectThreads / 32];
  int found_bin, inside;
  uint32_t found;
  Reached found_above;
};
__device__ Reached one_mass(uint32_t bits) {
  return {1, static_cast<uint64_t>(__uint_as_float(bits) * kUnit)};
}

template <typename Four, typename Take>
__device__ int fewest_reaching(SelectRoom& room, int count, float share, int most, double already, Four four,
                               Take take) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, fours = (count + 3) / 4;
  most = min(most, count);
  // Calls body(bits) for all masses, each thread for its own.
  const auto each = [&](auto body) {
#pragma unroll 4
    for (int i = threadIdx.x; i < fours; i += kSelectThreads) {
      const float4 x = four(i);
      body(__float_as_uint(x.x));
      if (4 * i + 1 < count) body(__float_as_uint(x.y));
      if (4 * i + 2 < count) body(__float_as_uint(x.z));
      if (4 * i + 3 < count) body(__float_as_uint(x.w));
    }
  };
  uint32_t least = ~0u, largest = 0;
  each([&](uint32_t bits) {
    least = min(least, bits);
    largest = max(largest, bits);
  });
  least = __reduce_min_sync(~0u, least);
  largest = __reduce_max_sync(~0u, largest);
  if (lane == 0) {
    room.least[warp] = least;
    room.most[warp] = largest;
  }
  __syncthreads();
  least = count == 0 ? 0 : __reduce_min_sync(~0u, room.least[lane]);
  largest = __reduce_max_sync(~0u, room.most[lane]);
  Reached above{0, 0};  // those larger than what may still be the least
  int alike = 0;        // and those that may be: in the end all of the same mass
  double wanted = 0;
  const auto enough = [&](Reached r) { return r.count >= most || (share < 1 && already + as_mass(r.mass) >= wanted); };
  int window = max(32 - __clz(static_cast<int>(largest - least)), 1);  // it is one of the 2^window from `least` on
  for (bool begins = true; window > 0; begins = false) {
    const int shift = max(window - kBinBits, 0);
    __syncthreads();
    for (int i = threadIdx.x; i < kBins; i += kSelectThreads) room.counts[i] = room.low[i] = room.high[i] = 0;
    __syncthreads();
    each([&](uint32_t bits) {
      const uint32_t beyond = bits - least;
      if (beyond >> window != 0) return;
      const uint64_t units = one_mass(bits).mass;
      const auto part = static_cast<uint32_t>(units);
      const uint32_t bin = beyond >> shift;
      atomicAdd(room.counts + bin, 1u);
      const uint32_t carry = atomicAdd(room.low + bin, part) > ~part;
      if (const uint32_t upper = static_cast<uint32_t>(units >> 32) + carry; upper != 0)
        atomicAdd(room.high + bin, upper);
    });
    __syncthreads();
    // From the largest bin down: the first with which it is enough. Each thread has two of them.
    const auto bin_of = [&](int i) { return kBins - 1 - 2 * static_cast<int>(threadIdx.x) - i; };
    const auto in_bin = [&](int i) {
      return Reached{static_cast<int>(room.counts[bin_of(i)]),
                     static_cast<uint64_t>(room.high[bin_of(i)]) << 32 | room.low[bin_of(i)]};
    };
    Reached sum = above + before_this(in_bin(0) + in_bin(1));
    if (begins) {
      if (threadIdx.x == kSelectThreads - 1) room.found_above = sum + in_bin(0) + in_bin(1);
      __syncthreads();
      wanted = static_cast<double>(share) * (already + as_mass(room.found_above.mass));
      __syncthreads();
      if (enough(above)) {  // without any: all are below this
        least = ~0u;
        break;
      }
    }
    for (int i = 0; i < 2; ++i) {
      const Reached with = sum + in_bin(i);
      if (!enough(sum) && enough(with)) {
        room.found_bin = bin_of(i);
        room.found_above = sum;
        room.inside = with.count - sum.count;
      }
      sum = with;
    }
    __syncthreads();
    least += static_cast<uint32_t>(room.found_bin) << shift;
    above = room.found_above;
    alike = room.inside;
    window = shift;
    if (window == 0 || room.inside > kSelectThreads) continue;
    // Few: each is compared with all.
    uint32_t* few = room.low;
    const int inside = room.inside;
    __syncthreads();
    if (threadIdx.x == 0) room.inside = 0;
    __syncthreads();
    each([&](uint32_t bits) {
      if ((bits - least) >> window == 0) few[atomicAdd(&room.inside, 1)] = bits;
    });
    __syncthreads();
    if (threadIdx.x < inside) {
      const uint32_t own = few[threadIdx.x];
      Reached larger = above, same{0, 0};
      for (int i = 0; i < inside; ++i) {
        if (few[i] > own) larger = larger + one_mass(few[i]);
        if (few[i] == own) same = same + one_mass(few[i]);
      }
      if (!enough(larger) && enough(larger + same)) {  // only of those that are alike
        room.found = own;
        room.found_above = larger;
        room.inside = same.count;
      }
    }
    __syncthreads();
    least = room.found;
    above = room.found_above;
    alike = room.inside;
    break;
  }
  // Never more than there are: the division below may round to one more, whose place nobody would fill.
  int ties = min(most - above.count, alike);
  const double held = already + as_mass(above.mass);
  if (share < 1 && least > 0) {
    const double needed = ceil((wanted - held) / static_cast<double>(__uint_as_float(least)));
    ties = min(ties, max(0, static_cast<int>(fmin(needed, 2e9))));
  }
  if (share < 1 && held >= wanted) ties = 0;
  // Each warp takes from a run of its own, a lane four at a time.
  const int run = (fours + kSelectThreads - 1) / kSelectThreads * 32;
  const int begin = min(fours, warp * run), end = min(fours, begin + run);
  // Of a lane's four: a bit for each larger one, then for each tie.
  const auto marks = [&](int i) {
    uint32_t found = 0;
    if (i >= end) return found;
    const float4 x = four(i);
    const float values[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const uint32_t bits = __float_as_uint(values[e]);
      if (4 * i + e < count) found |= (bits > least ? 1u << e : 0u) | (bits == least ? 16u << e : 0u);
    }
    return found;
  };
  unsigned own = 0, own_ties = 0;
#pragma unroll 4
  for (int i = begin + lane; i < end; i += 32) {
    const uint32_t found = marks(i);
    own += __popc(found & 15);
    own_ties += __popc(found >> 4);
  }
  own = __reduce_add_sync(~0u, own);
  own_ties = __reduce_add_sync(~0u, own_ties);
  // Of the warps before this one.
  const Reached before = before_this(lane == 0 ? Reached{static_cast<int>(own), own_ties} : Reached{0, 0});
  int larger = __shfl_sync(~0u, before.count, 0), tied = static_cast<int>(__shfl_sync(~0u, before.mass, 0));
  const uint32_t lower = (1u << lane) - 1;
  for (int i = begin; i < end; i += 32) {
    const uint32_t found = marks(i + lane);
    int larger_before = larger, ties_before = tied;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const uint32_t over = __ballot_sync(~0u, (found >> e & 1) != 0),
                     equal = __ballot_sync(~0u, (found >> e & 16) != 0);
      larger_before += __popc(over & lower);
      ties_before += __popc(equal & lower);
      larger += __popc(over);
      tied += __popc(equal);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool over = (found >> e & 1) != 0, equal = (found >> e & 16) != 0;
      if (over || (equal && ties_before < ties)) take(4 * (i + lane) + e, larger_before + min(ties_before, ties));
      larger_before += over;
      ties_before += equal;
    }
  }
  return min(count, above.count + max(0, min(ties, count - above.count)));
}

// Columns (y = 0) or diagonals (y = 1) of one list.
__global__ void __launch_bounds__(kSelectThreads) select_kernel(const __grid_constant__ SlashParams args) {
  const int heads = args.select.shape.query_heads, head = blockIdx.x % heads;
  const SlashSequence sequence = args.sequences[blockIdx.x / heads];
  SB_SHARED(SelectRoom, room);
  launch_dependents();
  wait_for_dependencies();
  if (blockIdx.y == 0) {
    const GatheredList list = args.gathered.lists[sequence.list + head];
    int32_t* columns = args.columns + list.columns;
    const float* chunks = ChunkValues(args, sequence, head, 0).keys;
    const int taken = fewest_reaching(
        room, sequence.tokens, args.vertical_coverage, sequence.vertical_cap, 0.0,
        [&](int i) {
          constexpr int kEach = kSlashChunk / 4;
          return *reinterpret_cast<const float4*>(chunks + static_cast<int64_t>(i / kEach) * kSlashChunkFloats +
                                                  i % kEach * 4);
        },
        [&](int i, int at) { columns[at] = i; });
    for (int i = taken + threadIdx.x; i < list.pieces * kGatheredPiece; i += kSelectThreads) columns[i] = kNoColumn;
    return;
  }
  const int64_t first = sequence.first_block + static_cast<int64_t>(head) * sequence.blocks;
  float* distances = args.distances + first;
  uint8_t* slashes = args.slashes + first;
  const int per_block = args.select.select_block / kSlashChunk;
  for (int distance = threadIdx.x; distance < sequence.blocks; distance += kSelectThreads) {
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
  const int count = sequence.blocks - 1;
  const auto distance = [&](int i) { return i < count ? distances[i + 1] : 0.f; };
  fewest_reaching(
      room, count, args.slash_coverage, max(0, sequence.slash_cap - 1), static_cast<double>(distances[0]),
      [&](int i) {
        return make_float4(distance(4 * i), distance(4 * i + 1), distance(4 * i + 2), distance(4 * i + 3));
      },
      [&](int i, int) { slashes[i + 1] = 1; });
}

// A warp a query block: its key blocks, and which columns lie outside of them.
__global__ void __launch_bounds__(32 * kWarps)
    lists_kernel(const __grid_constant__ SlashParams args, const __grid_constant__ SelectArguments selection) {
  SB_DYNAMIC_SHARED(uint8_t, flags, 16);
  wait_for_dependencies();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, index = blockIdx.x * (blockDim.x / 32) + warp;
  SelectItem item;
  Counted counted{};
  if (index < selection.count) {
    item = selection.items[index];
    const GatheredList list = args.gathered.lists[item.pool];
    const SlashSequence sequence = args.sequences[item.pool / args.select.shape.query_heads];
    const uint8_t* slashes = args.slashes + sequence.first_block + static_cast<int64_t>(list.head) * sequence.blocks;
    uint8_t* first = flags + warp * selection.warp_bytes;
    const int own_end = (item.position + item.tokens - 1) / selection.select_block + 1;
    for (int j = lane; j < item.competing; j += 32) {
      bool listed = j < item.sinks || j >= item.competing - item.local;
      for (int own = item.competing; own < own_end; ++own) listed = listed || slashes[own - j] != 0;
      first[j] = listed ? 0 : kUnselected;
    }
    __syncwarp();
    counted = write_row_list(selection, item, first, lane);
    const int row = item.position / selection.query_block;
    unsigned seen = 0;
#pragma unroll 2
    for (int piece = 0; piece < list.pieces; ++piece) {
      uint64_t bits = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = args.columns[list.columns + piece * kGatheredPiece + half * 32 + lane];
        const int block = column / selection.select_block;
        const bool alone = column != kNoColumn && block < item.competing && first[block] == kUnselected;
        bits |= static_cast<uint64_t>(__ballot_sync(~0u, alone)) << (32 * half);
      }
      if (lane == 0) args.bits[list.bits + static_cast<int64_t>(row) * list.pieces + piece] = bits;
      seen += __popcll(bits);
    }
    counted.pairs += static_cast<unsigned long long>(seen) * item.tokens;
  }
  add_counted(selection, index < selection.count ? item.sequence : -1, counted);
}

}  // namespace

void select_vertical_slash(const SlashParams& p, Precision precision, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  slash_masses(p, precision, cuda_stream);
  launch_after(select_kernel, {dim3(p.lists, 2), kSelectThreads, 0, cuda_stream}, p);
  check(cudaGetLastError(), "selection of columns and diagonals");
  const int items = p.select.batches[0].item_count, warp_bytes = (p.max_blocks + 63) / 64 * 64;
  const int warps = select_warps(p.select, warp_bytes);
  allow_shared_memory(lists_kernel, warps * warp_bytes, "shared memory of the lists");
  launch_after(lists_kernel, {(items + warps - 1) / warps, 32 * warps, warps * warp_bytes, cuda_stream}, p,
               select_arguments(p.select, 0, items, warp_bytes));
  check(cudaGetLastError(), "lists of columns and diagonals");
}

}  // namespace sb::gpu
