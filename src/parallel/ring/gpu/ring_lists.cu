#include "parallel/ring/gpu/ring_lists.h"

#include <algorithm>

#include "attention/gpu/select/row_lists.cuh"
#include "device/cuda_check.h"
#include "device/kernel.cuh"

namespace sb::gpu {
namespace {

constexpr int kWarp = 32;
constexpr int kCutWarps = 4;  // rows of a thread block
constexpr int kScanThreads = 1024;
constexpr int kColumnWarps = 8;
constexpr int kThreads = 256;

// A warp a row: its entries, in the order in which the selection wrote them, sorted by pass.
__global__ void __launch_bounds__(kWarp* kCutWarps) cut_rows_kernel(const __grid_constant__ RingCutParams args) {
  SB_DYNAMIC_SHARED(int32_t, shared);  // of each warp and pass: where its next entry goes
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int number = blockIdx.x * kCutWarps + warp;
  if (number >= args.row_count) return;
  int32_t* next = shared + warp * args.passes;
  const RingRow row = args.rows[number];
  const RingBlock* blocks = args.blocks + row.block;
  for (int c = lane; c < args.passes; c += kWarp) next[c] = 0;
  __syncwarp();
  // Calls body(entry, its block, lanes with the same pass) for all entries, 32 at a time; lanes without one have null.
  const auto each = [&](auto body) {
    for (int base = 0; base < row.capacity; base += kWarp) {
      const uint32_t entry = base + lane < row.capacity ? args.selected[row.list_begin + base + lane] : kNoEntry;
      const RingBlock* block = entry == kNoEntry ? nullptr : blocks + entry_id(entry);
      const int pass = block == nullptr ? -1 : block->pass;
      body(entry, block, __match_any_sync(~0u, pass));
      __syncwarp();
    }
  };
  const uint32_t before = (1u << lane) - 1;
  each([&](uint32_t, const RingBlock* block, uint32_t same) {
    if (block != nullptr && (same & before) == 0) next[block->pass] += __popc(same);
  });
  if (lane == 0) {
    int32_t* begin = args.pass_begin + static_cast<int64_t>(number) * (args.passes + 1);
    int32_t at = row.list_begin;
    for (int c = 0; c < args.passes; ++c) {
      const int32_t count = next[c];
      begin[c] = next[c] = at;
      at += count;
    }
    begin[args.passes] = at;
  }
  __syncwarp();
  each([&](uint32_t entry, const RingBlock* block, uint32_t same) {
    const int32_t at = block == nullptr ? 0 : next[block->pass];
    __syncwarp();
    if (block == nullptr) return;
    args.row_entries[at + __popc(same & before)] = list_entry(block->place, entry_first(entry));
    if ((same & before) == 0) next[block->pass] = at + __popc(same);
  });
}

// Where every column begins, in one thread block.
__global__ void __launch_bounds__(kScanThreads) column_offsets_kernel(const __grid_constant__ RingCutParams args) {
  SB_SHARED(int32_t, sums, [kScanThreads / kWarp]);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int each = (args.columns + kScanThreads - 1) / kScanThreads;
  const int begin = min(static_cast<int>(threadIdx.x) * each, args.columns), end = min(begin + each, args.columns);
  const auto count = [&](int column) {
    const int32_t source = args.column_sources[column];
    return source < 0 ? 0 : args.column_counts[source];
  };
  int32_t own = 0;
  for (int i = begin; i < end; ++i) own += count(i);
  int32_t sum = own;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int32_t left = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += left;
  }
  if (lane == kWarp - 1) sums[warp] = sum;
  __syncthreads();
  int32_t at = sum - own;
  for (int w = 0; w < warp; ++w) at += sums[w];
  for (int i = begin; i < end; ++i) {
    args.column_offsets[i] = at;
    at += count(i);
  }
  if (threadIdx.x == kScanThreads - 1) args.column_offsets[args.columns] = at;
}

// A thread block for up to eight neighbouring key blocks: each warp takes a part of the rows, a lane one of them and
// all key blocks of it in one load; it counts first, and (kWrites) writes when it knows what comes before.
template <bool kWrites>
__global__ void __launch_bounds__(kWarp* kColumnWarps) columns_kernel(const __grid_constant__ RingCutParams args) {
  SB_SHARED(int32_t, parts, [kColumnWarps][kGroupColumns]);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const RingGroup group = args.groups[blockIdx.x];
  const int rounds = (group.rows + kWarp * kColumnWarps - 1) / (kWarp * kColumnWarps);
  const int begin = warp * rounds * kWarp;
  // Who selected the key blocks, a byte each. Beyond what a row can see the map holds nothing.
  const auto read = [&](int i) {
    uint64_t line = ~uint64_t{0};
    if (i < group.rows) {
      const RingRow row = args.rows[group.row + i];
      const int visible = min(row.visible - group.first, group.blocks);
      if (visible > 0) {
        line = *reinterpret_cast<const uint64_t*>(args.map + row.map + group.first);
        if (visible < kGroupColumns) line |= ~uint64_t{0} << (8 * visible);
      }
    }
    return line;
  };
  int own[kGroupColumns] = {};
  for (int i = 0; i < rounds; ++i) {
    const uint64_t line = read(begin + kWarp * i + lane);
#pragma unroll
    for (int c = 0; c < kGroupColumns; ++c)
      own[c] += __popc(__ballot_sync(~0u, static_cast<uint8_t>(line >> (8 * c)) != kUnselected));
  }
#pragma unroll
  for (int c = 0; c < kGroupColumns; ++c)
    if (lane == c) parts[warp][c] = own[c];
  __syncthreads();
  if constexpr (!kWrites) {
    if (threadIdx.x >= group.blocks) return;
    int sum = 0;
    for (int w = 0; w < kColumnWarps; ++w) sum += parts[w][threadIdx.x];
    args.column_counts[group.column + threadIdx.x] = sum;
  } else {
    int at[kGroupColumns], query_block[kGroupColumns];
#pragma unroll
    for (int c = 0; c < kGroupColumns; ++c) {
      at[c] = query_block[c] = 0;
      if (c >= group.blocks) continue;
      const RingBlock block = args.blocks[group.block + c];
      if (block.column < 0) continue;  // nobody here selected it
      query_block[c] = block.query_block;
      at[c] = args.column_offsets[block.column + group.head * args.head_columns[block.pass]];
      for (int w = 0; w < warp; ++w) at[c] += parts[w][c];
    }
    for (int i = 0; i < rounds; ++i) {
      const int row = begin + kWarp * i + lane;
      const uint64_t line = read(row);
#pragma unroll
      for (int c = 0; c < kGroupColumns; ++c) {
        const auto by = static_cast<uint8_t>(line >> (8 * c));
        const uint32_t kept = __ballot_sync(~0u, by != kUnselected);
        if (by != kUnselected)
          args.column_entries[at[c] + __popc(kept & ((1u << lane) - 1))] = list_entry(query_block[c] + row, by);
        at[c] += __popc(kept);
      }
    }
  }
}

__global__ void set_items_kernel(const ForwardItem* items, int32_t count, const int32_t* pass_begin, int passes,
                                 int pass, ForwardItem* to) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= count) return;
  ForwardItem item = items[i];
  const int32_t* begin = pass_begin + static_cast<int64_t>(item.list_begin) * (passes + 1) + pass;
  item.list_begin = begin[0];
  item.list_count = begin[1] - begin[0];
  to[i] = item;
}

