#include <cstdint>

#include "attention/gpu/launch/check.cuh"
#include "attention/gpu/launch/params.h"
#include "device/kernel.cuh"

namespace sb::gpu {
namespace {

// Orders the key blocks of one key/value head by falling cost (few heads at a time keep the caches warm, long items
// first keep the multiprocessors equally busy) and cuts those that one worker could not finish beside its share of the
// others: whole columns sweep the queries together and share what the L2 holds, so nothing else is cut. One thread
// block a head; no atomics, so the order is the same in every run.

constexpr int kThreads = 256;
constexpr int kBuckets = 32;  // of cost

// Where count (bucket, thread) lies in shared memory: a gap every run keeps runs in different banks.
constexpr int kCounts = kBuckets * kThreads + kThreads;
__device__ __forceinline__ int place_of(int index) {
  return index + index / kBuckets;
}

struct Arguments {
  const BackwardItem* places;
  const int32_t* offsets;
  int32_t columns, head_places, heads_per_kv, parts, tile, tile_tokens, entry_cost, query_block, block, keys, workers;
  int32_t first_query;
  bool leaves_out;
  int64_t least_share;
  BackwardItem* items;
  SplitColumn* splits;
  WorkCounts* counts;
};

struct Parts {
  int count;         // entries or tiles of the whole column
  int pieces, each;  // each: of a piece, but for the last
  int64_t cost;      // of a piece
};
// So many lengths of columns are kept in shared memory.
constexpr int kKept = 8192;

// Tokens of the sequence's queries that come before all of the keys.
__device__ int queries_before(const Arguments& args, const BackwardItem& place) {
  return max(place.position - args.first_query, 0);
}

__device__ int column_length(const Arguments& args, const BackwardItem& place) {
  if (place.dense)
    return args.heads_per_kv * (place.subtiles / args.tile - queries_before(args, place) / args.tile_tokens);
  int count = 0;
  for (int head = place.head * args.heads_per_kv; head < (place.head + 1) * args.heads_per_kv; ++head) {
    const int at = head / args.parts * args.columns + place.column;
    count += args.offsets[at + (place.keys > args.block ? 2 : 1)] - args.offsets[at];
  }
  return count;
}

// Where one of two key blocks ends the other does not: such a column is cut by query blocks.
__device__ int column_rows(const Arguments& args, const BackwardItem& place) {
  return args.heads_per_kv *
         ((place.subtiles + args.entry_cost - 1) / args.entry_cost - queries_before(args, place) / args.query_block);
}

__device__ int each_cost(const Arguments& args, const BackwardItem& place) {
  return place.dense ? args.tile : args.entry_cost;
}

__device__ Parts cut(const Arguments& args, const BackwardItem& place, int count, int each_cost, int64_t share) {
  const int64_t cost = static_cast<int64_t>(count) * each_cost;
  if (count == 0 && args.leaves_out) return {0, 0, 0, 0};
  const bool by_rows = !place.dense && args.block < kBlock && args.keys == kBlock;
  if (by_rows) count = column_rows(args, place);
  if (cost <= share || count == 0) return {count, 1, count, cost};
  const int wanted = static_cast<int>((cost + share - 1) / share);
  const int each = (count + wanted - 1) / wanted, pieces = (count + each - 1) / each;
  return {count, pieces, each, by_rows ? cost / pieces : static_cast<int64_t>(each) * each_cost};
}

// Sum over the thread block of what comes before this thread; `total` gets the sum of all.
template <typename T>
__device__ T scan_block(T own, T* warp_sums, T& total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  T sum = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T left = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += left;
  }
  __syncthreads();
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  T before = 0;
  total = 0;
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < warp) before += warp_sums[w];
    total += warp_sums[w];
  }
  return before + sum - own;
}

