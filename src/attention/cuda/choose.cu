#include "attention/cuda/choose.cuh"

#include <algorithm>

#include "attention/cuda/check.cuh"
#include "attention/cuda/early.cuh"
#include "attention/cuda/emit.cuh"
#include "attention/cuda/pick.cuh"

namespace sb::gpu {
namespace {

constexpr float kLog2e = 1.4426950408889634f;

// The choices of one warp for the tokens of a query block, one after the other. Lane l looks after blocks 64·i + 2·l
// and the next. A block's key is its mass, then its number: larger mass first, ties to the lower block, and no two keys
// equal. Masses are held in registers, `kPairs` twice two; with kPairs = 0 in shared memory, for any number. kCount:
// the number of choices is known beforehand (topk; those that fit registers are a Picker's).
template <int kPairs, bool kCount>
struct Chooser {
  static constexpr int kHeld = kPairs > 0 ? kPairs : 1;
  static_assert(!kCount || kPairs == 0);
  const ChoiceArguments& args;
  const SelectItem& item;
  uint8_t* first;           // of each block, the token that chose it
  uint32_t* shared_masses;  // kPairs = 0 only
  int lane;
  int chosen = 0, candidates = 0;
  uint32_t held[kHeld];
  uint32_t taken[(2 * kHeld + 31) / 32] = {};  // bit 2·i + e: chosen, or does not exist

  __device__ __forceinline__ uint32_t pair(int i) const {
    if constexpr (kPairs > 0) return held[i];
    return shared_masses[32 * i + lane];
  }
  __device__ __forceinline__ void set_pair(int i, uint32_t value) {
    if constexpr (kPairs > 0)
      held[i] = value;
    else
      shared_masses[32 * i + lane] = value;
  }
  __device__ __forceinline__ bool is_taken(int i, int e) const {
    if constexpr (kPairs > 0) return (taken[(2 * i + e) / 32] >> ((2 * i + e) % 32) & 1) != 0;
    const int j = 64 * i + 2 * lane + e;
    return j >= item.competing || first[j] != kUnchosen;
  }
  __device__ __forceinline__ void take(int i, int e, int row) {
    if constexpr (kPairs > 0) taken[(2 * i + e) / 32] |= 1u << ((2 * i + e) % 32);
    first[64 * i + 2 * lane + e] = static_cast<uint8_t>(row);
  }
  // The block that a key is of; what a token adds is mostly one.
  __device__ __forceinline__ void take_one(uint32_t key, int row) {
    if (key == 0) return;
    const int j = 0xFFFF - static_cast<int>(key & 0xFFFF);
    if (lane == j % 64 / 2) first[j] = static_cast<uint8_t>(row);
    ++chosen;
  }
  __device__ __forceinline__ uint32_t key(int i, int e) const {
    const uint32_t mass = e == 0 ? pair(i) << 16 : pair(i) & 0xFFFF0000u;
    return is_taken(i, e) ? 0 : mass | static_cast<uint32_t>(0xFFFF - (64 * i + 2 * lane + e));
  }
  // Calls body(i) for all pairs of this lane.
  template <typename Body>
  __device__ __forceinline__ void each_pair(Body body) const {
    if constexpr (kPairs > 0) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i)
        if (64 * i < item.competing) body(i);
    } else {
      for (int i = 0; 64 * i < item.competing; ++i) body(i);
    }
  }
  // Calls body(i, e) for all blocks of this lane.
  template <typename Body>
  __device__ __forceinline__ void each(Body body) const {
    each_pair([&](int i) {
      body(i, 0);
      body(i, 1);
    });
  }

  __device__ void begin() {
    candidates = item.competing - item.sinks - item.local;
    each([&](int i, int e) {
      const int j = 64 * i + 2 * lane + e;
      const bool forced = j < item.sinks || j >= item.competing - item.local;
      if (j < item.competing) first[j] = forced ? 0 : kUnchosen;
      if constexpr (kPairs > 0)
        if (forced) taken[(2 * i + e) / 32] |= 1u << ((2 * i + e) % 32);  // those past the end too
    });
    __syncwarp();
  }

  // Of the index-th token that chooses.
  __device__ __forceinline__ uint32_t load(int index, int i) const {
    return args.two_masses(item.masses + static_cast<int64_t>(index) * item.stride + 64 * i + 2 * lane);
  }