__global__ void place_statistics_kernel(const __grid_constant__ PlaceStatistics args) {
  const int64_t number = blockIdx.x, rank = number / args.piece;
  const int32_t place = args.places[number];
  if (place < 0) return;
  const uint32_t* from = args.pieces + rank * args.piece * args.words + number % args.piece * args.from_row;
  uint32_t* to = args.to + place * args.to_row;
  for (int w = threadIdx.x; w < args.words; w += blockDim.x) to[w * args.to_word] = from[w * args.from_word];
}

}  // namespace

void cut_ring_lists(const RingCutParams& p, void* stream) {
  if (p.row_count == 0) return;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  launch_kernel(cut_rows_kernel,
                {(p.row_count + kCutWarps - 1) / kCutWarps, kWarp * kCutWarps, kCutWarps * p.passes * sizeof(int32_t),
                 cuda_stream},
                p);
  SB_CUDA_LAUNCHED();
  if (p.group_count > 0) launch_kernel(columns_kernel<false>, {p.group_count, kWarp * kColumnWarps, 0, cuda_stream}, p);
  SB_CUDA_LAUNCHED();
  launch_kernel(column_offsets_kernel, {1, kScanThreads, 0, cuda_stream}, p);
  SB_CUDA_LAUNCHED();
  if (p.group_count > 0) launch_kernel(columns_kernel<true>, {p.group_count, kWarp * kColumnWarps, 0, cuda_stream}, p);
  SB_CUDA_LAUNCHED();
}

void set_ring_items(const ForwardItem* items, int32_t count, const int32_t* pass_begin, int passes, int pass,
                    ForwardItem* to, void* stream) {
  if (count == 0) return;
  launch_kernel(set_items_kernel, {(count + kThreads - 1) / kThreads, kThreads, 0, static_cast<cudaStream_t>(stream)},
                items, count, pass_begin, passes, pass, to);
  SB_CUDA_LAUNCHED();
}

void place_statistics(const PlaceStatistics& p, void* stream) {
  const int64_t blocks = p.piece * p.ranks;
  if (blocks == 0) return;
  launch_kernel(place_statistics_kernel, {static_cast<unsigned>(blocks), 128, 0, static_cast<cudaStream_t>(stream)}, p);
  SB_CUDA_LAUNCHED();
}

}  // namespace sb::gpu
