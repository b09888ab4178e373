#include "attention/gpu/select/select_steps.cuh"

#include <algorithm>

#include "attention/gpu/launch/check.cuh"
#include "attention/gpu/launch/early.cuh"
#include "attention/gpu/select/register_select.cuh"
#include "attention/gpu/select/row_lists.cuh"
#include "device/kernel.cuh"

namespace sb::gpu {
namespace {

// The selections of one warp for the tokens of a query block, one after the other, among so many blocks that registers
// do not hold their masses (else a RegisterSelect's). Lane l looks after blocks 64·i + 2·l and the next. A block's key
// is its mass, then its number: larger mass first, ties to the lower block, and no two keys equal. A token's masses lie
// in shared memory, or, where that has no room, in the place of the query block's first. kRule: what is known of them.
template <SelectRule kRule>
struct MemorySelect {
  static constexpr bool kCount = kRule == SelectRule::topk;  // the number of selections is known beforehand
  const SelectArguments& args;
  const SelectItem& item;
  uint8_t* first;    // of each block, the token that selected it
  uint32_t* masses;  // [pair][lane]
  int lane;
  int selected = 0, candidates = 0;

  __device__ __forceinline__ uint32_t pair(int i) const { return masses[32 * i + lane]; }
  __device__ __forceinline__ void set_pair(int i, uint32_t value) { masses[32 * i + lane] = value; }
  __device__ __forceinline__ bool is_taken(int i, int e) const {
    const int j = 64 * i + 2 * lane + e;
    return j >= item.competing || first[j] != kUnselected;
  }
  __device__ __forceinline__ void take(int i, int e, int row) {
    first[64 * i + 2 * lane + e] = static_cast<uint8_t>(row);
  }
  // The block that a key is of; what a token adds is mostly one.
  __device__ __forceinline__ void take_one(uint32_t key, int row) {
    if (key == 0) return;
    const int j = 0xFFFF - static_cast<int>(key & 0xFFFF);
    if (lane == j % 64 / 2) first[j] = static_cast<uint8_t>(row);
    ++selected;
  }
  __device__ __forceinline__ uint32_t key(int i, int e) const {
    const uint32_t mass = e == 0 ? pair(i) << 16 : pair(i) & 0xFFFF0000u;
    return is_taken(i, e) ? 0 : mass | static_cast<uint32_t>(0xFFFF - (64 * i + 2 * lane + e));
  }
  // Calls body(i) for all pairs of this lane.
  template <typename Body>
  __device__ __forceinline__ void each_pair(Body body) const {
    for (int i = 0; 64 * i < item.competing; ++i) body(i);
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
      if (j < item.competing) first[j] = forced ? 0 : kUnselected;
    });
    __syncwarp();
  }

  // Of the index-th token that selects.
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