  // Masses of the whole query block: the sum over its tokens.
  __device__ void load_sum() {
    each_pair([&](int i) {
      float sum[2] = {0, 0};
      for (int row = 0; row < item.tokens; ++row) {
        const uint32_t two = load(row, i);
        sum[0] += exp2f(mass_of(two & 0xFFFF));
        sum[1] += exp2f(mass_of(two >> 16));
      }
      const __half2 mass = __floats2half2_rn(__log2f(sum[0]), __log2f(sum[1]));
      set_pair(i, ordered(*reinterpret_cast<const uint32_t*>(&mass)));
    });
  }

  __device__ uint32_t best() const {
    uint32_t top = 0;
    each([&](int i, int e) { top = max(top, key(i, e)); });
    return __reduce_max_sync(~0u, top);
  }

  enum Verdict { kTooFew, kEnough, kJustRight };
  // A threshold that is just right, or the largest one for which there are enough; that holds for all thresholds below
  // one of the keys.
  template <typename Enough>
  __device__ uint32_t search(uint32_t top, Enough enough) const {
    // Bit by bit, below what the largest and the least key share.
    uint32_t least = ~0u;
    each([&](int i, int e) {
      const uint32_t k = key(i, e);
      if (k != 0) least = min(least, k);
    });
    least = __reduce_min_sync(~0u, least);
    int bit = 31 - __clz(static_cast<int>(top ^ least));
    uint32_t threshold = bit < 0 ? top : top & ~((2u << bit) - 1);
    for (; bit >= 0; --bit) {
      const uint32_t trial = threshold | (1u << bit);
      const Verdict verdict = enough(trial);
      if (verdict != kTooFew) threshold = trial;
      if (verdict == kJustRight) break;
    }
    return threshold;
  }
  __device__ int count_from(uint32_t threshold) const {
    unsigned reached = 0;
    each([&](int i, int e) { reached += key(i, e) >= threshold; });
    return static_cast<int>(__reduce_add_sync(~0u, reached));
  }
  // The key of rank `rank` among the free ones.
  __device__ uint32_t ranked(uint32_t top, int rank) const {
    if (rank <= 1) return top;
    return search(top, [&](uint32_t trial) {
      const int count = count_from(trial);
      return count < rank ? kTooFew : count == rank ? kJustRight : kEnough;
    });
  }
  // Masses of the free blocks from a threshold on.
  __device__ float held_from(uint32_t threshold) const {
    float sum = 0;
    each([&](int i, int e) {
      const uint32_t k = key(i, e);
      if (k >= threshold) sum += exp2f(mass_of(k >> 16));
    });
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    return sum;
  }

  // What token `row` chooses, at most `room` blocks.
  __device__ void choose(int room, int row) {
    const uint32_t top = best();
    uint32_t threshold = top;
    if constexpr (kCount) {
      if (room <= 8) {  // one after the other is quicker than a search
        take_one(top, row);
        for (int i = 1; i < room; ++i) take_one(best(), row);
        return;
      }
      threshold = ranked(top, room);
    } else if (args.pattern == SelectionPattern::topp) {
      float all = 0, held = 0;
      each([&](int i, int e) {
        if (64 * i + 2 * lane + e >= item.competing) return;
        const float m = exp2f(mass_of(e == 0 ? pair(i) & 0xFFFF : pair(i) >> 16));
        all += m;
        if (is_taken(i, e)) held += m;
      });
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        all += __shfl_xor_sync(~0u, all, step);
        held += __shfl_xor_sync(~0u, held, step);
      }
      const float wanted = args.coverage * all - held;
      if (wanted <= 0) return;
      threshold = search(top, [&](uint32_t trial) {
        return count_from(trial) >= room || held_from(trial) >= wanted ? kEnough : kTooFew;
      });
    } else {
      const __half limit = __float2half_rn(args.thresholds[item.length_class] * kLog2e);
      const uint32_t worth = ordered(__half_as_ushort(limit)) << 16;
      threshold = max(ranked(top, room), worth);
      const int least = min((item.total / 2 + 3) / 4, room);
      if (row == 0 && least > 0 && count_from(threshold) < least) threshold = ranked(top, least);
    }
    unsigned marked = 0;
    each([&](int i, int e) {
      const uint32_t k = key(i, e);
      if (k < threshold || k == 0) return;
      take(i, e, row);
      ++marked;
    });
    chosen += static_cast<int>(__reduce_add_sync(~0u, marked));
  }

  __device__ void run() {
    begin();
    if (args.lookahead) {
      load_sum();
      choose(min(item.total, candidates), 0);
      __syncwarp();
      return;
    }
    // Tokens that have nothing to add have no masses either.
    constexpr bool all = !kCount;
    Allowance allowance(item.first, item.total, args.query_block);
    int row = 0, index = 0;
    const auto next_token = [&] {
      do {
        ++row;
        allowance.next();
      } while (row < item.tokens && !all && !allowance.grew);
    };
    if (!all && !allowance.grew) next_token();
    each_pair([&](int i) { set_pair(i, load(0, i)); });
    while (row < item.tokens) {
      const int token = row, room = min(allowance.allowed, candidates) - chosen;
      next_token();
      ++index;
      // The next token's masses are on their way while this one chooses.
      constexpr bool kAhead = kPairs > 0;
      uint32_t next[kHeld];
      if constexpr (kAhead)
        if (row < item.tokens) each_pair([&](int i) { next[i] = load(index, i); });
      if (room > 0) choose(room, token);
      if (row >= item.tokens) break;
      each_pair([&](int i) {
        if constexpr (kAhead)
          held[i] = next[i];
        else
          set_pair(i, load(index, i));
      });
    }
    __syncwarp();
  }
};