__global__ void __launch_bounds__(kThreads) backward_work_kernel(Arguments args) {
  SB_DYNAMIC_SHARED(int32_t, counts, 8);                   // [bucket][thread]
  int2* kept = reinterpret_cast<int2*>(counts + kCounts);  // of columns: length, cost of an entry
  SB_SHARED(int64_t, sums, [kThreads / 32]);
  const int head = blockIdx.x, heads = gridDim.x, thread = threadIdx.x;
  int64_t own = 0, total;
  for (int i = thread; i < heads * args.head_places; i += kThreads) {
    const int2 column{column_length(args, args.places[i]), each_cost(args, args.places[i])};
    if (i < kKept) kept[i] = column;
    own += static_cast<int64_t>(column.x) * column.y;
  }
  scan_block(own, sums, total);
  const auto share_of = [&](int of_head) {
    return fair_share(total, args.workers, heads * args.head_places, of_head == heads - 1, args.least_share);
  };
  const int64_t share = share_of(head), share_before = share_of(0);
  const auto parts_of = [&](int i, int64_t of_share) {
    const int2 column =
        i < kKept ? kept[i] : int2{column_length(args, args.places[i]), each_cost(args, args.places[i])};
    return cut(args, args.places[i], column.x, column.y, of_share);
  };

  // What the heads before this one take.
  int64_t items_before = 0, splits_before = 0, slots_before = 0;
  own = 0;
  int64_t own_splits = 0;
  int64_t own_slots = 0;
  for (int i = thread; i < head * args.head_places; i += kThreads) {
    const Parts parts = parts_of(i, share_before);
    own += parts.pieces;
    own_splits += parts.pieces > 1;
    own_slots += parts.pieces > 1 ? parts.pieces : 0;
  }
  scan_block(own, sums, items_before);
  scan_block(own_splits, sums, splits_before);
  scan_block(own_slots, sums, slots_before);

  // Each thread takes a run of columns, so that items of one bucket keep their order.
  const int per_thread = (args.head_places + kThreads - 1) / kThreads;
  const int begin = min(thread * per_thread, args.head_places), end = min(begin + per_thread, args.head_places);
  const BackwardItem* places = args.places + static_cast<int64_t>(head) * args.head_places;
  const float bucket_cost = static_cast<float>(share + 1) / kBuckets;
  const auto bucket_of = [&](const Parts& parts) {
    return kBuckets - 1 - min(static_cast<int>(static_cast<float>(parts.cost) / bucket_cost), kBuckets - 1);
  };
  for (int b = 0; b < kBuckets; ++b) counts[place_of(b * kThreads + thread)] = 0;
  own_splits = own_slots = 0;
  for (int i = begin; i < end; ++i) {
    const Parts parts = parts_of(head * args.head_places + i, share);
    counts[place_of(bucket_of(parts) * kThreads + thread)] += parts.pieces;
    own_splits += parts.pieces > 1;
    own_slots += parts.pieces > 1 ? parts.pieces : 0;
  }
  int64_t head_splits, head_slots, head_items;
  int64_t split = splits_before + scan_block(own_splits, sums, head_splits);
  int64_t slot = slots_before + scan_block(own_slots, sums, head_slots);
  // The counts in the order (bucket, thread) to places: this thread sums a run of them.
  constexpr int kRun = kBuckets;
  int64_t run = 0;
  for (int i = 0; i < kRun; ++i) run += counts[place_of(thread * kRun + i)];
  int64_t at = items_before + scan_block(run, sums, head_items);
  for (int i = 0; i < kRun; ++i) {
    const int count = counts[place_of(thread * kRun + i)];
    counts[place_of(thread * kRun + i)] = static_cast<int32_t>(at);
    at += count;
  }
  __syncthreads();
  for (int i = begin; i < end; ++i) {
    BackwardItem item = places[i];
    const Parts parts = parts_of(head * args.head_places + i, share);
    int32_t& to = counts[place_of(bucket_of(parts) * kThreads + thread)];
    if (parts.pieces > 1)
      args.splits[split++] = {item.token,   item.keys,     item.head,    static_cast<int32_t>(slot),
                              parts.pieces, item.position, item.gathered};
    for (int piece = 0; piece < parts.pieces; ++piece) {
      item.begin = piece * parts.each;
      item.count = min(parts.each, parts.count - item.begin);
      item.partial = parts.pieces > 1 ? static_cast<int32_t>(slot++) : -1;
      args.items[to++] = item;
    }
  }
  if (head == heads - 1 && thread == 0)
    *args.counts = {static_cast<int32_t>(items_before + head_items), static_cast<int32_t>(splits_before + head_splits)};
}

}  // namespace

void make_backward_work(const BackwardWorkParams& p, void* stream) {
  if (p.head_places == 0) return;
  const Arguments args{p.places,
                       p.column_offsets,
                       p.columns,
                       p.head_places,
                       p.shape.query_heads / p.shape.kv_heads / p.tiling.heads,
                       p.tiling.parts,
                       p.tiling.tile,
                       p.tiling.tile * p.tiling.tokens,
                       p.tiling.query_block / p.tiling.tokens,
                       p.tiling.query_block,
                       p.tiling.block,
                       p.tiling.keys,
                       p.workers,
                       p.shape.first_query,
                       p.leaves_out,
                       least_share(p.shape.head_dim),
                       p.items,
                       p.splits,
                       p.counts};
  const int columns = p.shape.kv_heads * p.head_places;
  const int bytes = static_cast<int>(kCounts * sizeof(int32_t) + (columns < kKept ? columns : kKept) * sizeof(int2));
  allow_shared_memory(backward_work_kernel, bytes, "shared memory of the work order");
  launch_kernel(backward_work_kernel, {p.shape.kv_heads, kThreads, bytes, static_cast<cudaStream_t>(stream)}, args);
  check(cudaGetLastError(), "order of the backward's work");
}

}  // namespace sb::gpu