  // What token `row` selects, at most `room` blocks.
  __device__ void select(int room, int row) {
    const uint32_t top = best();
    uint32_t threshold = top;
    if constexpr (kCount) {
      if (room <= 8) {  // one after the other is quicker than a search
        take_one(top, row);
        for (int i = 1; i < room; ++i) take_one(best(), row);
        return;
      }
      threshold = ranked(top, room);
    } else if constexpr (kRule == SelectRule::topp) {
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
      threshold = max(ranked(top, room), args.worth(item.sequence));
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
    selected += static_cast<int>(__reduce_add_sync(~0u, marked));
  }

  __device__ void run() {
    begin();
    if (args.lookahead) {
      load_sum();
      select(min(item.total, candidates), 0);
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
    for (; row < item.tokens; ++index) {
      const int token = row, room = min(allowance.allowed, candidates) - selected;
      next_token();
      if (room <= 0) continue;
      each_pair([&](int i) { set_pair(i, load(index, i)); });
      select(room, token);
    }
    __syncwarp();
  }
};

// kPairs: of masses that a lane holds in registers; 0: any number, not there. kInPlace: nor in shared memory.
template <int kPairs, SelectRule kRule, bool kInPlace>
__global__ void __launch_bounds__(32 * kWarps, kPairs == 4    ? 8
                                               : kPairs == 8  ? 5
                                               : kPairs == 16 ? 2
                                                              : 4)
    select_kernel(const __grid_constant__ SelectArguments args) {
  SB_DYNAMIC_SHARED(uint8_t, shared, 16);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int index = blockIdx.x * (blockDim.x / 32) + warp;
  launch_dependents();
  SelectItem item;
  Counted counted{};
  if (index < args.count) {
    item = args.items[index];
    uint8_t* first = nullptr;
    wait_for_dependencies();
    if (!item.everything && item.total > 0 && item.competing > item.sinks + item.local) {
      first = shared + warp * args.warp_bytes;
      if constexpr (kPairs > 0) {
        RegisterSelect<kPairs> selecting{args, item, first, lane};
        if constexpr (kRule == SelectRule::topk)
          selecting.run_topk();
        else if constexpr (kRule == SelectRule::topp)
          selecting.run_topp();
        else
          selecting.run_mass();
      } else {
        uint32_t* masses = kInPlace ? reinterpret_cast<uint32_t*>(args.masses + item.masses)
                                    : reinterpret_cast<uint32_t*>(first + args.warp_bytes / 3);
        MemorySelect<kRule>{args, item, first, masses, lane}.run();
      }
    }
    counted = write_row_list(args, item, first, lane);
  }
  add_counted(args, index < args.count ? item.sequence : -1, counted);
}

template <SelectRule kRule>
auto kernel_for(int chunks, bool in_place) {
  return chunks <= 4    ? select_kernel<4, kRule, false>
         : chunks <= 8  ? select_kernel<8, kRule, false>
         : chunks <= 16 ? select_kernel<16, kRule, false>
         : in_place     ? select_kernel<0, kRule, true>
                        : select_kernel<0, kRule, false>;
}

// Eight columns per thread block. Each warp takes a part of the query blocks, a lane one of them at a time and all
// eight key blocks of it in one load; it counts first, and writes when it knows what comes before. Where a column
// begins follows from the counts that the first kernel leaves; in the second, which counts beside the first, every
// thread block sums those before its own, which is quicker than a kernel between them.
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
  SB_SHARED(int32_t, sums, [kColumnWarps]);
  SB_SHARED(int32_t, parts, [kColumnWarps][kGroupColumns]);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if constexpr (!kWrites) launch_dependents();
  const SelectGroup group = args.groups[blockIdx.x];

  // Query blocks of this warp, whole multiples of 32 from the first that can see the first of the key blocks.
  const int rounds = (group.query_blocks + 32 * kColumnWarps - 1) / (32 * kColumnWarps);
  const int begin = group.first_block + warp * rounds * 32 + lane, end = group.first_block + group.query_blocks;
  // Who selected the eight key blocks, a byte each. Beyond what a query block can see the map holds nothing.
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
        own[c] += __popc(__ballot_sync(~0u, static_cast<uint8_t>(rows[i] >> (8 * c)) != kUnselected));
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
        const uint32_t kept = __ballot_sync(~0u, by != kUnselected);
        if (by != kUnselected)
          args.entries[at[c] + __popc(kept & ((1u << lane) - 1))] = list_entry(begin + 32 * (round + i), by);
        at[c] += __popc(kept);
      }
    }
  }
}

}  // namespace

void select_blocks(const SelectParams& p, const SelectBatch& batch, cudaStream_t stream, bool early) {
  if (batch.item_count == 0) return;
  if (p.most_mass()) return sum_tile_masses(p, batch, stream, early);
  const int chunks = std::max((p.max_competing + 63) / 64, 1);
  // A byte a block of shared memory, and beyond what registers hold two for its mass, where there is room.
  const bool in_place = chunks > 16 && 3 * 64 * chunks > select_memory(p);
  const int warp_bytes = (chunks > 16 && !in_place ? 3 : 1) * 64 * chunks, warps = select_warps(p, warp_bytes);
  const auto kernel = p.pattern == SelectionPattern::topp   ? kernel_for<SelectRule::topp>(chunks, in_place)
                      : p.pattern == SelectionPattern::mass ? kernel_for<SelectRule::mass>(chunks, in_place)
                                                            : kernel_for<SelectRule::topk>(chunks, in_place);
  const int shared = warps * warp_bytes;
  allow_shared_memory(kernel, shared, "shared memory of the selection");
  const SelectArguments args = select_arguments(p, batch.item_begin, batch.item_count, warp_bytes);
  const int blocks = (batch.item_count + warps - 1) / warps;
  if (early)
    launch_early(kernel, {blocks, 32 * warps, shared, stream}, args);
  else
    launch_kernel(kernel, {blocks, 32 * warps, shared, stream}, args);
  check(cudaGetLastError(), "selection of key blocks");
}

void finish_selection(const SelectParams& p, cudaStream_t stream) {
  if (p.most_mass()) select_most_mass(p, stream);
}

void list_columns(const SelectParams& p, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const ColumnArguments args{p.groups, p.column_count, p.map, p.column_counts, p.column_offsets, p.column_entries};
  launch_kernel(columns_kernel<false>, {p.group_count, 32 * kColumnWarps, 0, cuda_stream}, args);
  launch_after(columns_kernel<true>, {p.group_count, 32 * kColumnWarps, 0, cuda_stream}, args);
  check(cudaGetLastError(), "column lists");
}

}  // namespace sb::gpu