template <int kPairs, bool kCount>
__global__ void __launch_bounds__(32 * kWarps, kPairs == 16 ? 2 : 4)
    choose_kernel(const __grid_constant__ ChoiceArguments args) {
  extern __shared__ __align__(16) uint8_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int index = blockIdx.x * (blockDim.x / 32) + warp;
  launch_dependents();
  if (index >= args.count) return;
  const SelectItem item = args.items[index];
  uint8_t* first = nullptr;
  wait_for_dependencies();
  if (!item.everything && item.total > 0 && item.competing > item.sinks + item.local) {
    first = shared + warp * args.warp_bytes;
    if constexpr (kCount && kPairs > 0)
      Picker<kPairs>{args, item, first, lane}.run();
    else
      Chooser<kPairs, kCount>{args, item, first, reinterpret_cast<uint32_t*>(first + args.warp_bytes / 3), lane}.run();
  }
  emit(args, item, first, lane);
}

template <bool kCount>
auto kernel_for(int chunks) {
  return chunks <= 4    ? choose_kernel<4, kCount>
         : chunks <= 8  ? choose_kernel<8, kCount>
         : chunks <= 16 ? choose_kernel<16, kCount>
                        : choose_kernel<0, kCount>;
}

// Eight columns a thread block. Each warp takes a part of the query blocks, a lane one of them at a time and all eight
// key blocks of it in one load; it counts first, and writes when it knows what comes before. Where a column begins
// follows from the counts that the first kernel leaves; in the second, which counts beside the first, every thread
// block sums those before its own, which is quicker than a kernel between them.
constexpr int kColumnWarps = 16;
constexpr int kColumnTurn = 4;  // loads of a lane at a time

struct ColumnArguments {
  const SelectGroup* groups;
  int32_t count;
  const uint8_t* map;
  int32_t* counts;
  int32_t* offsets;
  uint32_t* entries;
};

template <bool kWrites>
__global__ void __launch_bounds__(32 * kColumnWarps) columns_kernel(const __grid_constant__ ColumnArguments args) {
  __shared__ int32_t sums[kColumnWarps], parts[kColumnWarps][kGroupColumns];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if constexpr (!kWrites) launch_dependents();
  const SelectGroup group = args.groups[blockIdx.x];

  // Query blocks of this warp, whole multiples of 32 from the first that can see the first of the key blocks.
  const int rounds = (group.query_blocks + 32 * kColumnWarps - 1) / (32 * kColumnWarps);
  const int begin = group.first_block + warp * rounds * 32 + lane, end = group.first_block + group.query_blocks;
  // Who chose the eight key blocks, a byte each. Beyond what a query block can see the map holds nothing.
  uint64_t rows[kColumnTurn];
  const auto read = [&](int round) {
#pragma unroll
    for (int i = 0; i < kColumnTurn; ++i) {
      const int block = begin + 32 * (round + i);
      rows[i] = ~uint64_t{0};
      if (round + i < rounds && block < end)
        rows[i] = *reinterpret_cast<const uint64_t*>(args.map + group.map + static_cast<int64_t>(block) * group.stride);
    }
#pragma unroll
    for (int i = 0; i < kColumnTurn; ++i) {
      // The keys of a block are a power of two.
      const int tokens = (begin + 32 * (round + i) + 1) * group.query_block;
      const int visible = ((tokens + group.block - 1) >> (31 - __clz(group.block))) - group.key_block;
      const int columns = min(visible, group.columns);
      if (columns < kGroupColumns) rows[i] |= columns <= 0 ? ~uint64_t{0} : ~uint64_t{0} << (8 * columns);
    }
  };
  int own[kGroupColumns] = {};
  for (int round = 0; round < rounds; round += kColumnTurn) {
    read(round);
#pragma unroll
    for (int i = 0; i < kColumnTurn; ++i)
#pragma unroll
      for (int c = 0; c < kGroupColumns; ++c)
        own[c] += __popc(__ballot_sync(~0u, static_cast<uint8_t>(rows[i] >> (8 * c)) != kUnchosen));
  }
#pragma unroll
  for (int c = 0; c < kGroupColumns; ++c)
    if (lane == c) parts[warp][c] = own[c];
  if constexpr (!kWrites) {
    __syncthreads();
    if (threadIdx.x >= group.columns) return;
    int sum = 0;
#pragma unroll
    for (int w = 0; w < kColumnWarps; ++w) sum += parts[w][threadIdx.x];
    args.counts[group.column + threadIdx.x] = sum;
    return;
  }
  wait_for_dependencies();
  int before = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < group.column; i += 32 * kColumnWarps) before += args.counts[i];
  before = static_cast<int>(__reduce_add_sync(~0u, static_cast<unsigned>(before)));
  if (lane == 0) sums[warp] = before;
  __syncthreads();
  int at[kGroupColumns];
  int start = 0;
#pragma unroll
  for (int w = 0; w < kColumnWarps; ++w) start += sums[w];
#pragma unroll
  for (int c = 0; c < kGroupColumns; ++c) {
    // A lane holds what one warp counted.
    const int part = lane < kColumnWarps ? parts[lane][c] : 0;
    at[c] = start + static_cast<int>(__reduce_add_sync(~0u, static_cast<unsigned>(lane < warp ? part : 0)));
    if (threadIdx.x == 0 && c < group.columns) args.offsets[group.column + c] = at[c];
    start += static_cast<int>(__reduce_add_sync(~0u, static_cast<unsigned>(part)));
    if (threadIdx.x == 0 && c < group.columns && group.column + c == args.count - 1) args.offsets[args.count] = start;
  }
  for (int round = 0; round < rounds; round += kColumnTurn) {
    if (rounds > kColumnTurn) read(round);
#pragma unroll
    for (int i = 0; i < kColumnTurn; ++i) {
#pragma unroll
      for (int c = 0; c < kGroupColumns; ++c) {
        const auto by = static_cast<uint8_t>(rows[i] >> (8 * c));
        const uint32_t kept = __ballot_sync(~0u, by != kUnchosen);
        if (by != kUnchosen)
          args.entries[at[c] + __popc(kept & ((1u << lane) - 1))] = list_entry(begin + 32 * (round + i), by);
        at[c] += __popc(kept);
      }
    }
  }
}

}  // namespace

void choose_blocks(const SelectParams& p, const SelectBatch& batch, cudaStream_t stream, bool early) {
  if (batch.item_count == 0) return;
  if (p.most_mass()) return sum_tile_masses(p, batch, stream);
  const int chunks = std::max((p.max_competing + 63) / 64, 1);
  const bool counted = p.pattern == SelectionPattern::topk || p.pattern == SelectionPattern::window;
  const auto kernel = counted ? kernel_for<true>(chunks) : kernel_for<false>(chunks);
  // Of very long sequences the shared memory holds fewer query blocks.
  const int warp_bytes = 3 * 64 * chunks, warps = std::min(kWarps, most_shared_memory() / warp_bytes);
  if (warps == 0) throw_unsupported("key blocks to choose among", p.max_competing);
  const int shared = warps * warp_bytes;
  allow_shared_memory(kernel, shared, "shared memory of the choice");
  const ChoiceArguments args = choice_arguments(p, batch.item_begin, batch.item_count, warp_bytes);
  const int blocks = (batch.item_count + warps - 1) / warps;
  if (early)
    launch_early(kernel, blocks, 32 * warps, shared, stream, args);
  else
    kernel<<<blocks, 32 * warps, shared, stream>>>(args);
  check(cudaGetLastError(), "choice of key blocks");
}

void finish_choices(const SelectParams& p, cudaStream_t stream) {
  if (p.most_mass()) choose_most_mass(p, stream);
}

void list_columns(const SelectParams& p, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const ColumnArguments args{p.groups, p.column_count, p.map, p.column_counts, p.column_offsets, p.column_entries};
  columns_kernel<false><<<p.group_count, 32 * kColumnWarps, 0, cuda_stream>>>(args);
  if (kernels_start_early())
    launch_early(columns_kernel<true>, p.group_count, 32 * kColumnWarps, 0, cuda_stream, args);
  else
    columns_kernel<true><<<p.group_count, 32 * kColumnWarps, 0, cuda_stream>>>(args);
  check(cudaGetLastError(), "column lists");
}

}  // namespace sb::gpu
